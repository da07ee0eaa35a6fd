// The choice of `coupled_sample.py` in one pass: arg-max_v (p_v / w_v), w = exponential noise keyed by row and token id.
//
// The integers of the noise are bitwise those of the specification.  The logarithm is a polynomial with a relative error
// of 1e-7; every device has its own.
#include <math.h>

#include "common.h"

// log(x) for normal positive x, relative error below 2e-7
INLINE vf log_of(vf x) {
    vf e = __builtin_convertvector((vi)((vu)x >> 23) - 127, vf), m = (vf)(((vu)x & 0x7FFFFF) | 0x3F800000);
    vm large = is_less(splat(1.41421356f), m);
    m = where(large, m * 0.5f, m);
    e = where(large, e + 1.0f, e);
    vf f = m - 1.0f, f2 = f * f;
    vf p = splat(7.0376836292e-2f);
    p = fused(p, f, splat(-1.1514610310e-1f));
    p = fused(p, f, splat(1.1676998740e-1f));
    p = fused(p, f, splat(-1.2420140846e-1f));
    p = fused(p, f, splat(1.4249322787e-1f));
    p = fused(p, f, splat(-1.6668057665e-1f));
    p = fused(p, f, splat(2.0000714765e-1f));
    p = fused(p, f, splat(-2.4999993993e-1f));
    p = fused(p, f, splat(3.3333331174e-1f));
    p = p * f * f2;
    p = fused(e, splat(-2.12194440e-4f), p);
    p = fused_minus(splat(0.5f), f2, p);
    return fused(e, splat(0.693359375f), f + p);
}

// 31 bits of each token id
INLINE vu hash(vu ids, const int32_t *key) {
    vu bits = ids * 0x9E3779B1u ^ splat_u(key[0]);
    bits = (bits ^ bits >> 16) * 0x85EBCA6Bu ^ splat_u(key[1]);
    bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
    return (bits ^ bits >> 16) & 0x7FFFFFFF;
}

INLINE vf uniform(vu bits) {
    return smaller((__builtin_convertvector((vi)bits, vf) + 0.5f) * 0x1p-31f, splat(1.0f - 0x1p-24f));
}

// -log(1 - u) as log(v) u / (1 - v), where v is 1 - u rounded: this corrects the rounding
INLINE vf exponential(vf u) {
    vf v = 1.0f - u, off = 1.0f - v;
    vm tiny = is_equal(off, (vf){0});
    vf w = log_of(v) * (u / where(tiny, splat(1.0f), off));
    return where(tiny, u, -w);
}

INLINE vf tempered(const bf16 *logits, int64_t count, const int scaled, vf temperature) {
    vf z = load_bf16_some(logits, count);
    return scaled ? z / temperature : z;
}

// Since w >= u, a token can only win if u <= p / best: hardly any token needs its logarithm.
INLINE void race(const int scaled, const bf16 *logits, const int32_t *key, int64_t vocab, float temperature,
                 float highest, int64_t *token, float *total) {
    vf over = splat(temperature), sum = {0}, most = splat(INFINITY);  // 1 / best, and a little more
    vu ids = counted();
    float best = 0.0f;
    *token = 0;
    for (int64_t v = 0; v < vocab; v += LANES, ids += LANES) {
        vf p = exponential_of(tempered(logits + v, vocab - v, scaled, over) - highest);
        if (vocab - v < LANES) p = where(first_lanes(vocab - v), p, (vf){0});
        sum += p;
        vf u = uniform(hash(ids, key));
        vm may_win = is_at_most(u, p * most);
        if (!any(may_win)) continue;
        vf score = where(may_win, p / exponential(u), (vf){0});
        float found = largest_of(score);
        if (found <= best) continue;
        best = found;
        most = splat(1.00001f / best);
        *token = v + first_of(is_equal(score, splat(found)));
    }
    *total = sum_of(sum);
}

// the first of the largest
INLINE int64_t largest(const int scaled, const bf16 *logits, int64_t vocab, float temperature, float *highest) {
    vf best = splat(-INFINITY), over = splat(temperature);
    for (int64_t v = 0; v < vocab; v += LANES) {
        vf z = tempered(logits + v, vocab - v, scaled, over);
        best = larger(best, vocab - v < LANES ? where(first_lanes(vocab - v), z, best) : z);
    }
    *highest = largest_of(best);
    best = splat(*highest);
    for (int64_t v = 0; v < vocab; v += LANES) {
        unsigned same = bits_of(is_equal(tempered(logits + v, vocab - v, scaled, over), best));
        if (vocab - v < LANES) same &= (1u << (vocab - v)) - 1;
        if (same) return v + __builtin_ctz(same);
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
    vf over = splat(temperature == 0.0f ? 1.0f : temperature), nothing = splat(-INFINITY), top = nothing, total = {0};
    float inverse = 1.0f / scale;
    for (int64_t v = 0; v < count; v += LANES) {
        vf s = load_bf16_some(logits + v, count - v) / over;
        if (temperature != 0.0f)
            s -= log_of(exponential(uniform(hash(load_some_u(ids + v, count - v), key))));
        s = where(first_lanes(count - v), s * inverse, nothing);
        store(scores + v, s);
        top = larger(top, s);
    }
    float first = largest_of(top);
    for (int64_t v = 0; v < count; v += LANES)
        total += where(first_lanes(count - v), exponential_of(load(scores + v) - first), (vf){0});
    float lognorm = first + logf(sum_of(total));
    for (int64_t w = 0; w < width; w++) {
        vf best = nothing;
        vu at = {0}, number = counted();
        for (int64_t v = 0; v < count; v += LANES, number += LANES) {
            vf s = load(scores + v);
            vm better = is_less(best, s);
            best = where(better, s, best);
            at = where_u(better, number, at);
        }
        float highest = largest_of(best);
        vm same = is_equal(best, splat(highest));
        int64_t column = count;
        for (int i = 0; i < LANES; i++)
            if (bits_of(same) >> i & 1 && at[i] < column) column = at[i];
        columns[w] = column;
        values[w] = highest - lognorm;
        scores[column] = -INFINITY;
    }
}

EXPORT void tlt_draft_children(const bf16 *logits, const int32_t *keys, const int32_t *ids, int64_t rows, int64_t count,
                               float temperature, float scale, int64_t width, int64_t *columns, float *values) {
    float *scores = malloc(sizeof(float) * (count + 16));
    for (int64_t r = 0; r < rows; r++)
        children_of_row(logits + r * count, keys + 2 * r, ids, count, temperature, scale, width, scores,
                        columns + r * width, values + r * width);
    free(scores);
}

// rows [N, 2] keys, ids [V] -> [N, V], for tests
EXPORT void tlt_exponential(const int32_t *keys, int64_t rows, const int32_t *ids, int64_t count, float *noise) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < count; v += LANES)
            store_some(noise + r * count + v, exponential(uniform(hash(load_some_u(ids + v, count - v), keys + 2 * r))), count - v);
}
