// What the kernels of this folder share.  Everything is for one processor family: AVX-512 with bfloat16 products, and
// matrix tiles where it has them.
//
// Shapes: T tokens, D hidden size, H query heads, K key/value heads, G = H / K, d head size, V vocabulary.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef uint16_t bf16;

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
void draft_children(const bf16 *logits, const int32_t *keys, const int32_t *ids, int64_t rows, int64_t count,
                    float temperature, float scale, int64_t width, int64_t *columns, float *values);

// Memory that a thread keeps from call to call.
INLINE void *scratch(void **kept, size_t *size, size_t wanted) {
    if (wanted > *size) {
        free(*kept);
        *size = (wanted + wanted / 2 + 4095) / 4096 * 4096;
        *kept = aligned_alloc(4096, *size);
    }
    return *kept;
}

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE __m512 load_bf16(const bf16 *x) { return widen(_mm256_loadu_si256((const __m256i *)x)); }
INLINE void store_bf16(bf16 *x, __m512 v) { _mm256_storeu_si256((__m256i *)x, (__m256i)_mm512_cvtneps_pbh(v)); }
INLINE __m512 load_bf16_some(const bf16 *x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }
INLINE void store_bf16_some(bf16 *x, __m512 v, __mmask16 mask) {
    _mm256_mask_storeu_epi16(x, mask, (__m256i)_mm512_cvtneps_pbh(v));
}
INLINE __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xFFFF : (__mmask16)((1u << (count < 0 ? 0 : count)) - 1); }

// e^x to 2 units in the last place; 0 below -103
INLINE __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(88.7f), x));  // this order lets NaN pass
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// Numbers from .. from + 31 of 16 rows -> [16 pairs, 16 rows], a pair's row `stride` numbers behind the one before
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
