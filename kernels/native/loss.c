// `distill_loss.py`: what teaches a drafter the target's distribution, value and gradient of one row after the other.
//
// A row is read once; what is made of it on the way stays in the first-level cache.  torch's operations go through
// memory a dozen times, and on a CPU those who still decode share that memory.
#include <math.h>

#include "common.h"

enum { SOFT_CE, TV, MIXED };

static __thread void *kept;
static __thread size_t kept_size;

INLINE __m512 load_logits(const int half, const void *logits, int64_t v, __mmask16 mask) {
    return half ? load_bf16_some((const bf16 *)logits + v, mask) : _mm512_maskz_loadu_ps(mask, (const float *)logits + v);
}

INLINE void loss_row(const int half, const void *logits, const float *probs, const float *weights, int64_t size,
                     int64_t kind, float *q, float *loss, float *overlap, void *grad) {
    __m512 best = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t v = 0; v < size; v += 16) {
        __mmask16 mask = first_lanes(size - v);
        best = _mm512_mask_max_ps(best, mask, best, load_logits(half, logits, v, mask));
    }
    float top = _mm512_reduce_max_ps(best);
    for (int64_t v = 0; v < size; v += 16) {
        __mmask16 mask = first_lanes(size - v);
        __m512 e = exp_ps(_mm512_sub_ps(load_logits(half, logits, v, mask), _mm512_set1_ps(top)));
        sum = _mm512_mask_add_ps(sum, mask, sum, e);
        _mm512_mask_storeu_ps(q + v, mask, e);
    }
    float total = _mm512_reduce_add_ps(sum);
    __m512 scale = _mm512_set1_ps(1.0f / total), log_norm = _mm512_set1_ps(top + logf(total));
    __m512 shared = _mm512_setzero_ps(), less = shared, mass = shared, cross = shared;
    for (int64_t v = 0; v < size; v += 16) {
        __mmask16 mask = first_lanes(size - v);
        __m512 own = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, q + v), scale), p = _mm512_maskz_loadu_ps(mask, probs + v);
        _mm512_mask_storeu_ps(q + v, mask, own);
        shared = _mm512_add_ps(shared, _mm512_min_ps(p, own));  // `own` where it is NaN
        less = _mm512_mask_add_ps(less, _mm512_cmp_ps_mask(own, p, _CMP_LT_OQ), less, own);
        if (kind == TV) continue;
        __m512 w = _mm512_maskz_loadu_ps(mask, weights + v), z = load_logits(half, logits, v, mask);
        mass = _mm512_add_ps(mass, w);
        cross = _mm512_fmadd_ps(w, _mm512_sub_ps(log_norm, z), cross);
    }
    *overlap = _mm512_reduce_add_ps(shared);
    float tv_share = kind == TV ? 1.0f : kind == SOFT_CE ? 0.0f : *overlap;
    *loss = kind == TV ? 1.0f - *overlap : tv_share * (1.0f - *overlap) + (1.0f - tv_share) * _mm512_reduce_add_ps(cross);
    // d = tv_share (q below - [q < p] q) + (1 - tv_share) (m q - w)
    __m512 share = _mm512_set1_ps(tv_share), rest = _mm512_set1_ps(1.0f - tv_share);
    __m512 below = _mm512_set1_ps(_mm512_reduce_add_ps(less)), weight = _mm512_set1_ps(_mm512_reduce_add_ps(mass));
    for (int64_t v = 0; v < size; v += 16) {
        __mmask16 mask = first_lanes(size - v);
        __m512 own = _mm512_maskz_loadu_ps(mask, q + v), p = _mm512_maskz_loadu_ps(mask, probs + v);
        __m512 kept_back = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(own, p, _CMP_LT_OQ), own);
        __m512 d = _mm512_mul_ps(share, _mm512_fmsub_ps(own, below, kept_back));
        if (kind != TV)
            d = _mm512_fmadd_ps(rest, _mm512_fmsub_ps(own, weight, _mm512_maskz_loadu_ps(mask, weights + v)), d);
        if (half) store_bf16_some((bf16 *)grad + v, d, mask);
        else _mm512_mask_storeu_ps((float *)grad + v, mask, d);
    }
}

// logits and grads [rows, size], bf16 (half) or float; probs, weights [rows, size]; losses, overlaps [rows]
EXPORT void tlt_distill_loss(const void *logits, int64_t half, const float *probs, const float *weights, int64_t rows,
                             int64_t size, int64_t kind, float *losses, float *overlaps, void *grads) {
#pragma omp parallel for
    for (int64_t i = 0; i < rows; i++) {
        float *q = scratch(&kept, &kept_size, sizeof(float) * size);
        int64_t at = i * size;
        if (half)
            loss_row(1, (const bf16 *)logits + at, probs + at, weights + at, size, kind, q, losses + i, overlaps + i,
                     (bf16 *)grads + at);
        else
            loss_row(0, (const float *)logits + at, probs + at, weights + at, size, kind, q, losses + i, overlaps + i,
                     (float *)grads + at);
    }
}
