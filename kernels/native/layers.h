// Parts of a layer that decoding and training share, for one token, in float32 and rounded once.
#pragma once
#include <math.h>

#include "common.h"

INLINE float rms_factor(const bf16 *x, int64_t size, float eps) {
    vf sum = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vf v = load_bf16_some(x + i, size - i);
        sum = fused(v, v, sum);
    }
    return 1.0f / sqrtf(sum_of(sum) / size + eps);
}

INLINE void rms_norm(const bf16 *x, const bf16 *weight, int64_t size, float eps, bf16 *y) {
    float factor = rms_factor(x, size, eps);
    for (int64_t i = 0; i < size; i += LANES)
        store_bf16_some(y + i, load_bf16_some(x + i, size - i) * factor * load_bf16_some(weight + i, size - i), size - i);
}

// (a, b) -> (a cos + b first, b cos + a second);  cos [d], first, second [d / 2]: -sin and sin, or the other way round
// for the opposite angle
INLINE void rotate(const bf16 *x, const bf16 *cos, const bf16 *first, const bf16 *second, int64_t dim, bf16 *y) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        vf a = load_bf16(x + i), b = load_bf16(x + half + i);
        store_bf16(y + i, fused(b, load_bf16(first + i), a * load_bf16(cos + i)));
        store_bf16(y + half + i, fused(a, load_bf16(second + i), b * load_bf16(cos + half + i)));
    }
}

INLINE void swiglu(const bf16 *gate_up, int64_t size, bf16 *y) {
    for (int64_t i = 0; i < size; i += LANES) {
        vf gate = load_bf16_some(gate_up + i, size - i), up = load_bf16_some(gate_up + size + i, size - i);
        store_bf16_some(y + i, gate / (exponential_of(-gate) + 1.0f) * up, size - i);
    }
}
