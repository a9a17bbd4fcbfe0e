// Work on single rows: norms, activations, the first maximum.
//
// Sums of a norm are kept in 16 lanes, by index modulo 16, each one running sum; the lanes are then added in one fixed
// tree (i and i + 8, then + 4, + 2, + 1). So a row's bits depend on its own numbers only.
#ifndef SPECDEC_ROWS_H
#define SPECDEC_ROWS_H

#include <string.h>

#include "elementary.h"
#include "parallel.h"
#include "simd.h"

INLINE char *item_of(const void *array, int64_t index, int32_t type) {
    return (char *)array + index * (type == SD_FLOAT32 ? 4 : 2);
}

// The lanes' sum, in the tree above.
INLINE float sum_of_lanes(v16 x) {
    float lanes[LANES];
    v16_store(lanes, x);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

// Elements [i, i + 16) of a row less `mean`, zeros beyond its end.
INLINE v16 less_mean(const void *x, int64_t i, int64_t size, float mean, const int32_t type) {
    if (size - i >= LANES) return v16_add(v16_load_as(x, i, type), v16_all(-mean));
    float lanes[LANES] = {0};
    for (int64_t j = 0; i + j < size; j++) lanes[j] = load_as(x, i + j, type) - mean;
    return v16_load(lanes);
}

INLINE void normalize_as(const sd_norm *n, const void *x, void *y, int64_t size, const int32_t type,
                         const int32_t rounding) {
    float mean = 0;
    v16 sum = v16_zero();
    if (n->is_centered) {
        for (int64_t i = 0; i < size; i += LANES) sum = v16_add(sum, less_mean(x, i, size, 0, type));
        mean = sum_of_lanes(sum) / (float)size;
        sum = v16_zero();
    }
    for (int64_t i = 0; i < size; i += LANES) {
        v16 d = less_mean(x, i, size, mean, type);
        sum = v16_fma(d, d, sum);
    }
    const float scale = 1.0f / __builtin_sqrtf(sum_of_lanes(sum) / (float)size + n->epsilon);
    const float *gain = n->gain, *bias = n->bias;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        v16 found = v16_mul(less_mean(x, i, size, mean, type), v16_all(scale));
        if (rounding == SD_ROUND_FIRST) found = v16_round_as(found, type);
        found = v16_mul(found, v16_load(gain + i));
        if (bias != NULL) found = v16_add(found, v16_load(bias + i));
        v16_store_as(y, i, type, found);
    }
    for (; i < size; i++) {
        float found = (load_as(x, i, type) - mean) * scale;
        if (rounding == SD_ROUND_FIRST) found = round_as(found, type);
        found *= gain[i];
        if (bias != NULL) found += bias[i];
        store_as(y, i, type, found);
    }
}

// x and y [size] of `type`; y may be x.
static void normalize_row(const sd_norm *n, const void *x, void *y, int32_t type, int64_t size) {
    if (type == SD_FLOAT32) {
        normalize_as(n, x, y, size, SD_FLOAT32, SD_ROUND_ONCE);  // rounding to float32 changes nothing
    } else if (type == SD_BFLOAT16) {
        if (n->rounding == SD_ROUND_FIRST) normalize_as(n, x, y, size, SD_BFLOAT16, SD_ROUND_FIRST);
        else normalize_as(n, x, y, size, SD_BFLOAT16, SD_ROUND_ONCE);
    } else {
        if (n->rounding == SD_ROUND_FIRST) normalize_as(n, x, y, size, SD_FLOAT16, SD_ROUND_FIRST);
        else normalize_as(n, x, y, size, SD_FLOAT16, SD_ROUND_ONCE);
    }
}

INLINE float activated(int32_t activation, float x) {
    if (activation == SD_SILU) return x / (1.0f + exp_of(-x));
    if (activation == SD_GELU_TANH) {
        float inner = 0.7978845608f * __builtin_fmaf(0.044715f * x * x, x, x);  // sqrt(2 / pi) (x + 0.044715 x^3)
        return 0.5f * x * (1.0f + tanh_of(inner));
    }
    if (activation == SD_GELU_ERF) return 0.5f * x * (1.0f + erf_of(x * 0.7071067812f));
    return x < 0 ? 0 : x;  // not-a-number stays
}

INLINE void activate_as(const int32_t activation, const void *x, void *y, const int32_t type, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        float lanes[LANES];
        v16_store(lanes, v16_load_as(x, i, type));
        for (int j = 0; j < LANES; j++) lanes[j] = activated(activation, lanes[j]);
        v16_store_as(y, i, type, v16_load(lanes));
    }
    for (; i < count; i++) store_as(y, i, type, activated(activation, load_as(x, i, type)));
}

#define ACTIVATE(activation)                                                                   \
    if (type == SD_FLOAT32) activate_as(activation, x, y, SD_FLOAT32, count);                  \
    else if (type == SD_BFLOAT16) activate_as(activation, x, y, SD_BFLOAT16, count);           \
    else activate_as(activation, x, y, SD_FLOAT16, count);                                     \
    break

// x and y [count] of `type`, rounded once; y may be x.
static void activate_row(int32_t activation, const void *x, void *y, int32_t type, int64_t count) {
    switch (activation) {
        case SD_SILU: ACTIVATE(SD_SILU);
        case SD_GELU_TANH: ACTIVATE(SD_GELU_TANH);
        case SD_GELU_ERF: ACTIVATE(SD_GELU_ERF);
        default: ACTIVATE(SD_RELU);
    }
}

// The index of the first of the greatest numbers; not-a-number counts as the greatest, as in torch.
static int64_t argmax_row(const float *x, int64_t size) {
    int64_t best = 0;
    for (int64_t i = 0; i < size; i++) {
        if (x[i] != x[i]) return i;
        if (x[i] > x[best]) best = i;
    }
    return best;
}

typedef struct {
    const sd_norm *norm;
    const void *x;
    void *y;
    int64_t x_stride, y_stride, rows, size;
    int32_t type, activation;
} row_call;

static void normalize_program(void *argument, sd_thread thread) {
    const row_call *c = argument;
    int64_t first, end;
    sd_part(c->rows, thread, &first, &end);
    for (int64_t r = first; r < end; r++) {
        normalize_row(c->norm, item_of(c->x, r * c->x_stride, c->type), item_of(c->y, r * c->y_stride, c->type),
                      c->type, c->size);
    }
}

static void normalize(const sd_norm *norm, const void *x, int64_t x_stride, void *y, int64_t y_stride, int32_t type,
                      int64_t rows, int64_t size, int32_t threads) {
    row_call call = {.norm = norm, .x = x, .y = y, .x_stride = x_stride, .y_stride = y_stride, .rows = rows,
                     .size = size, .type = type};
    sd_run(normalize_program, &call, threads);
}

static void activate_program(void *argument, sd_thread thread) {
    const row_call *c = argument;
    int64_t first, end;
    sd_part(c->size, thread, &first, &end);
    activate_row(c->activation, item_of(c->x, first, c->type), item_of(c->y, first, c->type), c->type, end - first);
}

static void activate(int32_t activation, const void *x, void *y, int32_t type, int64_t count, int32_t threads) {
    row_call call = {.x = x, .y = y, .size = count, .type = type, .activation = activation};
    sd_run(activate_program, &call, threads);
}

static void tanh_program(void *argument, sd_thread thread) {
    const row_call *c = argument;
    int64_t first, end;
    sd_part(c->size, thread, &first, &end);
    const float *x = c->x;
    float *y = c->y;
    for (int64_t i = first; i < end; i++) y[i] = tanh_of(x[i]);
}

static void tanh_all(const float *x, float *y, int64_t count, int32_t threads) {
    row_call call = {.x = x, .y = y, .size = count};
    sd_run(tanh_program, &call, threads);
}

static void argmax_program(void *argument, sd_thread thread) {
    const row_call *c = argument;
    int64_t first, end;
    sd_part(c->rows, thread, &first, &end);
    for (int64_t r = first; r < end; r++) {
        ((int64_t *)c->y)[r] = argmax_row((const float *)c->x + r * c->x_stride, c->size);
    }
}

static void argmax(const float *x, int64_t stride, int64_t rows, int64_t size, int64_t *best, int32_t threads) {
    row_call call = {.x = x, .y = best, .x_stride = stride, .rows = rows, .size = size};
    sd_run(argmax_program, &call, threads);
}

#endif
