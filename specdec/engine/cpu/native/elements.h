// Element by element: residuals, rotations, activations times gates, logits, and whether numbers are finite. Every
// result is rounded to the type of its row, so a row has the same bits in any parts.
#ifndef SPECDEC_ELEMENTS_H
#define SPECDEC_ELEMENTS_H

#include "elementary.h"
#include "simd.h"

// x = round(x + y), or round(x + round(scale * y)).
INLINE void add_as(void *x, const void *y, float scale, int64_t count, int32_t type) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        v16 more = v16_load_as(y, i, type);
        if (scale != 1) more = v16_round_as(v16_mul(more, v16_all(scale)), type);
        v16_store_as(x, i, type, v16_add(v16_load_as(x, i, type), more));
    }
    for (; i < count; i++) {
        float more = load_as(y, i, type);
        if (scale != 1) more = round_as(more * scale, type);
        store_as(x, i, type, load_as(x, i, type) + more);
    }
}

// x = round(x * y), or round(x * scale) where y is NULL.
INLINE void multiply_as(void *x, const void *y, float scale, int64_t count, int32_t type) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        v16 factor = y ? v16_load_as(y, i, type) : v16_all(scale);
        v16_store_as(x, i, type, v16_mul(v16_load_as(x, i, type), factor));
    }
    for (; i < count; i++) store_as(x, i, type, load_as(x, i, type) * (y ? load_as(y, i, type) : scale));
}

// y = round(x + bias), x and bias float32.
INLINE void round_sum_as(const float *x, const float *bias, void *y, int64_t count, int32_t type) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        v16 sum = v16_load(x + i);
        v16_store_as(y, i, type, bias ? v16_add(sum, v16_load(bias + i)) : sum);
    }
    for (; i < count; i++) store_as(y, i, type, bias ? x[i] + bias[i] : x[i]);
}

// Rotates the halves (a, b) of x in place: round(round(a cos) + round(-b sin)), round(round(b cos) + round(a sin)).
INLINE void rotate_as(void *x, const void *cosines, const void *sines, int64_t half, int32_t type) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        v16 a = v16_load_as(x, i, type), b = v16_load_as(x, half + i, type);
        v16 c = v16_load_as(cosines, i, type), s = v16_load_as(sines, i, type), minus = v16_all(-1);
        v16 first = v16_round_as(v16_mul(a, c), type), second = v16_round_as(v16_mul(b, c), type);
        v16 from_b = v16_round_as(v16_mul(v16_mul(b, minus), s), type), from_a = v16_round_as(v16_mul(a, s), type);
        v16_store_as(x, i, type, v16_add(first, from_b));
        v16_store_as(x, half + i, type, v16_add(second, from_a));
    }
    for (; i < half; i++) {
        float a = load_as(x, i, type), b = load_as(x, half + i, type);
        float c = load_as(cosines, i, type), s = load_as(sines, i, type);
        store_as(x, i, type, round_as(a * c, type) + round_as(-b * s, type));
        store_as(x, half + i, type, round_as(b * c, type) + round_as(a * s, type));
    }
}

// Whether all numbers are finite: a finite one times zero is zero, any other is not-a-number.
INLINE int32_t finite_as(const void *x, int64_t count, int32_t type) {
    v16 sum = v16_zero();
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sum = v16_fma(v16_load_as(x, i, type), v16_zero(), sum);
    float lanes[LANES];
    v16_store(lanes, sum);
    int32_t is_finite = 1;
    for (int lane = 0; lane < LANES; lane++) is_finite &= lanes[lane] == 0;
    for (; i < count; i++) is_finite &= load_as(x, i, type) * 0 == 0;
    return is_finite;
}

// logits = softcap * tanh(scale * logits / softcap)
static void cap_logits(float *logits, float scale, float softcap, int64_t count) {
    int64_t i = 0;
    v16 scales = v16_all(scale), softcaps = v16_all(softcap);
    for (; i + LANES <= count; i += LANES) {
        v16 x = v16_mul(v16_load(logits + i), scales);
        if (softcap != 0) x = v16_mul(v16_tanh(v16_div(x, softcaps)), softcaps);
        v16_store(logits + i, x);
    }
    for (; i < count; i++) {
        float x = logits[i] * scale;
        logits[i] = softcap != 0 ? tanh_of(x / softcap) * softcap : x;
    }
}

// Each of the functions above, compiled once for each type.
#define BY_TYPE(type, function, ...)                                           \
    ((type) == SD_FLOAT32    ? function(__VA_ARGS__, SD_FLOAT32)               \
     : (type) == SD_BFLOAT16 ? function(__VA_ARGS__, SD_BFLOAT16)              \
                             : function(__VA_ARGS__, SD_FLOAT16))
static void add_row(void *x, const void *y, float scale, int64_t count, int32_t type) {
    BY_TYPE(type, add_as, x, y, scale, count);
}
static void multiply_row(void *x, const void *y, float scale, int64_t count, int32_t type) {
    BY_TYPE(type, multiply_as, x, y, scale, count);
}
static void round_sum_row(const float *x, const float *bias, void *y, int64_t count, int32_t type) {
    BY_TYPE(type, round_sum_as, x, bias, y, count);
}
static void rotate_row(void *x, const void *cosines, const void *sines, int64_t half, int32_t type) {
    BY_TYPE(type, rotate_as, x, cosines, sines, half);
}
static int32_t finite_row(const void *x, int64_t count, int32_t type) { return BY_TYPE(type, finite_as, x, count); }

#endif
