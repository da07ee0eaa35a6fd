// y = x W^T (+ b) for few tokens, with W read once, in the order in which it lies.
//
// W [out, in] is kept in panels of 32 outputs, [out / 32, in / 2, 32, 2]: one instruction multiplies two inputs of 16
// outputs, and two instructions make a row of a panel.  A panel is multiplied with up to 14 tokens in registers (28
// accumulators), and with the next 14 while it is still in the second-level cache.
//
// Prefetches go into the first-level cache, with two exceptions.  Where that cache is small (32 KB), prefetches of several
// tiles would evict the panel that is in use: they go into the second-level cache.  The third tile and later ones do not
// prefetch.
//
// Each output is one sum over the inputs, from first to last, in its own float32 accumulator.  The number of tokens does
// not change that order: a token's result is bitwise the same in every batch.
//
// Processors with matrix tiles (AMX) use the same panels: 16 pairs of inputs of 16 outputs are a tile, 16 tokens of 32
// inputs another, and one instruction multiplies them.  Sums in tiles run in another order than in registers (even and
// odd inputs of each 32 apart), but in the same order for any number of tokens.  Processor and weight decide which of the
// two is used, never the batch.
#include <unistd.h>

#include "common.h"
#include "tiles.h"

enum { PANEL = 32, WHOLE = PANEL / LANES, AHEAD = 1024 };

// Up to TILE tokens are multiplied with PART vectors of a panel in registers, up to FEW tokens with all WHOLE vectors; up
// to ALONE tokens are one tile.
#if defined(HAS_AVX512)
enum { TILE = 14, PART = WHOLE, FEW = 0, ALONE = 9 };
#define COUNTS CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#elif defined(HAS_AVX2)
enum { TILE = 6, PART = 2, FEW = 2, ALONE = TILE };
#define COUNTS CASE_OF_FEW(1) CASE_OF_FEW(2) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
enum { TILE = 6, PART = 4, FEW = 2, ALONE = TILE };
#define COUNTS CASE_OF_FEW(1) CASE_OF_FEW(2) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif
enum { BLOCK = 24 * TILE };
enum { ROOMY = 40 << 10 };  // bytes of a first-level cache

static int is_roomy(void) {
    static int known = -1;
    if (known < 0) known = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= ROOMY;
    return known;
}

EXPORT void tlt_pack(const bf16 *w, int64_t out, int64_t in, bf16 *panels) {
#pragma omp parallel for
    for (int64_t n = 0; n < (out + PANEL - 1) / PANEL * PANEL; n += 16) {
        bf16 *to = panels + n / PANEL * PANEL * in + n % PANEL * 2;
        int64_t count = out - n < 0 ? 0 : out - n < 16 ? out - n : 16, k = 0;
        const bf16 *rows[16];
        for (int64_t i = 0; i < count; i++) rows[i] = w + (n + i) * in;
        if (count == 16)
            for (; k + 32 <= in; k += 32) transpose_pairs(rows, k, to + k * PANEL, 2 * PANEL);
        for (; k < in; k += 2) {
            memset(to + k * PANEL, 0, 16 * 4);
            for (int64_t i = 0; i < count; i++) memcpy(to + k * PANEL + 2 * i, rows[i] + k, 4);
        }
    }
}

INLINE vf plus(vf sum, vf y) { return y + widen(rounded(sum)); }

static __attribute__((noinline)) void finish_some(const float *sums, int64_t size, const bf16 *bias, bf16 *y, int add) {
    for (int64_t i = 0; i < size; i += LANES) {
        vf sum = load_some(sums + i, size - i);
        if (bias) sum += load_bf16_some(bias + i, size - i);
        if (add) sum = plus(sum, load_bf16_some(y + i, size - i));
        store_bf16_some(y + i, sum, size - i);
    }
}

// `count` tokens and the outputs of `vectors` vectors.  `ahead`: memory to prefetch, `lines` of 64 bytes for every two
// inputs; `near`: into the first-level cache
INLINE void tile(const int count, const int vectors, const term *x, const bf16 *panel, const Linear *w, int64_t first,
                 bf16 *y, int add, const bf16 *ahead, const int lines, const int near) {
    vf sums[TILE][WHOLE];
#pragma GCC unroll 14
    for (int t = 0; t < count; t++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) sums[t][j] = (vf){0};
    for (int64_t k = 0; k < w->in; k += 2, panel += 2 * PANEL) {
#pragma GCC unroll 2
        for (int step = 0; step < STEPS; step++) {
            Pairs weights[WHOLE];
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) weights[j] = take(load_u(panel + 2 * LANES * j), step);
            for (int i = 0; i < lines && !step; i++, ahead += 32) {
                if (near) __builtin_prefetch(ahead, 0, 3);
                else __builtin_prefetch(ahead, 0, 2);
            }
#pragma GCC unroll 14
            for (int t = 0; t < count; t++) {
                Term by = term_at(x + t * w->in + k, step);
#pragma GCC unroll 8
                for (int j = 0; j < vectors; j++) sums[t][j] = add_products(sums[t][j], weights[j], by);
            }
        }
    }
    int64_t size = w->out - first < vectors * LANES ? w->out - first : vectors * LANES;
    int plain = !w->bias && size == vectors * LANES;
    float out[PANEL];
#pragma GCC unroll 14
    for (int t = 0; t < count; t++, y += w->out) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) {
            vf sum = sums[t][j];
            if (plain) store_bf16(y + j * LANES, add ? plus(sum, load_bf16(y + j * LANES)) : sum);
            else store(out + j * LANES, sum);
        }
        if (!plain) finish_some(out, size, w->bias ? w->bias + first : NULL, y, add);
    }
}

static void panel_times(const term *x, int64_t tokens, const Linear *w, int64_t first, bf16 *y, int add) {
    const bf16 *panel = w->panels + first * w->in;
    int64_t tiles = tokens > ALONE && tokens <= TILE ? 2 : (tokens + TILE - 1) / TILE, calls = 0;
    int vectors = tokens <= FEW ? WHOLE : PART;
    for (int column = 0; column < WHOLE; column += vectors)
        for (int64_t i = 0, t = 0; i < tiles; i++, calls++) {
            int64_t count = (tokens - t + tiles - i - 1) / (tiles - i), out = first + LANES * column;  // even shares
            const term *x_t = x + t * w->in;
            const bf16 *from = panel + 2 * LANES * column;
            bf16 *y_t = y + t * w->out + out;
            // A tile that is alone works at memory speed.  Of several, the first two fetch the next panel by halves.
            int alone = tiles == 1 && vectors == WHOLE;
            const bf16 *ahead = alone ? panel + AHEAD : panel + (PANEL + (calls ? PANEL / 2 : 0)) * w->in;
            switch (alone && FEW ? -count : alone ? count : calls >= 2 ? count + TILE : is_roomy() ? count + 2 * TILE : count + 3 * TILE) {
#define CASE(n) \
    case n: tile(n, PART, x_t, from, w, out, y_t, add, ahead, 2, 1); break; \
    case n + TILE: tile(n, PART, x_t, from, w, out, y_t, add, ahead, 0, 1); break; \
    case n + 2 * TILE: tile(n, PART, x_t, from, w, out, y_t, add, ahead, 1, 1); break; \
    case n + 3 * TILE: tile(n, PART, x_t, from, w, out, y_t, add, ahead, 1, 0); break;
#define CASE_OF_FEW(n) case -n: tile(n, WHOLE, x_t, from, w, out, y_t, add, ahead, 2, 1); break;
                COUNTS
            }
            t += count;
        }
}

#ifdef HAS_TILES
enum { ROWS = 16, DEPTH = 32, TILES_AHEAD = 2 };

INLINE void finish_tile(const float *sums, int rows, const Linear *w, int64_t first, bf16 *y, int add) {
    int64_t size = w->out - first < 16 ? w->out - first : 16;
    for (int t = 0; t < rows; t++)
        finish_some(sums + 16 * t, size, w->bias ? w->bias + first : NULL, y + t * w->out + first, add);
}

// `ahead`: what to fetch meanwhile, `lines` of 64 bytes for every DEPTH inputs, into the first-level cache if `near`
static void panel_tiles(const bf16 *x, int rows, int more, const Linear *w, int64_t first, bf16 *y, int add,
                        const bf16 *ahead, int lines, int near) {
    const bf16 *panel = w->panels + first * w->in;
    int64_t stride = sizeof(bf16) * w->in;
    float sums[16 * 16] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    if (more) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < w->in; k += DEPTH, panel += DEPTH * PANEL) {
        _tile_loadd(6, panel, 128);
        _tile_loadd(4, x + k, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + 32, 128);
        _tile_dpbf16ps(1, 4, 7);
        if (more) {
            _tile_loadd(5, x + ROWS * w->in + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int i = 0; i < lines; i++) {
            if (near) __builtin_prefetch(ahead + 32 * i, 0, 3);
            else __builtin_prefetch(ahead + 32 * i, 0, 2);
        }
        ahead += DEPTH * PANEL;
    }
    _tile_stored(0, sums, 64);
    finish_tile(sums, rows, w, first, y, add);
    _tile_stored(1, sums, 64);
    finish_tile(sums, rows, w, first + 16, y, add);
    if (!more) return;
    _tile_stored(2, sums, 64);
    finish_tile(sums, more, w, first, y + ROWS * w->out, add);
    _tile_stored(3, sums, 64);
    finish_tile(sums, more, w, first + 16, y + ROWS * w->out, add);
}

static void linear_tiles(const bf16 *x, int64_t tokens, const Linear *w, bf16 *y, int add) {
    int64_t groups = (tokens + 2 * ROWS - 1) / (2 * ROWS), share = (DEPTH + groups - 1) / groups;
#pragma omp parallel
    {
        int64_t shape = 0;  // a configuration lasts for all panels of up to 32 tokens
#pragma omp for
        for (int64_t first = 0; first < w->out; first += PANEL)
            for (int64_t t = 0, group = 0; t < tokens; t += 2 * ROWS, group++) {
                int64_t left = tokens - t, rows = left < ROWS ? left : ROWS, more = left - rows < ROWS ? left - rows : ROWS;
                if (shape != 100 * rows + more) configure_tiles(rows, more);
                shape = 100 * rows + more;
                // Of several groups, each fetches its share of the next panel.
                const bf16 *panel = w->panels + first * w->in;
                const bf16 *ahead = groups == 1 ? panel + TILES_AHEAD * DEPTH * PANEL : panel + PANEL * w->in + group * share * 32;
                panel_tiles(x + t * w->in, rows, more, w, first, y + t * w->out, add, ahead,
                            group * share < DEPTH ? share : 0, tokens <= ROWS);
            }
        _tile_release();
    }
}
#endif

static __thread void *kept;
static __thread size_t kept_size;

void linear(const bf16 *x, int64_t tokens, const Linear *w, bf16 *y, int add) {
    for (int64_t start = 0; start < tokens; start += BLOCK) {  // inputs of a block stay in the second-level cache
        int64_t count = tokens - start < BLOCK ? tokens - start : BLOCK;
        const bf16 *x_s = x + start * w->in;
        bf16 *y_s = y + start * w->out;
#ifdef HAS_TILES
        if (w->in % DEPTH == 0 && has_tiles()) {
            linear_tiles(x_s, count, w, y_s, add);
            continue;
        }
#endif
        const term *terms = as_terms(x_s, count * w->in, &kept, &kept_size);
#pragma omp parallel for
        for (int64_t first = 0; first < w->out; first += PANEL) panel_times(terms, count, w, first, y_s, add);
    }
}

EXPORT void tlt_linear(const bf16 *x, int64_t tokens, const Linear *w, bf16 *y) { linear(x, tokens, w, y, 0); }

// Which instructions products run on here
EXPORT const char *tlt_isa(void) {
#ifdef HAS_TILES
    if (has_tiles()) return "amx";
#endif
#if defined(HAS_AVX512) && defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(HAS_AVX512)
    return "avx512";
#elif defined(HAS_AVX2)
    return "avx2";
#elif defined(HAS_NEON)
    return "neon";
#else
    return "portable";
#endif
}
