// Where the keys and values of a slot lie in the cache of a layer, and their writing; see sd_cache.
#ifndef SPECDEC_CACHE_H
#define SPECDEC_CACHE_H

#include <string.h>

#include "parallel.h"
#include "rows.h"
#include "simd.h"

INLINE const char *key_at(const sd_cache *c, int64_t slot, int32_t kv_head, const int32_t type) {
    int64_t block = slot / c->block_size, offset = slot % c->block_size;
    return item_of(c->keys, (block * c->kv_heads + kv_head) * c->head_size * c->block_size + offset, type);
}

INLINE const char *value_at(const sd_cache *c, int64_t slot, int32_t kv_head, const int32_t type) {
    int64_t block = slot / c->block_size, offset = slot % c->block_size;
    return item_of(c->values, ((block * c->kv_heads + kv_head) * c->block_size + offset) * c->head_size, type);
}

INLINE void write_slot(const sd_cache *c, int64_t slot, int32_t kv_head, const void *keys, int64_t key,
                       const void *values, int64_t value, const int32_t type) {
    char *to = (char *)key_at(c, slot, kv_head, type);
    for (int64_t d = 0; d < c->head_size; d++) {
        memcpy(item_of(to, d * c->block_size, type), item_of(keys, key + d, type), type == SD_FLOAT32 ? 4 : 2);
    }
    memcpy((char *)value_at(c, slot, kv_head, type), item_of(values, value, type),
           (size_t)c->head_size * (type == SD_FLOAT32 ? 4 : 2));
}

// A thread's part of (row, kv head).
static void write_part(const sd_cache *cache, const sd_rows *rows, const void *keys, int64_t key_stride,
                       const void *values, int64_t value_stride, sd_thread thread) {
    int64_t first, end;
    sd_part(rows->count * cache->kv_heads, thread, &first, &end);
    for (int64_t i = first; i < end; i++) {
        int64_t row = i / cache->kv_heads, slot = rows->slot[row];
        int32_t kv_head = (int32_t)(i % cache->kv_heads);
        int64_t key = row * key_stride + kv_head * cache->head_size;
        int64_t value = row * value_stride + kv_head * cache->head_size;
        if (cache->type == SD_FLOAT32) write_slot(cache, slot, kv_head, keys, key, values, value, SD_FLOAT32);
        else write_slot(cache, slot, kv_head, keys, key, values, value, SD_BFLOAT16);  // 16 bits of either type
    }
}

typedef struct {
    const sd_cache *cache;
    const sd_rows *rows;
    const void *keys, *values;
    int64_t key_stride, value_stride;
} write_call;

static void write_program(void *argument, sd_thread thread) {
    const write_call *c = argument;
    write_part(c->cache, c->rows, c->keys, c->key_stride, c->values, c->value_stride, thread);
}

static void write(const sd_cache *cache, const sd_rows *rows, const void *keys, int64_t key_stride, const void *values,
                  int64_t value_stride, int32_t threads) {
    write_call call = {cache, rows, keys, values, key_stride, value_stride};
    sd_run(write_program, &call, threads);
}

#endif
