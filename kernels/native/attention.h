// Attention in parts that its two ways share; `attention.c` says what is computed.
#pragma once
#include <math.h>

#include "common.h"
#include "tiles.h"

enum { KEYS = 16, AHEAD = 32 };  // places of a block, and how many of them are fetched ahead

// Tokens that share slot and known part, and one key/value head
typedef struct {
    const bf16 *q;  // [T, row_stride]
    int64_t row_stride;
    const Layout *layout;
    const Cache *cache;
    const int64_t *who;  // [count] numbers of the tokens
    int64_t count, head, grouped, dim;
    bf16 *out;  // [T, out_stride]
    int64_t out_stride;
} Group;

// rows of a group: its tokens' queries, `grouped` of each token
INLINE const bf16 *query_of(const Group *g, int64_t r) {
    return g->q + g->who[r / g->grouped] * g->row_stride + (g->head * g->grouped + r % g->grouped) * g->dim;
}

INLINE int64_t offset_in_cache(const Group *g) {
    return g->layout->slot[g->who[0]] * g->cache->slot_stride + g->head * g->cache->head_stride;
}

// one way for all groups of a pass: with matrix tiles where the processor has them, else with vectors
void attend_with_vectors(const Group *g);
void attend_with_tiles(const Group *g);

// 16 keys of d features -> [d / 2, 16] pairs of features
INLINE void transpose(const bf16 *const keys[KEYS], int64_t dim, bf16 *out) {
    for (int64_t from = 0; from < dim; from += 32, out += KEYS * 32) transpose_pairs(keys, from, out, 32);
}

// A block's runs of memory are short: the processor's own guess comes too late.
INLINE void fetch_ahead(const bf16 *keys, const bf16 *values, int64_t place, int64_t dim) {
    for (int64_t i = 0; i < KEYS * dim; i += 32) {
        __builtin_prefetch(keys + (place + AHEAD) * dim + i, 0, 3);
        __builtin_prefetch(values + place * dim + i, 0, 2);
    }
}

// weights e^(s - max), s = dots scale, in bfloat16, 0 up to the end of a block; returns what they sum up to, unrounded
INLINE float weigh(const float *dots, int64_t count, float scale, bf16 *weights) {
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

// a row's weighted sums over the sum of its weights
INLINE void write_row(const Group *g, int64_t r, const float *sums, float total) {
    bf16 *to = g->out + g->who[r / g->grouped] * g->out_stride + (g->head * g->grouped + r % g->grouped) * g->dim;
    float over = 1.0f / total;
    for (int64_t j = 0; j < g->dim; j += LANES) store_bf16(to + j, load(sums + j) * over);
}
