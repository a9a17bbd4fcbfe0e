// The public functions: each forwards to the kernels of the instruction set in force.
#include "kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "internal.h"

enum { VERSION = 1 };

static pthread_once_t looked = PTHREAD_ONCE_INIT;
static const sd_kernels *usable[3];  // by this processor; the best is the last
static int usable_count;
static _Atomic(const sd_kernels *) chosen;

static void look(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int is_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    int is_avx512 = is_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#if defined(HAVE_avx2)
    if (is_avx2) usable[usable_count++] = &sd_kernels_avx2;
#endif
#if defined(HAVE_avx512)
    if (is_avx512) usable[usable_count++] = &sd_kernels_avx512;
#endif
#if defined(HAVE_avx512_bf16)
    if (is_avx512 && __builtin_cpu_supports("avx512bf16")) usable[usable_count++] = &sd_kernels_avx512_bf16;
#endif
#elif defined(__aarch64__)
    usable[usable_count++] = &sd_kernels_neon;
#endif
    if (usable_count > 0) atomic_store(&chosen, usable[usable_count - 1]);
}

// NULL on a processor that can run none.
static const sd_kernels *in_force(void) {
    pthread_once(&looked, look);
    return atomic_load_explicit(&chosen, memory_order_relaxed);
}

int32_t sd_version(void) { return VERSION; }
const char *sd_family(void) { return in_force() == NULL ? "" : in_force()->family; }
const char *sd_instructions(void) { return in_force() == NULL ? "" : in_force()->instructions; }

int32_t sd_use(const char *instructions) {
    pthread_once(&looked, look);
    for (int i = 0; i < usable_count; i++) {
        if (strcmp(usable[i]->instructions, instructions) != 0) continue;
        atomic_store(&chosen, usable[i]);
        return 1;
    }
    return 0;
}

int64_t sd_packed_bytes(const sd_weight *weight) { return in_force()->packed_bytes(weight); }

void sd_pack(const void *weight, int32_t type, int64_t out_size, int64_t in_size, int64_t out_stride,
             int64_t in_stride, void *panels) {
    in_force()->pack(weight, type, out_size, in_size, out_stride, in_stride, panels);
}

void sd_pack_groups(const sd_weight *weight, const int8_t *values, const void *scales, const void *minima,
                    void *panels) {
    in_force()->pack_groups(weight, values, scales, minima, panels);
}

void sd_unpack(const sd_weight *weight, const int64_t *outputs, int64_t count, void *y, int32_t y_type) {
    in_force()->unpack(weight, outputs, count, y, y_type);
}

void sd_product(const sd_weight *weight, const void *x, int32_t x_type, int64_t x_stride, void *y, int32_t y_type,
                int64_t y_stride, int64_t rows, int32_t threads) {
    in_force()->product(weight, x, x_type, x_stride, y, y_type, y_stride, rows, threads);
}

void sd_normalize(const sd_norm *norm, const void *x, int64_t x_stride, void *y, int64_t y_stride, int32_t type,
                  int64_t rows, int64_t size, int32_t threads) {
    in_force()->normalize(norm, x, x_stride, y, y_stride, type, rows, size, threads);
}

void sd_activate(int32_t activation, const void *x, void *y, int32_t type, int64_t count, int32_t threads) {
    in_force()->activate(activation, x, y, type, count, threads);
}

void sd_tanh(const float *x, float *y, int64_t count, int32_t threads) { in_force()->tanh_of(x, y, count, threads); }

void sd_write(const sd_cache *cache, const sd_rows *rows, const void *keys, int64_t key_stride, const void *values,
              int64_t value_stride, int32_t threads) {
    in_force()->write(cache, rows, keys, key_stride, values, value_stride, threads);
}

void sd_attend(const sd_cache *cache, const sd_rows *rows, const sd_rule *rule, int32_t heads, const void *queries,
               int64_t query_stride, void *out, int64_t out_stride, int32_t threads) {
    in_force()->attend(cache, rows, rule, heads, queries, query_stride, out, out_stride, threads);
}

void sd_argmax(const float *x, int64_t stride, int64_t rows, int64_t size, int64_t *best, int32_t threads) {
    in_force()->argmax(x, stride, rows, size, best, threads);
}

void sd_race(const float *x, int64_t stride, int64_t rows, int64_t size, const uint64_t *keys,
             const double *temperatures, int64_t *best, int32_t threads) {
    in_force()->race(x, stride, rows, size, keys, temperatures, best, threads);
}

void sd_guess(const float *x, int64_t stride, int64_t rows, int64_t size, const int64_t *token_ids,
              const uint64_t *keys, const double *temperatures, int64_t count, int64_t *ids, float *shares,
              int32_t threads) {
    in_force()->guess(x, stride, rows, size, token_ids, keys, temperatures, count, ids, shares, threads);
}

void sd_mask(const float *x, int64_t stride, int64_t rows, int64_t size, const int32_t *masks, int64_t mask_stride,
             float *y, int32_t *is_empty, int32_t threads) {
    in_force()->mask(x, stride, rows, size, masks, mask_stride, y, is_empty, threads);
}

int32_t sd_step(const sd_model *model, const sd_rows *rows, const sd_step_arguments *arguments, int32_t threads) {
    return in_force()->step(model, rows, arguments, threads);
}

int32_t sd_draft(const sd_model *model, const sd_rows *rows, const sd_step_arguments *arguments, const sd_chain *chain,
                 int32_t threads) {
    return in_force()->draft(model, rows, arguments, chain, threads);
}
