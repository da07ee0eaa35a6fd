// `attention.c` with vectors: rows that share a block of keys or values meet it in registers.
#include "attention.h"

// Rows that share a block of keys in registers; rows and vectors that share values
#if defined(HAS_AVX512)
enum { ROWS = 12, MIXED = 6, VECTORS = 4 };
#elif defined(HAS_AVX2)
enum { ROWS = 6, MIXED = 3, VECTORS = 4 };
#else
enum { ROWS = 4, MIXED = 3, VECTORS = 4 };
#endif
enum { FEATURES = VECTORS * LANES };  // of a head that are mixed at a time
enum { PARTS = KEYS / LANES };
enum { CHAINS = STEPS == 1 ? 2 : 1 };  // sums of a score

static __thread void *kept;
static __thread size_t kept_size;

// Two sums each, of every other pair: with few queries, one sum alone would wait for itself.
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

// what is computed for the R rows of a group
typedef struct {
    int64_t columns;           // places of a row, in whole blocks
    float *totals;             // [R] sums of weights
    const term **queries;      // [R] -> [d]
    float **scores, **mixed;   // [R] -> [columns], [d]
    term **weights;            // [R] -> [columns]
    const bf16 **keys, **values;  // of one token's tail
    bf16 *rounded;             // [columns] weights of one row
} Room;

static Room make_room(const Group *g) {
    int64_t rows = g->count * g->grouped, known = g->layout->known[g->who[0]], dim = g->dim;
    int64_t columns = (known + g->layout->width + KEYS - 1) / KEYS * KEYS, tail = columns - known / KEYS * KEYS + KEYS;
    size_t size = sizeof(float) * rows * (columns + dim + 2) + sizeof(term) * rows * (columns + dim) +
                  sizeof(bf16) * columns + sizeof(void *) * (4 * rows + 2 * tail) + 64;
    float *numbers = scratch(&kept, &kept_size, size), *sums = numbers + rows * columns;
    Room room = {.columns = columns, .totals = sums + rows * dim};
    term *asked = (term *)(room.totals + 2 * rows), *weighed = asked + rows * dim;
    room.queries = (const term **)(weighed + rows * columns);
    room.scores = (float **)(room.queries + rows);
    room.mixed = room.scores + rows;
    room.weights = (term **)(room.mixed + rows);
    room.keys = (const bf16 **)(room.weights + rows);
    room.values = room.keys + tail;
    room.rounded = (bf16 *)(room.values + tail);
    memset(sums, 0, sizeof(float) * rows * dim);
    for (int64_t r = 0; r < rows; r++) {
        to_terms(query_of(g, r), dim, asked + r * dim);
        room.queries[r] = asked + r * dim;
        room.scores[r] = numbers + r * columns;
        room.mixed[r] = sums + r * dim;
        room.weights[r] = weighed + r * columns;
    }
    return room;
}

// Where keys and values of a token's tail lie: the known places behind the shared ones, then its path, to the end of a
// block.  Returns how many they are.
static int64_t gather_tail(const Group *g, int64_t t, int64_t shared, const Room *room) {
    const int64_t *path = g->layout->path + g->who[t] * g->layout->width;
    const bf16 *keys = g->cache->keys + offset_in_cache(g), *values = g->cache->values + offset_in_cache(g);
    int64_t rest = g->layout->known[g->who[t]] - shared, tail = rest + g->layout->length[g->who[t]];
    for (int64_t c = 0; c < tail; c++) {
        int64_t place = c < rest ? shared + c : path[c - rest];
        room->keys[c] = keys + place * g->dim;
        room->values[c] = values + place * g->dim;
    }
    for (int64_t c = tail; c % KEYS; c++) {  // weighs nothing
        room->keys[c] = room->keys[0];
        room->values[c] = room->values[0];
    }
    return tail;
}

void attend_with_vectors(const Group *g) {
    int64_t known = g->layout->known[g->who[0]], shared = known / KEYS * KEYS, dim = g->dim, grouped = g->grouped;
    int64_t rows = g->count * grouped;
    const bf16 *keys = g->cache->keys + offset_in_cache(g), *values = g->cache->values + offset_in_cache(g);
    float scale = 1.0f / sqrtf((float)dim);
    Room room = make_room(g);
    for (int64_t c = 0; c < shared; c += KEYS) {
        const bf16 *block[KEYS];
        for (int i = 0; i < KEYS; i++) block[i] = keys + (c + i) * dim;
        fetch_ahead(keys, values, c, dim);
        score(block, room.queries, room.scores, rows, c, dim);
    }
    for (int64_t t = 0; t < g->count; t++) {
        int64_t tail = gather_tail(g, t, shared, &room), first = t * grouped;
        for (int64_t c = 0; c < tail; c += KEYS)
            score(room.keys + c, room.queries + first, room.scores + first, grouped, shared + c, dim);
        for (int64_t r = first; r < first + grouped; r++) {
            room.totals[r] = weigh(room.scores[r], shared + tail, scale, room.rounded);
            to_terms(room.rounded, (shared + tail + KEYS - 1) / KEYS * KEYS, room.weights[r]);
        }
    }
    mix_rows(rows, dim, NULL, values, shared, room.weights, 0, room.mixed);
    for (int64_t t = 0; t < g->count; t++) {
        int64_t even = (gather_tail(g, t, shared, &room) + 1) / 2 * 2, first = t * grouped;
        mix_rows(grouped, dim, room.values, NULL, even, room.weights + first, shared, room.mixed + first);
    }
    for (int64_t r = 0; r < rows; r++) write_row(g, r, room.mixed[r], room.totals[r]);
}
