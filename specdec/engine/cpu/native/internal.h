// The table of one instruction set's kernels: the functions of kernels.h that are compiled once for each.
#ifndef SPECDEC_INTERNAL_H
#define SPECDEC_INTERNAL_H

#include "kernels.h"

typedef struct {
    const char *family, *instructions;
    int64_t (*packed_bytes)(const sd_weight *weight);
    void (*pack)(const void *weight, int32_t type, int64_t out_size, int64_t in_size, int64_t out_stride,
                 int64_t in_stride, void *panels);
    void (*pack_groups)(const sd_weight *weight, const int8_t *values, const void *scales, const void *minima,
                        void *panels);
    void (*unpack)(const sd_weight *weight, const int64_t *outputs, int64_t count, void *y, int32_t y_type);
    void (*product)(const sd_weight *weight, const void *x, int32_t x_type, int64_t x_stride, void *y, int32_t y_type,
                    int64_t y_stride, int64_t rows, int32_t threads);
    void (*normalize)(const sd_norm *norm, const void *x, int64_t x_stride, void *y, int64_t y_stride, int32_t type,
                      int64_t rows, int64_t size, int32_t threads);
    void (*activate)(int32_t activation, const void *x, void *y, int32_t type, int64_t count, int32_t threads);
    void (*tanh_of)(const float *x, float *y, int64_t count, int32_t threads);
    void (*write)(const sd_cache *cache, const sd_rows *rows, const void *keys, int64_t key_stride, const void *values,
                  int64_t value_stride, int32_t threads);
    void (*attend)(const sd_cache *cache, const sd_rows *rows, const sd_rule *rule, int32_t heads, const void *queries,
                   int64_t query_stride, void *out, int64_t out_stride, int32_t threads);
    void (*argmax)(const float *x, int64_t stride, int64_t rows, int64_t size, int64_t *best, int32_t threads);
    void (*race)(const float *x, int64_t stride, int64_t rows, int64_t size, const uint64_t *keys,
                 const double *temperatures, int64_t *best, int32_t threads);
    void (*guess)(const float *x, int64_t stride, int64_t rows, int64_t size, const int64_t *token_ids,
                  const uint64_t *keys, const double *temperatures, int64_t count, int64_t *ids, float *shares,
                  int32_t threads);
    void (*mask)(const float *x, int64_t stride, int64_t rows, int64_t size, const int32_t *masks, int64_t mask_stride,
                 float *y, int32_t *is_empty, int32_t threads);
    int32_t (*step)(const sd_model *model, const sd_rows *rows, const sd_step_arguments *arguments, int32_t threads);
    int32_t (*draft)(const sd_model *model, const sd_rows *rows, const sd_step_arguments *arguments,
                     const sd_chain *chain, int32_t threads);
} sd_kernels;

extern const sd_kernels sd_kernels_avx2, sd_kernels_avx512, sd_kernels_avx512_bf16, sd_kernels_neon;

#endif
