// What the kernels of this folder share.
//
// Shapes: T tokens, D hidden size, H query heads, K key/value heads, G = H / K, d head size, V vocabulary.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "lanes.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct {
    const bf16 *panels;  // see linear.c
    const bf16 *bias;    // [out] or NULL
    int64_t out, in;
} Linear;

// x [T, in] -> y [T, out];  `add`: y += x W^T, each product rounded to bfloat16 before it is added
void linear(const bf16 *x, int64_t tokens, const Linear *w, bf16 *y, int add);

typedef struct {
    int64_t tokens;
    const int64_t *slot;    // [T] of the cache
    const int64_t *place;   // [T] where a token's own key and value go
    const int64_t *known;   // [T] places 0 .. known - 1 are visible
    const int64_t *path;    // [T, width] places that are visible behind them, in the order of the sequence
    const int64_t *length;  // [T] how many
    int64_t width;
} Layout;

typedef struct {
    bf16 *keys, *values;  // of one layer, [slot, K, place, d]
    int64_t slot_stride, head_stride;
} Cache;

// q [T, row_stride], the H heads of a token first; out [T, H d]
void attention(const bf16 *q, int64_t row_stride, const Layout *layout, const Cache *cache, int64_t heads,
               int64_t kv_heads, int64_t dim, bf16 *out);

// the drafter's best guesses of each row, see sample.c
void tlt_draft_children(const bf16 *logits, const int32_t *keys, const int32_t *ids, int64_t rows, int64_t count,
                        float temperature, float scale, int64_t width, int64_t *columns, float *values);

// Numbers in bfloat16 (half) or float32, where the caller's type is known when it is compiled.
INLINE const void *numbers_at(const int half, const void *x, int64_t at) {
    return half ? (const void *)((const bf16 *)x + at) : (const void *)((const float *)x + at);
}
INLINE vf load_numbers(const int half, const void *x, int64_t at, int64_t count) {
    return half ? load_bf16_some((const bf16 *)x + at, count) : load_some((const float *)x + at, count);
}
INLINE void store_numbers(const int half, void *x, int64_t at, vf v, int64_t count) {
    if (half) store_bf16_some((bf16 *)x + at, v, count);
    else store_some((float *)x + at, v, count);
}

// Memory that a thread keeps from call to call.
INLINE void *scratch(void **kept, size_t *size, size_t wanted) {
    if (wanted > *size) {
        free(*kept);
        *size = (wanted + wanted / 2 + 4095) / 4096 * 4096;
        *kept = aligned_alloc(4096, *size);
    }
    return *kept;
}

// x as what pairs are multiplied by: x itself, or widened
INLINE const term *as_terms(const bf16 *x, int64_t count, void **kept, size_t *size) {
    if (sizeof(term) == sizeof(bf16)) return (const term *)x;
    term *terms = scratch(kept, size, sizeof(term) * count);
    to_terms(x, count, terms);
    return terms;
}

// Numbers from .. from + 31 of 16 rows -> [16 pairs, 16 rows], a pair's row `stride` numbers behind the one before
#if defined(HAS_AVX512)
INLINE void transpose_pairs(const bf16 *const rows[16], int64_t from, bf16 *out, int64_t stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + from);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xDD);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(out + stride * i, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(out + stride * (i + 4), _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(out + stride * (i + 8), _mm512_shuffle_i32x4(b[i], b[i + 8], 0xDD));
        _mm512_storeu_si512(out + stride * (i + 12), _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xDD));
    }
}
#elif defined(HAS_AVX2)
INLINE void transpose_pairs(const bf16 *const rows[16], int64_t from, bf16 *out, int64_t stride) {
    for (int half = 0; half < 4; half++) {  // 8 rows, 8 pairs
        const bf16 *const *of = rows + half % 2 * 8;
        __m256i a[8], b[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i *)(of[i] + from + half / 2 * 16));
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 8; i += 4) {
            a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
            a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
            a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        bf16 *to = out + half / 2 * 8 * stride + half % 2 * 16;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            _mm256_storeu_si256((__m256i *)(to + stride * i), _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
            _mm256_storeu_si256((__m256i *)(to + stride * (i + 4)), _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
        }
    }
}
#else
INLINE void transpose_pairs(const bf16 *const rows[16], int64_t from, bf16 *out, int64_t stride) {
    for (int pair = 0; pair < 16; pair++)
        for (int r = 0; r < 16; r++) memcpy(out + pair * stride + 2 * r, rows[r] + from + 2 * pair, 4);
}
#endif
