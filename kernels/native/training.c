// Gradients of what lies between a layer's matrix products, in bfloat16: `rms_norm.py`, `swiglu.py`, `rotate.py`.
// Each works on one token after the other, in float32, and rounds once.
#include "layers.h"

enum { ROWS = 64 };  // tokens whose shares of a weight's gradient are added up by themselves

INLINE float sum_of_products(const bf16 *a, const bf16 *b, const bf16 *c, int64_t size) {
    vf sum = {0};
    for (int64_t i = 0; i < size; i += LANES)
        sum = fused(load_bf16_some(a + i, size - i) * load_bf16_some(b + i, size - i), load_bf16_some(c + i, size - i), sum);
    return sum_of(sum);
}

// y = x r w;  x, grad, grad_x [rows, size];  parts [rows / ROWS, size]: shares of the weight's gradient
EXPORT void tlt_rms_norm_gradient(const bf16 *x, const bf16 *weight, const bf16 *grad, int64_t rows, int64_t size,
                                  float eps, bf16 *grad_x, float *parts) {
    int64_t blocks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for
    for (int64_t block = 0; block < blocks; block++) {
        int64_t end = (block + 1) * ROWS < rows ? (block + 1) * ROWS : rows;
        float *part = parts + block * size;
        memset(part, 0, sizeof(float) * size);
        for (int64_t t = block * ROWS; t < end; t++) {
            const bf16 *from = x + t * size, *g = grad + t * size;
            float r = rms_factor(from, size, eps);
            float shared = sum_of_products(from, weight, g, size) * r * r / size;
            for (int64_t i = 0; i < size; i += LANES) {
                vf normed = load_bf16_some(from + i, size - i), gi = load_bf16_some(g + i, size - i);
                vf of_normed = gi * load_bf16_some(weight + i, size - i);
                store_bf16_some(grad_x + t * size + i, fused_minus(normed, splat(shared), of_normed) * r, size - i);
                store_some(part + i, fused(gi, normed * r, load_some(part + i, size - i)), size - i);
            }
        }
    }
}

// y = s b, s = a / (1 + e^-a);  gate_up [rows, 2 size]: a, b
EXPORT void tlt_swiglu(const bf16 *gate_up, int64_t rows, int64_t size, bf16 *y) {
#pragma omp parallel for
    for (int64_t t = 0; t < rows; t++) swiglu(gate_up + t * 2 * size, size, y + t * size);
}

EXPORT void tlt_swiglu_gradient(const bf16 *gate_up, const bf16 *grad, int64_t rows, int64_t size, bf16 *grad_gate_up) {
#pragma omp parallel for
    for (int64_t t = 0; t < rows; t++) {
        const bf16 *gate = gate_up + t * 2 * size, *up = gate + size, *g = grad + t * size;
        bf16 *to = grad_gate_up + t * 2 * size;
        for (int64_t i = 0; i < size; i += LANES) {
            vf a = load_bf16_some(gate + i, size - i), b = load_bf16_some(up + i, size - i);
            vf gi = load_bf16_some(g + i, size - i), sigmoid = 1.0f / (exponential_of(-a) + 1.0f), silu = a * sigmoid;
            // s'(a) = sigmoid (1 + a (1 - sigmoid))
            store_bf16_some(to + i, gi * b * sigmoid * (a + 1.0f - silu), size - i);
            store_bf16_some(to + size + i, gi * silu, size - i);
        }
    }
}

// x [rows, heads, dim], a token's heads together, tokens `stride` apart;  cos, signed_sin [rows, dim];  backwards: by
// the opposite angle, which gives the gradient;  y [rows, heads, dim]
EXPORT void tlt_rotate(const bf16 *x, int64_t rows, int64_t stride, int64_t heads, int64_t dim, const bf16 *cos,
                       const bf16 *signed_sin, int64_t backwards, bf16 *y) {
#pragma omp parallel for
    for (int64_t t = 0; t < rows; t++) {
        const bf16 *negative = signed_sin + t * dim, *positive = negative + dim / 2;
        for (int64_t h = 0; h < heads; h++)
            rotate(x + t * stride + h * dim, cos + t * dim, backwards ? positive : negative,
                   backwards ? negative : positive, dim, y + (t * heads + h) * dim);
    }
}
