// Attention of new tokens over a slot cache.  A token sees the known places of its slot, then its own path: the draft
// tokens on the way to it, or, in a prompt, the tokens before it in its block.
//
//     out = sum_c p_c v_c,   p_c = e^(s_c - max s) / sum,   s_c = q . k_c / sqrt(d)
//
// e^(s - max s) is rounded to bfloat16 before it meets the values, as FlashAttention does; sums are float32.
// Places are taken 16 at a time.  The blocks that lie wholly in the known part are shared by all tokens of the slot
// that know as much; the rest of the known part and the path follow, token by token, as if they lay behind one another.
// So sums run over the sequence in its own order, wherever a token lies in the cache and whoever else is in the pass:
// a token's result is the same, bit for bit, in every batch and every draft tree.
//
// With matrix tiles the blocks of a sequence have 32 places, scores and weighted values of 16 rows are products of tiles,
// and tokens whose paths are one chain are taken together to its end: what a token does not see weighs 0.
#include <math.h>

#include "common.h"
#include "tiles.h"

enum { KEYS = 16, PARTS = KEYS / LANES, AHEAD = 32 };

// Rows that share a block of keys in registers; rows and vectors that share values
#if defined(HAS_AVX512)
enum { ROWS = 12, MIXED = 6, VECTORS = 4 };
#elif defined(HAS_AVX2)
enum { ROWS = 6, MIXED = 3, VECTORS = 4 };
#else
enum { ROWS = 4, MIXED = 3, VECTORS = 4 };
#endif
enum { FEATURES = VECTORS * LANES };  // of a head that are mixed at a time
enum { CHAINS = STEPS == 1 ? 2 : 1 };  // sums of a score

static __thread void *kept;
static __thread size_t kept_size;

// 16 keys of d features -> [d / 2, 16] pairs of features
INLINE void transpose(const bf16 *const keys[KEYS], int64_t dim, bf16 *out) {
    for (int64_t from = 0; from < dim; from += 32, out += KEYS * 32) transpose_pairs(keys, from, out, 32);
}

// two sums each, of every other pair: with few queries one alone would wait for itself
INLINE void dots(const int count, const term *const q[], const bf16 *keys, int64_t dim, float *const out[]) {
    vf sums[ROWS][CHAINS][PARTS];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int chain = 0; chain < CHAINS; chain++)
#pragma GCC unroll 4
            for (int j = 0; j < PARTS; j++) sums[r][chain][j] = (vf){0};
    for (int64_t i = 0; i < dim; i += 2 * CHAINS)
#pragma GCC unroll 2
        for (int chain = 0; chain < CHAINS; chain++)
#pragma GCC unroll 2
            for (int step = 0; step < STEPS; step++) {
                Pairs pairs[PARTS];
#pragma GCC unroll 4
                for (int j = 0; j < PARTS; j++)
                    pairs[j] = take(load_u(keys + (i + 2 * chain) * KEYS + 2 * LANES * j), step);
#pragma GCC unroll 12
                for (int r = 0; r < count; r++) {
                    Term by = term_at(q[r] + i + 2 * chain, step);
#pragma GCC unroll 4
                    for (int j = 0; j < PARTS; j++)
                        sums[r][chain][j] = add_products(sums[r][chain][j], pairs[j], by);
                }
            }
#pragma GCC unroll 12
    for (int r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int j = 0; j < PARTS; j++)
            store(out[r] + j * LANES, CHAINS == 1 ? sums[r][0][j] : sums[r][0][j] + sums[r][CHAINS - 1][j]);
}

// unscaled scores of `rows` queries against one block of keys
static void score(const bf16 *const keys[KEYS], const term *const *q, float *const *scores, int64_t rows, int64_t at,
                  int64_t dim) {
    bf16 turned[KEYS * 256];
    transpose(keys, dim, turned);
    for (int64_t first = 0; first < rows; first += ROWS) {
        float *out[ROWS];
        int64_t count = rows - first < ROWS ? rows - first : ROWS;
        for (int64_t r = 0; r < count; r++) out[r] = scores[first + r] + at;
        switch (count) {
#define CASE(n) case n: dots(n, q + first, turned, dim, out); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#if defined(HAS_AVX512) || defined(HAS_AVX2)
            CASE(5) CASE(6)
#endif
#if defined(HAS_AVX512)
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
#undef CASE
        }
    }
}

// weights e^(s - max), s = dots scale, in bfloat16, 0 up to the end of a block; returns what they sum up to, unrounded
static float weigh(const float *dots, int64_t count, float scale, bf16 *weights) {
    vf top = splat(-INFINITY), total = {0};
    for (int64_t c = 0; c < count; c += LANES)
        top = where(first_lanes(count - c), larger(top, load(dots + c) * scale), top);
    top = splat(largest_of(top));
    int64_t c = 0;
    for (; c < count; c += LANES) {
        vf p = where(first_lanes(count - c), exponential_of(load(dots + c) * scale - top), (vf){0});
        total += p;
        store_bf16(weights + c, p);
    }
    for (; c % KEYS; c += LANES) store_bf16(weights + c, (vf){0});
    return sum_of(total);
}

// LANES features of two values each, vector by vector
INLINE void take_two(const bf16 *one, const bf16 *two, int step, Pairs pairs[VECTORS]) {
#if defined(HAS_AVX512) && defined(__AVX512BF16__)
    static const uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i low = _mm512_loadu_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j += 2) {
        __m512i a = _mm512_loadu_si512(one + LANES * j), b = _mm512_loadu_si512(two + LANES * j);
        pairs[j] = (__m512bh)_mm512_permutex2var_epi16(a, low, b);
        pairs[j + 1] = (__m512bh)_mm512_permutex2var_epi16(a, high, b);
    }
#else
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) pairs[j] = load_bf16((step ? two : one) + LANES * j);
#endif
}

// out[r] += sum over `count` values, an even number, of weights[r][c] v_c, FEATURES of them; two values at a time
INLINE void mix(const int rows, const bf16 *const *values, const bf16 *run, int64_t dim, int64_t count,
                const term *const *weights, int64_t at, float *const *out, int64_t feature) {
    vf sums[MIXED][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) sums[r][j] = load(out[r] + feature + LANES * j);
    for (int64_t c = 0; c < count; c += 2) {
        const bf16 *one = values ? values[c] : run + c * dim, *two = values ? values[c + 1] : one + dim;
#pragma GCC unroll 2
        for (int step = 0; step < STEPS; step++) {
            Pairs pairs[VECTORS];
            take_two(one + feature, two + feature, step, pairs);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                Term by = term_at(weights[r] + at + c, step);
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) sums[r][j] = add_products(sums[r][j], pairs[j], by);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) store(out[r] + feature + LANES * j, sums[r][j]);
}

static void mix_rows(int64_t rows, int64_t dim, const bf16 *const *values, const bf16 *run, int64_t count,
                     term *const *weights, int64_t at, float *const *out) {
    for (int64_t first = 0; first < rows; first += MIXED)
        for (int64_t feature = 0; feature < dim; feature += FEATURES) {
            int64_t left = rows - first < MIXED ? rows - first : MIXED;
            const term *const *w = (const term *const *)weights + first;
            switch (left) {
#define CASE(n) case n: mix(n, values, run, dim, count, w, at, out + first, feature); break;
                CASE(1) CASE(2) CASE(3)
#if defined(HAS_AVX512)
                CASE(4) CASE(5) CASE(6)
#endif
#undef CASE
            }
        }
}

// `who` [count]: tokens that share slot and known part
static void attend_together(const bf16 *q, int64_t row_stride, const Layout *layout, const Cache *cache,
                            const int64_t *who, int64_t count, int64_t head, int64_t grouped, int64_t dim, bf16 *out,
                            int64_t out_stride) {
    int64_t slot = layout->slot[who[0]], known = layout->known[who[0]], shared = known / KEYS * KEYS;
    int64_t rows = count * grouped;
    const bf16 *keys = cache->keys + slot * cache->slot_stride + head * cache->head_stride;
    const bf16 *values = cache->values + slot * cache->slot_stride + head * cache->head_stride;
    int64_t columns = (known + layout->width + KEYS - 1) / KEYS * KEYS, tail_most = columns - shared;
    size_t size = sizeof(float) * rows * (columns + dim + 2) + sizeof(term) * rows * (columns + dim) +
                  sizeof(bf16) * columns + sizeof(void *) * (4 * rows + 2 * (tail_most + KEYS)) + 64;
    float *numbers = scratch(&kept, &kept_size, size), *sums = numbers + rows * columns, *totals = sums + rows * dim;
    term *asked = (term *)(totals + 2 * rows), *weighed = asked + rows * dim;
    const term **queries = (const term **)(weighed + rows * columns);
    float **scores = (float **)(queries + rows), **mixed = scores + rows;
    term **weights = (term **)(mixed + rows);
    const bf16 **tail_keys = (const bf16 **)(weights + rows), **tail_values = tail_keys + tail_most + KEYS;
    bf16 *rounded_weights = (bf16 *)(tail_values + tail_most + KEYS);
    float scale = 1.0f / sqrtf((float)dim);
    memset(sums, 0, sizeof(float) * rows * dim);
    for (int64_t r = 0; r < rows; r++) {
        to_terms(q + who[r / grouped] * row_stride + (head * grouped + r % grouped) * dim, dim, asked + r * dim);
        queries[r] = asked + r * dim;
        scores[r] = numbers + r * columns;
        mixed[r] = sums + r * dim;
        weights[r] = weighed + r * columns;
    }
    for (int64_t c = 0; c < shared; c += KEYS) {
        const bf16 *block[KEYS];
        for (int i = 0; i < KEYS; i++) block[i] = keys + (c + i) * dim;
        for (int64_t i = 0; i < KEYS * dim; i += 32) {  // short runs of memory: the processor's own guess comes too late
            __builtin_prefetch(keys + (c + AHEAD) * dim + i, 0, 3);
            __builtin_prefetch(values + c * dim + i, 0, 2);
        }
        score(block, queries, scores, rows, c, dim);
    }
    for (int pass = 0; pass < 2; pass++) {  // scores of the tails; then, after the shared part, their values
        if (pass) mix_rows(rows, dim, NULL, values, shared, weights, 0, mixed);
        for (int64_t t = 0; t < count; t++) {
            const int64_t *path = layout->path + who[t] * layout->width;
            int64_t rest = known - shared, tail = rest + layout->length[who[t]];
            float **own = scores + t * grouped;
            for (int64_t c = 0; c < tail; c++) {
                int64_t place = c < rest ? shared + c : path[c - rest];
                tail_keys[c] = keys + place * dim;
                tail_values[c] = values + place * dim;
            }
            for (int64_t c = tail; c % KEYS; c++) {  // weighs nothing
                tail_keys[c] = tail_keys[0];
                tail_values[c] = tail_values[0];
            }
            if (pass) {
                mix_rows(grouped, dim, tail_values, NULL, (tail + 1) / 2 * 2, weights + t * grouped, shared, mixed + t * grouped);
                continue;
            }
            for (int64_t c = 0; c < tail; c += KEYS)
                score(tail_keys + c, queries + t * grouped, own, grouped, shared + c, dim);
            for (int64_t g = 0; g < grouped; g++) {
                totals[t * grouped + g] = weigh(own[g], shared + tail, scale, rounded_weights);
                to_terms(rounded_weights, (shared + tail + KEYS - 1) / KEYS * KEYS, weights[t * grouped + g]);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        bf16 *to = out + who[r / grouped] * out_stride + (head * grouped + r % grouped) * dim;
        float over = 1.0f / totals[r];
        for (int64_t j = 0; j < dim; j += LANES) store_bf16(to + j, load(mixed[r] + j) * over);
    }
}

#ifdef HAS_TILES
enum { BLOCK = 32, TILE = 16 };  // places of a block, rows of a tile

// places of one sequence: the known ones as they are, then a path
typedef struct {
    const bf16 *base;
    const int64_t *path;
    int64_t known, length, dim;
} Sequence;

INLINE const bf16 *at_place(const Sequence *s, int64_t i) {
    if (i >= s->length) i = 0;  // weighs nothing
    return s->base + (i < s->known ? i : s->path[i - s->known]) * s->dim;
}

// scores of places from .. from + 15 for `rows` queries [rows, dim], a multiple of TILE
static void score_tiles(const Sequence *keys, int64_t from, const bf16 *queries, int64_t rows, float *scores, int64_t stride) {
    const bf16 *block[KEYS];
    bf16 turned[KEYS * 128] __attribute__((aligned(64)));
    if (from + KEYS <= keys->known)
        for (int i = 0; i < KEYS; i++) block[i] = keys->base + (from + i) * keys->dim;
    else
        for (int i = 0; i < KEYS; i++) block[i] = at_place(keys, from + i);
    transpose(block, keys->dim, turned);
    for (int64_t r = 0; r < rows; r += TILE) {
        _tile_zero(0);
        for (int64_t i = 0; i < keys->dim; i += 32) {
            _tile_loadd(4, queries + r * keys->dim + i, sizeof(bf16) * keys->dim);
            _tile_loadd(6, turned + i * KEYS, 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores + r * stride, sizeof(float) * stride);
    }
}

// values of places from .. from + 31 as pairs of places, [dim / 16, 16, 16, 2]
INLINE void pair_up(const Sequence *values, int64_t from, bf16 *pairs) {
    static const uint16_t LOW[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    __m512i low = _mm512_loadu_si512(LOW), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    int plain = from + BLOCK <= values->known;
    for (int i = 0; i < BLOCK / 2; i++) {
        const bf16 *one = plain ? values->base + (from + 2 * i) * values->dim : at_place(values, from + 2 * i);
        const bf16 *two = plain ? one + values->dim : at_place(values, from + 2 * i + 1);
        for (int64_t j = 0; j < values->dim; j += 32) {
            __m512i a = _mm512_loadu_si512(one + j), b = _mm512_loadu_si512(two + j);
            _mm512_store_si512(pairs + j * BLOCK + 32 * i, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(pairs + (j + 16) * BLOCK + 32 * i, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

// sums [TILE, dim] = weights [TILE, count] values, `count` places in whole blocks of pairs; or, to `go_on`, +=
static void mix_tiles(const bf16 *weights, int64_t stride, const bf16 *pairs, int64_t count, int64_t dim, float *sums, int go_on) {
    for (int64_t j = 0; j < dim; j += 64, sums += 64, pairs += 64 * BLOCK) {
        if (go_on) {
            _tile_loadd(0, sums, sizeof(float) * dim);
            _tile_loadd(1, sums + 16, sizeof(float) * dim);
            _tile_loadd(2, sums + 32, sizeof(float) * dim);
            _tile_loadd(3, sums + 48, sizeof(float) * dim);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t c = 0; c < count; c += BLOCK) {
            const bf16 *block = pairs + c * dim;
            _tile_loadd(4, weights + c, sizeof(bf16) * stride);
            _tile_loadd(6, block, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, block + 16 * BLOCK, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, block + 32 * BLOCK, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, block + 48 * BLOCK, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, sums, sizeof(float) * dim);
        _tile_stored(1, sums + 16, sizeof(float) * dim);
        _tile_stored(2, sums + 32, sizeof(float) * dim);
        _tile_stored(3, sums + 48, sizeof(float) * dim);
    }
}

// the token whose path all others' are beginnings of, or -1
static int64_t end_of_chain(const Layout *layout, const int64_t *who, int64_t count) {
    int64_t longest = who[0];
    for (int64_t t = 1; t < count; t++)
        if (layout->length[who[t]] > layout->length[longest]) longest = who[t];
    const int64_t *path = layout->path + longest * layout->width;
    for (int64_t t = 0; t < count; t++)
        if (memcmp(path, layout->path + who[t] * layout->width, sizeof(int64_t) * layout->length[who[t]])) return -1;
    return longest;
}

INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// As `attend_together`.  The places of `all` tokens are taken in one go: to the end of their chain, or, of a tree, the
// whole blocks of the known part; there each token's own tail follows.
static void attend_tiles(const bf16 *q, int64_t row_stride, const Layout *layout, const Cache *cache, const int64_t *who,
                         int64_t count, int64_t head, int64_t grouped, int64_t dim, bf16 *out, int64_t out_stride) {
    int64_t slot = layout->slot[who[0]], known = layout->known[who[0]], rows = count * grouped;
    int64_t chain = end_of_chain(layout, who, count);
    int64_t all = chain < 0 ? known / BLOCK * BLOCK : known + layout->length[chain], blocks = round_up(all, BLOCK);
    int64_t columns = round_up(known + layout->width, BLOCK), room = round_up(rows + (chain < 0 ? TILE : 0), TILE);  // of a tree, tiles begin at any row
    size_t bytes = sizeof(bf16) * (room * columns + room * dim + columns * dim) + sizeof(float) * (room * columns + room * dim + room);
    bf16 *pairs = scratch(&kept, &kept_size, bytes), *queries = pairs + columns * dim, *weights = queries + room * dim;
    float *scores = (float *)(weights + room * columns), *sums = scores + room * columns, *totals = sums + room * dim;
    int64_t offset = slot * cache->slot_stride + head * cache->head_stride;
    Sequence keys = {cache->keys + offset, chain < 0 ? NULL : layout->path + chain * layout->width, known, all, dim};
    Sequence values = keys;
    values.base = cache->values + offset;
    float scale = 1.0f / sqrtf((float)dim);
    memset(queries + rows * dim, 0, sizeof(bf16) * (room - rows) * dim);
    for (int64_t r = 0; r < rows; r++)
        memcpy(queries + r * dim, q + who[r / grouped] * row_stride + (head * grouped + r % grouped) * dim, sizeof(bf16) * dim);
    for (int64_t c = 0; c < blocks; c += KEYS) {
        for (int64_t i = 0; i < KEYS * dim; i += 32) {
            __builtin_prefetch(keys.base + (c + AHEAD) * dim + i, 0, 3);
            __builtin_prefetch(values.base + c * dim + i, 0, 2);
        }
        score_tiles(&keys, c, queries, round_up(rows, TILE), scores + c, columns);
    }
    for (int64_t t = 0; t < count; t++) {
        int64_t end = known + layout->length[who[t]], first = t * grouped;
        keys.path = layout->path + who[t] * layout->width;
        keys.length = end;
        float own[TILE * KEYS] __attribute__((aligned(64)));
        for (int64_t c = blocks; c < end; c += KEYS)  // of a tree
            for (int64_t g = 0; g < grouped; g += TILE) {
                score_tiles(&keys, c, queries + (first + g) * dim, TILE, own, KEYS);
                for (int64_t i = 0; i < TILE && g + i < grouped; i++)
                    store(scores + (first + g + i) * columns + c, load(own + KEYS * i));
            }
        for (int64_t g = first; g < first + grouped; g++) {
            totals[g] = weigh(scores + g * columns, end, scale, weights + g * columns);
            int64_t weighed = round_up(end, KEYS), most = end > blocks ? round_up(end, BLOCK) : blocks;
            memset(weights + g * columns + weighed, 0, sizeof(bf16) * (most - weighed));
        }
    }
    for (int64_t c = 0; c < blocks; c += BLOCK) pair_up(&values, c, pairs + c * dim);
    for (int64_t r = 0; r < rows; r += TILE)
        mix_tiles(weights + r * columns, columns, pairs, blocks, dim, sums + r * dim, 0);
    for (int64_t t = 0; t < count && chain < 0; t++) {
        int64_t end = known + layout->length[who[t]], first = t * grouped;
        values.path = layout->path + who[t] * layout->width;
        values.length = end;
        for (int64_t c = blocks; c < end; c += BLOCK) {
            float own[TILE * 128] __attribute__((aligned(64)));
            pair_up(&values, c, pairs);
            for (int64_t g = 0; g < grouped; g += TILE) {
                int64_t mine = grouped - g < TILE ? grouped - g : TILE;
                memcpy(own, sums + (first + g) * dim, sizeof(float) * mine * dim);
                mix_tiles(weights + (first + g) * columns + c, columns, pairs, BLOCK, dim, own, 1);
                memcpy(sums + (first + g) * dim, own, sizeof(float) * mine * dim);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        bf16 *to = out + who[r / grouped] * out_stride + (head * grouped + r % grouped) * dim;
        float over = 1.0f / totals[r];
        for (int64_t j = 0; j < dim; j += LANES) store_bf16(to + j, load(sums + r * dim + j) * over);
    }
}
#endif

// tokens by slot, otherwise in their order
static void by_slot(const Layout *layout, int64_t *order) {
    int64_t slots = 0;
    for (int64_t t = 0; t < layout->tokens; t++)
        if (layout->slot[t] >= slots) slots = layout->slot[t] + 1;
    int64_t *next = calloc(slots + 1, sizeof(int64_t));
    for (int64_t t = 0; t < layout->tokens; t++) next[layout->slot[t] + 1]++;
    for (int64_t s = 0; s < slots; s++) next[s + 1] += next[s];
    for (int64_t t = 0; t < layout->tokens; t++) order[next[layout->slot[t]]++] = t;
    free(next);
}

void attention(const bf16 *q, int64_t row_stride, const Layout *layout, const Cache *cache, int64_t heads,
               int64_t kv_heads, int64_t dim, bf16 *out) {
    int64_t groups = 0, *order = malloc(sizeof(int64_t) * (2 * layout->tokens + 1)), *start = order + layout->tokens;
    by_slot(layout, order);
    for (int64_t i = 0; i < layout->tokens; i++) {
        int64_t t = order[i], before = i ? order[i - 1] : -1;
        if (!i || layout->slot[t] != layout->slot[before] || layout->known[t] != layout->known[before]) start[groups++] = i;
    }
    start[groups] = layout->tokens;
#define ATTEND(attend) \
    for (int64_t work = 0; work < groups * kv_heads; work++) { \
        int64_t group = work / kv_heads; \
        attend(q, row_stride, layout, cache, order + start[group], start[group + 1] - start[group], work % kv_heads, \
               heads / kv_heads, dim, out, heads * dim); \
    }
#ifdef HAS_TILES
    if (has_tiles()) {
#pragma omp parallel
        {
            configure_tiles(TILE, TILE);
#pragma omp for
            ATTEND(attend_tiles)
            _tile_release();
        }
        free(order);
        return;
    }
#endif
#pragma omp parallel for
    ATTEND(attend_together)
    free(order);
}
