// Vectors of LANES floats, as wide as the processor has them, and products of bfloat16 numbers.
//
//     AVX-512          16 lanes, with bfloat16 products (`vdpbf16ps`) where it has them
//     AVX2 with FMA     8 lanes
//     anything else     4 lanes of the compiler's vector extension (with NEON's fused products on ARM)
//
// Numbers are bfloat16 in memory, sums are float32.  Products take LANES pairs of numbers at a time, [LANES, 2].  With
// bfloat16 products a processor adds both numbers of a pair in one instruction (STEPS 1; the other factor is a pair, too).
// Other processors widen the first numbers of the pairs to float32, then the second ones (STEPS 2; the other factors are
// floats).  Every sum has a fixed order, so a result does not depend on the rest of the batch.  Between processors results
// differ in their last bits.
//
// -ffp-contract=off: otherwise the surrounding code would decide where the compiler fuses a product and a sum.
#pragma once
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define HAS_AVX512
#elif defined(__AVX2__) && defined(__FMA__)
#define HAS_AVX2
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define HAS_NEON
#endif

#if defined(HAS_AVX512) || defined(HAS_AVX2)
#include <immintrin.h>
#elif defined(HAS_NEON)
#include <arm_neon.h>
#endif

#if defined(HAS_AVX512)
enum { LANES = 16 };
#elif defined(HAS_AVX2)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vu splat_u(uint32_t x) { return x - (vu){0}; }
INLINE vf load(const float *x) {
    vf v;
    memcpy(&v, x, sizeof v);
    return v;
}
INLINE vu load_u(const void *x) {
    vu v;
    memcpy(&v, x, sizeof v);
    return v;
}
INLINE vh load_h(const bf16 *x) {
    vh v;
    memcpy(&v, x, sizeof v);
    return v;
}
INLINE void store(float *x, vf v) { memcpy(x, &v, sizeof v); }
INLINE void store_h(bf16 *x, vh v) { memcpy(x, &v, sizeof v); }

// Masks (`where`: `yes` in the lanes of a mask), fused products, and loads of the first `count` numbers, then zeros.
// `larger` and `smaller` give b where a or b is NaN.
#if defined(HAS_AVX512)
typedef __mmask16 vm;
INLINE vm first_lanes(int64_t count) { return count >= 16 ? 0xFFFF : (vm)((1u << (count < 0 ? 0 : count)) - 1); }
INLINE vm is_less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vm is_at_most(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
INLINE vm is_equal(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE vf where(vm mask, vf yes, vf no) { return _mm512_mask_mov_ps(no, mask, yes); }
INLINE vu where_u(vm mask, vu yes, vu no) { return (vu)_mm512_mask_mov_epi32((__m512i)no, mask, (__m512i)yes); }
INLINE unsigned bits_of(vm mask) { return mask; }
INLINE vf larger(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf smaller(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf fused(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf load_some(const float *x, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), x); }
INLINE vu load_some_u(const void *x, int64_t count) { return (vu)_mm512_maskz_loadu_epi32(first_lanes(count), x); }
INLINE vh load_some_h(const bf16 *x, int64_t count) { return (vh)_mm256_maskz_loadu_epi16(first_lanes(count), x); }
INLINE void store_some(float *x, vf v, int64_t count) { _mm512_mask_storeu_ps(x, first_lanes(count), v); }
INLINE void store_some_h(bf16 *x, vh v, int64_t count) { _mm256_mask_storeu_epi16(x, first_lanes(count), (__m256i)v); }
#else
typedef vi vm;
INLINE vm first_lanes(int64_t count) {
    vm number;
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i++) number[i] = i;
    return number < (int32_t)(count < 0 ? 0 : count > LANES ? LANES : count) - (vi){0};
}
INLINE vm is_less(vf a, vf b) { return a < b; }
INLINE vm is_at_most(vf a, vf b) { return a <= b; }
INLINE vm is_equal(vf a, vf b) { return a == b; }
INLINE vf where(vm mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
INLINE vu where_u(vm mask, vu yes, vu no) { return (yes & (vu)mask) | (no & (vu)~mask); }
INLINE unsigned bits_of(vm mask) {
#if defined(HAS_AVX2)
    return _mm256_movemask_ps((__m256)mask);
#else
    unsigned bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (mask[i] & 1u) << i;
    return bits;
#endif
}
#if defined(HAS_AVX2)
INLINE vf larger(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf smaller(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf fused(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
#else
INLINE vf larger(vf a, vf b) { return where(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return where(a < b, a, b); }
#if defined(HAS_NEON)
INLINE vf fused(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
INLINE vf fused(vf a, vf b, vf c) { return a * b + c; }
#endif
#endif
INLINE int64_t within(int64_t count) { return count < 0 ? 0 : count < LANES ? count : LANES; }
INLINE vf load_some(const float *x, int64_t count) {
    if (count >= LANES) return load(x);
    vf v = {0};
    memcpy(&v, x, 4 * within(count));
    return v;
}
INLINE vu load_some_u(const void *x, int64_t count) { return (vu)load_some((const float *)x, count); }
INLINE vh load_some_h(const bf16 *x, int64_t count) {
    if (count >= LANES) return load_h(x);
    vh v = {0};
    memcpy(&v, x, 2 * within(count));
    return v;
}
INLINE void store_some(float *x, vf v, int64_t count) {
    if (count >= LANES) store(x, v);
    else memcpy(x, &v, 4 * within(count));
}
INLINE void store_some_h(bf16 *x, vh v, int64_t count) {
    if (count >= LANES) store_h(x, v);
    else memcpy(x, &v, 2 * within(count));
}
#endif

INLINE int any(vm mask) { return bits_of(mask) != 0; }
INLINE int first_of(vm mask) { return __builtin_ctz(bits_of(mask)); }  // of any
INLINE vu counted(void) {  // 0, 1, 2, ...
    vu v;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}
INLINE vf fused_minus(vf a, vf b, vf c) { return fused(-a, b, c); }  // c - a b

// sums and maxima: halves are folded onto each other
INLINE float sum_of(vf v) {
    float x[LANES];
    store(x, v);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}
INLINE float largest_of(vf v) {
    float x[LANES];
    store(x, v);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

// float32 to bfloat16, to nearest, ties to even; NaN stays NaN
INLINE vh rounded(vf v) {
#if defined(HAS_AVX512) && defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh(v);
#else
    vu bits = (vu)v, even = (bits >> 16) & 1;
    vu up = (bits + 0x7FFF + even) >> 16;
    return __builtin_convertvector(where_u(is_equal(v, v), up, (bits >> 16) | 0x40), vh);
#endif
}
INLINE vf widen(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }
INLINE vf load_bf16(const bf16 *x) { return widen(load_h(x)); }
INLINE vf load_bf16_some(const bf16 *x, int64_t count) { return widen(load_some_h(x, count)); }
INLINE void store_bf16(bf16 *x, vf v) { store_h(x, rounded(v)); }
INLINE void store_bf16_some(bf16 *x, vf v, int64_t count) { store_some_h(x, rounded(v), count); }

// Products.  `term`: what a pair is multiplied by, as it lies in memory; see `to_terms`.
#if defined(HAS_AVX512) && defined(__AVX512BF16__)
enum { STEPS = 1 };
typedef bf16 term;
typedef __m512bh Pairs, Term;
INLINE Pairs take(const vu pairs, int step) { return (Pairs)pairs; }
INLINE Term term_at(const term *x, int step) {
    uint32_t pair;
    memcpy(&pair, x, 4);
    return (Term)splat_u(pair);
}
INLINE vf add_products(vf sum, Pairs pairs, Term by) { return (vf)_mm512_dpbf16_ps((__m512)sum, pairs, by); }
INLINE void to_terms(const bf16 *x, int64_t count, term *out) { memcpy(out, x, sizeof(bf16) * count); }
#else
enum { STEPS = 2 };
typedef float term;
typedef vf Pairs, Term;
INLINE Pairs take(const vu pairs, int step) { return (vf)(step ? pairs & 0xFFFF0000u : pairs << 16); }
INLINE Term term_at(const term *x, int step) { return splat(x[step]); }
INLINE vf add_products(vf sum, Pairs pairs, Term by) { return fused(pairs, by, sum); }
INLINE void to_terms(const bf16 *x, int64_t count, term *out) {
    for (int64_t i = 0; i < count; i += LANES) store_some(out + i, load_bf16_some(x + i, count - i), count - i);
}
#endif

// e^x to 2 units in the last place; 0 below -103
INLINE vf exponential_of(vf x) {
    x = larger(splat(-104.0f), smaller(splat(88.7f), x));  // this order lets NaN pass
    const float whole = 0x1.8p23f;                         // a number added to it loses its fraction
    vf n = (x * 1.44269504f + whole) - whole;
    vf r = fused_minus(n, splat(0.693359375f), x);
    r = fused_minus(n, splat(-2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p, r * r, r + 1.0f);
#if defined(HAS_AVX512)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vi power = __builtin_convertvector(n, vi), half = power >> 1;  // 2^n itself may be no float
    return p * (vf)((half + 127) << 23) * (vf)((power - half + 127) << 23);
#endif
}
