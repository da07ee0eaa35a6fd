// `token_logprob.py`: what a row of logits says of one token, and the gradient of its log-probability.
#include <math.h>

#include "common.h"

enum { PART = 256 * LANES };  // summands that are added up by themselves: a sum of sums rounds less

typedef struct {
    float top, sum, weighted;  // largest z; sum of e^(z - top); of e^(z - top) (z - top)
} Sums;

INLINE Sums sums_of(const int half, const void *logits, int64_t size, vf temperature) {
    const vf none = {0};
    vf best = splat(-INFINITY);
    for (int64_t v = 0; v < size; v += LANES)
        best = where(first_lanes(size - v), larger(best, load_numbers(half, logits, v, size - v)), best);
    float top = largest_of(best) / temperature[0], sum = 0, weighted = 0;
    for (int64_t from = 0; from < size; from += PART) {
        int64_t to = from + PART < size ? from + PART : size;
        vf e_sum = none, ez_sum = none;
        for (int64_t v = from; v < to; v += LANES) {
            vf z = load_numbers(half, logits, v, size - v) / temperature - top;
            vf e = where(first_lanes(size - v), exponential_of(z), none);
            e_sum += e;
            ez_sum = fused(e, z, ez_sum);
        }
        sum += sum_of(e_sum);
        weighted += sum_of(ez_sum);
    }
    return (Sums){top, sum, weighted};
}

// logits [rows, size], bf16 (half) or float; ids, results [rows]
EXPORT void tlt_logprob(const void *logits, int64_t half, const int64_t *ids, int64_t rows, int64_t size,
                        float temperature, float *logprob, float *logsumexp, float *entropy) {
#pragma omp parallel for
    for (int64_t i = 0; i < rows; i++) {
        const void *row = numbers_at(half, logits, i * size);
        Sums of = half ? sums_of(1, row, size, splat(temperature)) : sums_of(0, row, size, splat(temperature));
        float z = load_numbers(half, row, ids[i], 1)[0] / temperature, log_sum = logf(of.sum);
        logsumexp[i] = of.top + log_sum;
        logprob[i] = z - logsumexp[i];
        entropy[i] = log_sum - of.weighted / of.sum;
    }
}

INLINE void to_gradient(const int half, void *logits, int64_t id, int64_t size, float logsumexp, float factor,
                        vf temperature) {
    float z = load_numbers(half, logits, id, 1)[0] / temperature[0];
    for (int64_t v = 0; v < size; v += LANES) {
        vf p = exponential_of(load_numbers(half, logits, v, size - v) / temperature - logsumexp);
        store_numbers(half, logits, v, p * -factor, size - v);
    }
    store_numbers(half, logits, id, splat(factor * (1.0f - exponential_of(splat(z - logsumexp))[0])), 1);
}

// logits are overwritten by (onehot(id) - p) grad / temperature
EXPORT void tlt_logprob_gradient(void *logits, int64_t half, const int64_t *ids, const float *logsumexp,
                                 const float *grad, int64_t rows, int64_t size, float temperature) {
#pragma omp parallel for
    for (int64_t i = 0; i < rows; i++) {
        void *row = (void *)numbers_at(half, logits, i * size);
        float factor = grad[i] / temperature;
        if (half) to_gradient(1, row, ids[i], size, logsumexp[i], factor, splat(temperature));
        else to_gradient(0, row, ids[i], size, logsumexp[i], factor, splat(temperature));
    }
}
