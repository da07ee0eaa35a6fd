// `coupled_sample.py`'s choice in one go: arg-max_v (p_v / w_v), w = exponential noise keyed by row and token id.
//
// The integers of the noise are the specification's to the bit.  Its logarithm is a polynomial of its own, good to
// 1e-7 of the value, as every device has its own.
#include <math.h>

#include "common.h"

// log(x) for normal positive x, relative error below 2e-7
INLINE __m512 log_ps(__m512 x) {
    __m512 e = _mm512_getexp_ps(x), m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
    __mmask16 large = _mm512_cmp_ps_mask(m, _mm512_set1_ps(1.41421356f), _CMP_GT_OQ);
    m = _mm512_mask_mul_ps(m, large, m, _mm512_set1_ps(0.5f));
    e = _mm512_mask_add_ps(e, large, e, _mm512_set1_ps(1.0f));
    __m512 f = _mm512_sub_ps(m, _mm512_set1_ps(1.0f)), f2 = _mm512_mul_ps(f, f);
    __m512 p = _mm512_set1_ps(7.0376836292e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(-1.1514610310e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.1676998740e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(-1.2420140846e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.4249322787e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(-1.6668057665e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.0000714765e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(-2.4999993993e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(3.3333331174e-1f));
    p = _mm512_mul_ps(_mm512_mul_ps(p, f), f2);
    p = _mm512_fmadd_ps(e, _mm512_set1_ps(-2.12194440e-4f), p);
    p = _mm512_fnmadd_ps(_mm512_set1_ps(0.5f), f2, p);
    return _mm512_fmadd_ps(e, _mm512_set1_ps(0.693359375f), _mm512_add_ps(f, p));
}

// 31 bits of each token id
INLINE __m512i hash(__m512i ids, __m512i key_0, __m512i key_1) {
    __m512i bits = _mm512_xor_si512(_mm512_mullo_epi32(ids, _mm512_set1_epi32((int)0x9E3779B1)), key_0);
    bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16));
    bits = _mm512_xor_si512(_mm512_mullo_epi32(bits, _mm512_set1_epi32((int)0x85EBCA6B)), key_1);
    bits = _mm512_xor_si512(bits, _mm512_srli_epi32(bits, 13));
    bits = _mm512_mullo_epi32(bits, _mm512_set1_epi32((int)0xC2B2AE35));
    return _mm512_and_si512(_mm512_xor_si512(bits, _mm512_srli_epi32(bits, 16)), _mm512_set1_epi32(0x7FFFFFFF));
}

INLINE __m512 uniform(__m512i bits) {
    __m512 u = _mm512_mul_ps(_mm512_add_ps(_mm512_cvtepi32_ps(bits), _mm512_set1_ps(0.5f)), _mm512_set1_ps(0x1p-31f));
    return _mm512_min_ps(u, _mm512_set1_ps(1.0f - 0x1p-24f));
}

// -log(1 - u): log(v) u / (1 - v) with v = 1 - u rounded, which makes up for the rounding
INLINE __m512 exponential(__m512 u) {
    __m512 one = _mm512_set1_ps(1.0f), v = _mm512_sub_ps(one, u), off = _mm512_sub_ps(one, v);
    __mmask16 tiny = _mm512_cmp_ps_mask(off, _mm512_setzero_ps(), _CMP_EQ_OQ);
    __m512 w = _mm512_mul_ps(log_ps(v), _mm512_div_ps(u, _mm512_mask_mov_ps(off, tiny, one)));
    return _mm512_mask_mov_ps(_mm512_sub_ps(_mm512_setzero_ps(), w), tiny, u);
}

INLINE __m512 tempered(const bf16 *logits, __mmask16 mask, const int scaled, __m512 temperature) {
    __m512 z = load_bf16_some(logits, mask);
    return scaled ? _mm512_div_ps(z, temperature) : z;
}

// As w >= u, a token can only win if u <= p / best: hardly one in the vocabulary needs its logarithm.
INLINE void race(const int scaled, const bf16 *logits, const int32_t *key, int64_t vocab, float temperature,
                 float highest, int64_t *token, float *total) {
    __m512 top = _mm512_set1_ps(highest), over = _mm512_set1_ps(temperature), sum = _mm512_setzero_ps();
    __m512i key_0 = _mm512_set1_epi32(key[0]), key_1 = _mm512_set1_epi32(key[1]);
    __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    float best = 0.0f;
    __m512 most = _mm512_set1_ps(INFINITY);  // 1 / best, and a little more
    *token = 0;
    for (int64_t v = 0; v < vocab; v += 16, ids = _mm512_add_epi32(ids, _mm512_set1_epi32(16))) {
        __mmask16 mask = first_lanes(vocab - v);
        __m512 p = exp_ps(_mm512_sub_ps(tempered(logits + v, mask, scaled, over), top));
        sum = _mm512_mask_add_ps(sum, mask, sum, p);
        __m512 u = uniform(hash(ids, key_0, key_1));
        mask = _mm512_mask_cmp_ps_mask(mask, u, _mm512_mul_ps(p, most), _CMP_LE_OQ);
        if (!mask) continue;
        __m512 score = _mm512_maskz_div_ps(mask, p, exponential(u));
        float found = _mm512_mask_reduce_max_ps(mask, score);
        if (found <= best) continue;
        best = found;
        most = _mm512_set1_ps(1.00001f / best);
        *token = v + __builtin_ctz(_mm512_mask_cmp_ps_mask(mask, score, _mm512_set1_ps(found), _CMP_EQ_OQ));
    }
    *total = _mm512_reduce_add_ps(sum);
}

// the first of the largest
INLINE int64_t largest(const int scaled, const bf16 *logits, int64_t vocab, float temperature, float *highest) {
    __m512 best = _mm512_set1_ps(-INFINITY), over = _mm512_set1_ps(temperature);
    for (int64_t v = 0; v < vocab; v += 16) {
        __mmask16 mask = first_lanes(vocab - v);
        best = _mm512_mask_max_ps(best, mask, best, tempered(logits + v, mask, scaled, over));
    }
    *highest = _mm512_reduce_max_ps(best);
    best = _mm512_set1_ps(*highest);
    for (int64_t v = 0; v < vocab; v += 16) {
        __mmask16 mask = first_lanes(vocab - v);
        mask = _mm512_mask_cmp_ps_mask(mask, tempered(logits + v, mask, scaled, over), best, _CMP_EQ_OQ);
        if (mask) return v + __builtin_ctz(mask);
    }
    return 0;
}

static void choose_row(const bf16 *logits, const int32_t *key, int64_t vocab, float temperature, int64_t *token,
                       float *logprob, float *lognorm) {
    int scaled = temperature != 0.0f && temperature != 1.0f;
    float over = scaled ? temperature : 1.0f, highest, total;
    int64_t greedy = scaled ? largest(1, logits, vocab, over, &highest) : largest(0, logits, vocab, over, &highest);
    if (scaled) race(1, logits, key, vocab, over, highest, token, &total);
    else race(0, logits, key, vocab, over, highest, token, &total);
    if (temperature == 0.0f) *token = greedy;
    uint32_t bits = (uint32_t)logits[*token] << 16;
    float z;
    memcpy(&z, &bits, 4);
    *lognorm = highest + logf(total);
    *logprob = z / over - *lognorm;
}

// logits [N, V], keys [N, 2] -> [N] each
EXPORT void tlt_choose(const bf16 *logits, const int32_t *keys, int64_t rows, int64_t vocab, float temperature,
                       int64_t *tokens, float *logprobs, float *lognorms) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        choose_row(logits + r * vocab, keys + 2 * r, vocab, temperature, tokens + r, logprobs + r, lognorms + r);
}

// A drafter's best guesses with the target's noise: the `width` largest s = z / T + g of a row, best first, as columns
// and as log(softmax(s / scale)).  logits [N, J], ids [J]: the columns' tokens; scores [J]: room
static void children_of_row(const bf16 *logits, const int32_t *key, const int32_t *ids, int64_t count, float temperature,
                            float scale, int64_t width, float *scores, int64_t *columns, float *values) {
    __m512 over = _mm512_set1_ps(temperature == 0.0f ? 1.0f : temperature), inverse = _mm512_set1_ps(1.0f / scale);
    __m512i key_0 = _mm512_set1_epi32(key[0]), key_1 = _mm512_set1_epi32(key[1]);
    __m512 top = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int64_t v = 0; v < count; v += 16) {
        __mmask16 mask = first_lanes(count - v);
        __m512 s = _mm512_div_ps(load_bf16_some(logits + v, mask), over);
        if (temperature != 0.0f)
            s = _mm512_sub_ps(s, log_ps(exponential(uniform(hash(_mm512_maskz_loadu_epi32(mask, ids + v), key_0, key_1)))));
        s = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), mask, s, inverse);
        _mm512_storeu_ps(scores + v, s);
        top = _mm512_max_ps(top, s);
    }
    top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t v = 0; v < count; v += 16) {
        __m512 p = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + v), top));
        total = _mm512_mask_add_ps(total, first_lanes(count - v), total, p);
    }
    float lognorm = _mm512_cvtss_f32(top) + logf(_mm512_reduce_add_ps(total));
    for (int64_t w = 0; w < width; w++) {
        __m512 best = _mm512_set1_ps(-INFINITY);
        __m512i at = _mm512_setzero_si512(), number = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int64_t v = 0; v < count; v += 16, number = _mm512_add_epi32(number, _mm512_set1_epi32(16))) {
            __m512 s = _mm512_loadu_ps(scores + v);
            __mmask16 better = _mm512_cmp_ps_mask(s, best, _CMP_GT_OQ);
            best = _mm512_mask_mov_ps(best, better, s);
            at = _mm512_mask_mov_epi32(at, better, number);
        }
        float highest = _mm512_reduce_max_ps(best);
        int64_t column = _mm512_mask_reduce_min_epi32(_mm512_cmp_ps_mask(best, _mm512_set1_ps(highest), _CMP_EQ_OQ), at);
        columns[w] = column;
        values[w] = highest - lognorm;
        scores[column] = -INFINITY;
    }
}

void draft_children(const bf16 *logits, const int32_t *keys, const int32_t *ids, int64_t rows, int64_t count,
                    float temperature, float scale, int64_t width, int64_t *columns, float *values) {
    float *scores = malloc(sizeof(float) * (count + 16));
    for (int64_t r = 0; r < rows; r++)
        children_of_row(logits + r * count, keys + 2 * r, ids, count, temperature, scale, width, scores,
                        columns + r * width, values + r * width);
    free(scores);
}

EXPORT void tlt_draft_children(const bf16 *logits, const int32_t *keys, const int32_t *ids, int64_t rows, int64_t count,
                               float temperature, float scale, int64_t width, int64_t *columns, float *values) {
    draft_children(logits, keys, ids, rows, count, temperature, scale, width, columns, values);
}

// rows [N, 2] keys, ids [V] -> [N, V], for tests
EXPORT void tlt_exponential(const int32_t *keys, int64_t rows, const int32_t *ids, int64_t count, float *noise) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < count; v += 16) {
            __mmask16 mask = first_lanes(count - v);
            __m512i key_0 = _mm512_set1_epi32(keys[2 * r]), key_1 = _mm512_set1_epi32(keys[2 * r + 1]);
            __m512 w = exponential(uniform(hash(_mm512_maskz_loadu_epi32(mask, ids + v), key_0, key_1)));
            _mm512_mask_storeu_ps(noise + r * count + v, mask, w);
        }
}
