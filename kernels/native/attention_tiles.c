// `attention.c` with matrix tiles: scores and weighted values of 16 rows are products of tiles.
//
// The places of all tokens of a group are taken in one go: to the end of their chain where their paths are one, or, of
// a tree, the whole blocks of the known part; there each token's own tail follows.
#include "attention.h"

#ifdef HAS_TILES
enum { BLOCK = 32, TILE = TILE_ROWS };  // places of a block of values, rows of a tile

static __thread void *kept;
static __thread size_t kept_size;

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

// what is computed for the rows of a group, and where they look
typedef struct {
    int64_t blocks;   // places that all rows share, in whole blocks
    int64_t columns;  // places of a row, in whole blocks
    bf16 *pairs;      // [columns, d] values, see `pair_up`
    bf16 *queries;    // [rows, d]
    bf16 *weights;    // [rows, columns]
    float *scores;    // [rows, columns]
    float *sums;      // [rows, d]
    float *totals;    // [rows] sums of weights
    Sequence keys, values;
} Room;

static Room make_room(const Group *g, int64_t chain) {
    const Layout *layout = g->layout;
    int64_t known = layout->known[g->who[0]], rows = g->count * g->grouped, dim = g->dim, offset = offset_in_cache(g);
    int64_t all = chain < 0 ? known / BLOCK * BLOCK : known + layout->length[chain];
    int64_t columns = round_up(known + layout->width, BLOCK);
    int64_t room = round_up(rows + (chain < 0 ? TILE : 0), TILE);  // tiles of a tree's tails begin at any row
    size_t bytes = sizeof(bf16) * (room * columns + room * dim + columns * dim) +
                   sizeof(float) * (room * columns + room * dim + room);
    Room made = {.blocks = round_up(all, BLOCK), .columns = columns, .pairs = scratch(&kept, &kept_size, bytes)};
    made.queries = made.pairs + columns * dim;
    made.weights = made.queries + room * dim;
    made.scores = (float *)(made.weights + room * columns);
    made.sums = made.scores + room * columns;
    made.totals = made.sums + room * dim;
    made.keys = made.values = (Sequence){.known = known, .length = all, .dim = dim};
    made.keys.path = made.values.path = chain < 0 ? NULL : layout->path + chain * layout->width;
    made.keys.base = g->cache->keys + offset;
    made.values.base = g->cache->values + offset;
    memset(made.queries + rows * dim, 0, sizeof(bf16) * (room - rows) * dim);
    for (int64_t r = 0; r < rows; r++) memcpy(made.queries + r * dim, query_of(g, r), sizeof(bf16) * dim);
    return made;
}

// a group's sequence, from here on as token `t` sees it; returns its end
INLINE int64_t follow(Sequence *sequence, const Group *g, int64_t t) {
    sequence->path = g->layout->path + g->who[t] * g->layout->width;
    return sequence->length = sequence->known + g->layout->length[g->who[t]];
}

// scores of a tree token's own tail
static void score_tail(const Room *room, int64_t first, int64_t end, int64_t grouped) {
    float own[TILE * KEYS] __attribute__((aligned(64)));
    for (int64_t c = room->blocks; c < end; c += KEYS)
        for (int64_t g = 0; g < grouped; g += TILE) {
            score_tiles(&room->keys, c, room->queries + (first + g) * room->keys.dim, TILE, own, KEYS);
            for (int64_t i = 0; i < TILE && g + i < grouped; i++)
                store(room->scores + (first + g + i) * room->columns + c, load(own + KEYS * i));
        }
}

// its values; they take the place of the shared ones, which are mixed already
static void mix_tail(const Room *room, int64_t first, int64_t end, int64_t grouped) {
    int64_t dim = room->values.dim;
    float own[TILE * 128] __attribute__((aligned(64)));
    for (int64_t c = room->blocks; c < end; c += BLOCK) {
        pair_up(&room->values, c, room->pairs);
        for (int64_t g = 0; g < grouped; g += TILE) {
            int64_t mine = grouped - g < TILE ? grouped - g : TILE;
            float *sums = room->sums + (first + g) * dim;
            memcpy(own, sums, sizeof(float) * mine * dim);
            mix_tiles(room->weights + (first + g) * room->columns + c, room->columns, room->pairs, BLOCK, dim, own, 1);
            memcpy(sums, own, sizeof(float) * mine * dim);
        }
    }
}

void attend_with_tiles(const Group *g) {
    int64_t chain = end_of_chain(g->layout, g->who, g->count), rows = g->count * g->grouped, dim = g->dim;
    Room room = make_room(g, chain);
    int64_t blocks = room.blocks, columns = room.columns;
    float scale = 1.0f / sqrtf((float)dim);
    for (int64_t c = 0; c < blocks; c += KEYS) {
        fetch_ahead(room.keys.base, room.values.base, c, dim);
        score_tiles(&room.keys, c, room.queries, round_up(rows, TILE), room.scores + c, columns);
    }
    for (int64_t t = 0; t < g->count; t++) {
        int64_t end = follow(&room.keys, g, t), first = t * g->grouped;
        score_tail(&room, first, end, g->grouped);
        int64_t weighed = round_up(end, KEYS), most = end > blocks ? round_up(end, BLOCK) : blocks;
        for (int64_t r = first; r < first + g->grouped; r++) {
            room.totals[r] = weigh(room.scores + r * columns, end, scale, room.weights + r * columns);
            memset(room.weights + r * columns + weighed, 0, sizeof(bf16) * (most - weighed));
        }
    }
    for (int64_t c = 0; c < blocks; c += BLOCK) pair_up(&room.values, c, room.pairs + c * dim);
    for (int64_t r = 0; r < rows; r += TILE)
        mix_tiles(room.weights + r * columns, columns, room.pairs, blocks, dim, room.sums + r * dim, 0);
    for (int64_t t = 0; t < g->count && chain < 0; t++) {
        int64_t end = follow(&room.values, g, t);
        mix_tail(&room, t * g->grouped, end, g->grouped);
    }
    for (int64_t r = 0; r < rows; r++) write_row(g, r, room.sums + r * dim, room.totals[r]);
}
#endif
