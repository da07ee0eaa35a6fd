// `tlt_core/grpo/exact_sum.py`: sums of gradients that do not depend on the order.
#include "common.h"

#define SHIFT 96.0

// values bf16 (half) or float
EXPORT void tlt_add_exactly(double *sums, const void *values, int64_t half, int64_t count) {
    const bf16 *halves = values;
    const float *floats = values;
    if (half) {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = (uint32_t)halves[i] << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            sums[i] += ((double)value + SHIFT) - SHIFT;
        }
    } else {
#pragma omp parallel for simd schedule(static)
        for (int64_t i = 0; i < count; i++) sums[i] += ((double)floats[i] + SHIFT) - SHIFT;
    }
}
