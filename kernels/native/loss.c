// `distill_loss.py`: what teaches a drafter the target's distribution, value and gradient of one row after the other.
#include <math.h>

#include "common.h"

enum { SOFT_CE, TV };

static __thread void *kept;
static __thread size_t kept_size;

INLINE void loss_row(const int half, const void *logits, const float *probs, int64_t size, int64_t kind, float *q,
                     float *loss, float *overlap, void *grad) {
    const vf none = {0};
    vf best = splat(-INFINITY), sum = none;
    for (int64_t v = 0; v < size; v += LANES)
        best = where(first_lanes(size - v), larger(best, load_numbers(half, logits, v, size - v)), best);
    float top = largest_of(best);
    for (int64_t v = 0; v < size; v += LANES) {
        vf e = exponential_of(load_numbers(half, logits, v, size - v) - top);
        sum += where(first_lanes(size - v), e, none);
        store_some(q + v, e, size - v);
    }
    float total = sum_of(sum), scale = 1.0f / total, log_norm = top + logf(total);
    vf shared = none, less = none, mass = none, cross = none;
    for (int64_t v = 0; v < size; v += LANES) {
        vf own = load_some(q + v, size - v) * scale, p = load_some(probs + v, size - v);
        store_some(q + v, own, size - v);
        shared += smaller(p, own);  // `own` where it is NaN
        less += where(is_less(own, p), own, none);
        if (kind == TV) continue;
        vf z = load_numbers(half, logits, v, size - v);
        mass += p;
        cross = fused(p, log_norm - z, cross);
    }
    *overlap = sum_of(shared);
    *loss = kind == TV ? 1.0f - *overlap : sum_of(cross);
    vf below = splat(sum_of(less)), weight = splat(sum_of(mass));
    for (int64_t v = 0; v < size; v += LANES) {
        vf own = load_some(q + v, size - v), p = load_some(probs + v, size - v);
        vf d = kind == TV ? fused(own, below, -where(is_less(own, p), own, none)) : fused(own, weight, -p);
        store_numbers(half, grad, v, d, size - v);
    }
}

// logits and grads [rows, size], bf16 (half) or float; probs [rows, size]; losses, overlaps [rows]
EXPORT void tlt_distill_loss(const void *logits, int64_t half, const float *probs, int64_t rows, int64_t size,
                             int64_t kind, float *losses, float *overlaps, void *grads) {
#pragma omp parallel for
    for (int64_t i = 0; i < rows; i++) {
        float *q = scratch(&kept, &kept_size, sizeof(float) * size);
        int64_t at = i * size;
        if (half)
            loss_row(1, (const bf16 *)logits + at, probs + at, size, kind, q, losses + i, overlaps + i,
                     (bf16 *)grads + at);
        else
            loss_row(0, (const float *)logits + at, probs + at, size, kind, q, losses + i, overlaps + i,
                     (float *)grads + at);
    }
}
