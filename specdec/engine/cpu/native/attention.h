// Attention over the paged cache: softmax(rule(q k)) v for each row and head, and the writing of keys and values.
//
// The order: a score is one running sum along the head's elements, from 0, one fused multiply-add a step. Positions are
// taken in splits of 512, at multiples of 512; between splits the running maximum is kept, and sums so far are rescaled
// when it grows (Dao et al. 2022, FlashAttention). Inside a split the weighted values are running sums by position, and
// the sum of the weights is kept in 16 lanes, by position modulo 16, added at the end in the tree of rows.h. All of it
// depends on positions alone: not on the rows beside a row, on the block or slot that holds a key, or on the threads.
// A key that a row does not see is not multiplied, not even by zero. A bias is added to the scaled and capped score.
#ifndef SPECDEC_ATTENTION_H
#define SPECDEC_ATTENTION_H

#include <string.h>

#include "cache.h"
#include "elementary.h"
#include "rows.h"
#include "simd.h"

#if defined(__AVX512F__)
enum { REGISTER_PANELS = 4 };
#else
enum { REGISTER_PANELS = 2 };  // of two or four registers each
#endif

enum {
    KEY_SPLIT = 512,
    QUERIES_MAX = 32,     // (row, head) pairs that share the reading of keys and values
    QUERY_TILE = 4,       // of these, as many as share registers
    PANELS = REGISTER_PANELS,  // of 16 positions, side by side
    SCORES = KEY_SPLIT + 16,  // a panel may begin anywhere in a split
    HEAD_SIZE_MAX = 512
};

// One (row, head): it sees positions [first, base) through the block table, then [base, end) through its path.
typedef struct {
    int64_t row, head, position, first, base, end;
    const int32_t *path;
    float most;  // the running maximum
} query;

typedef struct {
    float vectors[QUERIES_MAX][HEAD_SIZE_MAX];  // queries
    float sums[QUERIES_MAX][HEAD_SIZE_MAX];     // weighted values
    float lanes[QUERIES_MAX][LANES];            // sums of weights
    float scores[QUERIES_MAX][SCORES];          // then weights, of one split
    float panel[HEAD_SIZE_MAX * LANES];         // keys of 16 positions that do not lie side by side
    query queries[QUERIES_MAX];
} attention_work;

typedef struct {
    const sd_cache *cache;
    const sd_rows *rows;
    const sd_rule *rule;
    int32_t heads, kv_head;
    const int32_t *table;
} attention_place;

INLINE int64_t slot_of(const attention_place *a, int64_t position) {
    return (int64_t)a->table[position / a->cache->block_size] * a->cache->block_size + position % a->cache->block_size;
}

// Scores of `count` queries at `panels` panels of 16 positions: keys[p] is element 0 of a panel, `stride` from element
// to element.
INLINE void score_panels(const int count, const int panels, const char *const *keys, int64_t stride, int64_t size,
                         float (*vectors)[HEAD_SIZE_MAX], float (*scores)[SCORES], int64_t at, const int32_t type) {
    v16 sums[QUERY_TILE][PANELS];
    for (int q = 0; q < count; q++) {
        for (int p = 0; p < panels; p++) sums[q][p] = v16_zero();
    }
    for (int64_t d = 0; d < size; d++) {
        v16 key[PANELS];
        for (int p = 0; p < panels; p++) key[p] = v16_load_as(keys[p], d * stride, type);
        for (int q = 0; q < count; q++) {
            v16 element = v16_all(vectors[q][d]);
            for (int p = 0; p < panels; p++) sums[q][p] = v16_fma(element, key[p], sums[q][p]);
        }
    }
    for (int q = 0; q < count; q++) {
        for (int p = 0; p < panels; p++) v16_store(scores[q] + at + p * LANES, sums[q][p]);
    }
}

INLINE void score_tile(const int panels, int count, const char *const *keys, int64_t stride, int64_t size,
                       attention_work *w, int first, int64_t at, const int32_t type) {
    float(*vectors)[HEAD_SIZE_MAX] = w->vectors + first;
    float(*scores)[SCORES] = w->scores + first;
    if (count == 1) score_panels(1, panels, keys, stride, size, vectors, scores, at, type);
    if (count == 2) score_panels(2, panels, keys, stride, size, vectors, scores, at, type);
    if (count == 3) score_panels(3, panels, keys, stride, size, vectors, scores, at, type);
    if (count == 4) score_panels(4, panels, keys, stride, size, vectors, scores, at, type);
}

// Keys in blocks of 8: the panel at `position`. The second block may lie beyond the row's table: its lanes are zeros.
INLINE const char *join_blocks(const attention_place *a, attention_work *w, int64_t position, int64_t high,
                               const int32_t type) {
    const int64_t stride = a->cache->block_size, size = a->cache->head_size;
    const char *first = key_at(a->cache, slot_of(a, position), a->kv_head, type), *second = NULL;
    if (high - position > stride) second = key_at(a->cache, slot_of(a, position + stride), a->kv_head, type);
    for (int64_t d = 0; d < size; d++) {
        float *panel = w->panel + d * LANES;
        for (int64_t i = 0; i < stride; i++) panel[i] = load_as(first, d * stride + i, type);
        for (int64_t i = 0; i < stride; i++) panel[stride + i] = second ? load_as(second, d * stride + i, type) : 0;
    }
    return (const char *)w->panel;
}

// Scores of all queries at the positions [low, high) of a split that begins at `start`, through the block table.
INLINE void score_table(const attention_place *a, attention_work *w, int count, int64_t start, int64_t low,
                        int64_t high, const int32_t type) {
    const int64_t size = a->cache->head_size, stride = a->cache->block_size;
    for (int64_t p = low / LANES * LANES; p < high;) {
        const char *keys[PANELS];
        const int panels = high - p > (PANELS - 1) * LANES && stride >= LANES ? PANELS : 1;
        if (stride < LANES) keys[0] = join_blocks(a, w, p, high, type);
        for (int i = 0; i < panels && stride >= LANES; i++) {
            keys[i] = key_at(a->cache, slot_of(a, p + i * LANES), a->kv_head, type);
        }
        for (int q = 0; q < count; q += QUERY_TILE) {
            const int some = count - q < QUERY_TILE ? count - q : QUERY_TILE;
            if (stride < LANES) score_tile(1, some, keys, LANES, size, w, q, p - start, SD_FLOAT32);
            else if (panels == PANELS) score_tile(PANELS, some, keys, stride, size, w, q, p - start, type);
            else score_tile(1, some, keys, stride, size, w, q, p - start, type);
        }
        p += panels * LANES;
    }
}

// Scores of `count` queries of one row at the positions [low, high) of its path, 16 at a time.
INLINE void score_path(const attention_place *a, attention_work *w, int first, int count, int64_t start, int64_t low,
                       int64_t high, const int32_t type) {
    const query *own = &w->queries[first];
    const int64_t size = a->cache->head_size, stride = a->cache->block_size;
    const char *keys[PANELS] = {(const char *)w->panel};
    for (int64_t p = low; p < high; p += LANES) {
        for (int64_t i = 0; i < LANES; i++) {
            const char *key = p + i < high ? key_at(a->cache, own->path[p + i - own->base], a->kv_head, type) : NULL;
            for (int64_t d = 0; d < size; d++) w->panel[d * LANES + i] = key ? load_as(key, d * stride, type) : 0;
        }
        for (int q = 0; q < count; q += QUERY_TILE) {
            score_tile(1, count - q < QUERY_TILE ? count - q : QUERY_TILE, keys, LANES, size, w, first + q, p - start,
                       SD_FLOAT32);
        }
    }
}

INLINE int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t higher(int64_t a, int64_t b) { return a > b ? a : b; }

// The greatest of `count` numbers, a multiple of 16, and of `most`; not-a-number is passed over.
INLINE float greatest(const float *s, int64_t count, float most) {
    float lanes[LANES];
    v16 found = v16_all(most);
    for (int64_t i = 0; i < count; i += LANES) found = v16_max(v16_load(s + i), found);
    v16_store(lanes, found);
    for (int i = 0; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

// Adds a head's biases to the scores [low, high), of which s[i] is at distance i + offset; bias[0]: of distance 0.
INLINE void add_biases(const float *bias, int64_t reach, float *s, int64_t offset, int64_t low, int64_t high) {
    const int64_t near = lower(higher(-reach - offset, low), high), far = lower(higher(reach + 1 - offset, near), high);
    for (int64_t i = low; i < near; i++) s[i] += bias[-reach];
    for (int64_t i = near; i < far; i++) s[i] += bias[i + offset];
    for (int64_t i = far; i < high; i++) s[i] += bias[reach];
}

// The scores [low, high) of a split that begins at `start` become weights; sums so far are rescaled. Beside them, up to whole vectors, weights are zero:
// they are added to the lanes, which changes no bit, but multiply no value.
static void weigh(const sd_rule *rule, attention_work *w, int q, int64_t size, int64_t start, int64_t low,
                  int64_t high) {
    const int64_t from = low / LANES * LANES, to = (high + LANES - 1) / LANES * LANES;
    float *s = w->scores[q];
    if (rule->softcap > 0) {
        const float scale = rule->scaling / rule->softcap, softcap = rule->softcap;
        for (int64_t i = low; i < high; i++) s[i] = softcap * tanh_of(s[i] * scale);
    } else {
        const float scale = rule->scaling;
        for (int64_t i = low; i < high; i++) s[i] *= scale;
    }
    if (rule->bias != NULL) {
        const query *own = &w->queries[q];
        const float *bias = rule->bias + own->head * (2 * rule->bias_reach + 1) + rule->bias_reach;
        add_biases(bias, rule->bias_reach, s, start - own->position, low, high);
    }
    for (int64_t i = from; i < low; i++) s[i] = -INFINITY;
    for (int64_t i = high; i < to; i++) s[i] = -INFINITY;
    const float most = greatest(s + from, to - from, w->queries[q].most);
    if (most != w->queries[q].most) {
        const float factor = exp_of(w->queries[q].most - most);
        for (int64_t d = 0; d < size; d++) w->sums[q][d] *= factor;
        for (int i = 0; i < LANES; i++) w->lanes[q][i] *= factor;
        w->queries[q].most = most;
    }
    for (int64_t i = from; i < to; i++) s[i] = exp_of(s[i] - most);
    v16 lanes = v16_load(w->lanes[q]);
    for (int64_t i = from; i < to; i += LANES) lanes = v16_add(lanes, v16_load(s + i));
    v16_store(w->lanes[q], lanes);
}

// The first value of a run of positions from `p` on that lie side by side, at most to `high`; *end: the run's end.
INLINE const char *values_from(const attention_place *a, const query *own, int64_t p, int64_t high, int64_t *end,
                               const int32_t type) {
    const int64_t block_size = a->cache->block_size;
    if (p >= own->base) {
        *end = p + 1;
        return value_at(a->cache, own->path[p - own->base], a->kv_head, type);
    }
    *end = lower(lower((p / block_size + 1) * block_size, own->base), high);
    return value_at(a->cache, slot_of(a, p), a->kv_head, type);
}

// sums[q] += weight * value at the positions [low, high), for `count` queries and `vectors` vectors of elements from d.
// Several queries have all of these positions in the block table.
INLINE void add_values(const int count, const int vectors, const attention_place *a, attention_work *w, int first,
                       int64_t start, int64_t low, int64_t high, int64_t d, const int32_t type) {
    const int64_t size = a->cache->head_size;
    v16 sums[QUERY_TILE][PANELS];
    for (int q = 0; q < count; q++) {
        for (int v = 0; v < vectors; v++) sums[q][v] = v16_load(w->sums[first + q] + d + v * LANES);
    }
    for (int64_t p = low, end; p < high;) {
        const char *values = values_from(a, &w->queries[first], p, high, &end, type);
        for (int64_t at = 0; p < end; p++, at += size) {
            v16 value[PANELS];
            for (int v = 0; v < vectors; v++) value[v] = v16_load_as(values, at + d + v * LANES, type);
            for (int q = 0; q < count; q++) {
                v16 weight = v16_all(w->scores[first + q][p - start]);
                for (int v = 0; v < vectors; v++) sums[q][v] = v16_fma(weight, value[v], sums[q][v]);
            }
        }
    }
    for (int q = 0; q < count; q++) {
        for (int v = 0; v < vectors; v++) v16_store(w->sums[first + q] + d + v * LANES, sums[q][v]);
    }
}

INLINE void add_tile_values(const int count, const attention_place *a, attention_work *w, int first, int64_t start,
                            int64_t low, int64_t high, const int32_t type) {
    const int64_t size = a->cache->head_size;
    int64_t d = 0;
    for (; d + PANELS * LANES <= size; d += PANELS * LANES) {
        add_values(count, PANELS, a, w, first, start, low, high, d, type);
    }
    for (; d + LANES <= size; d += LANES) add_values(count, 1, a, w, first, start, low, high, d, type);
    for (int64_t p = low, end; d < size && p < high; p++) {
        const char *value = values_from(a, &w->queries[first], p, high, &end, type);
        for (int q = first; q < first + count; q++) {
            for (int64_t e = d; e < size; e++) {
                w->sums[q][e] = __builtin_fmaf(w->scores[q][p - start], load_as(value, e, type), w->sums[q][e]);
            }
        }
    }
}

INLINE void add_all_values(const attention_place *a, attention_work *w, int first, int count, int64_t start,
                           int64_t low, int64_t high, const int32_t type) {
    if (low >= high) return;
    if (count == 1) add_tile_values(1, a, w, first, start, low, high, type);
    if (count == 2) add_tile_values(2, a, w, first, start, low, high, type);
    if (count == 3) add_tile_values(3, a, w, first, start, low, high, type);
    if (count == 4) add_tile_values(4, a, w, first, start, low, high, type);
}

// All queries over one split: positions [start, start + KEY_SPLIT).
INLINE void attend_split(const attention_place *a, attention_work *w, int count, int64_t start, const int32_t type) {
    int64_t low = INT64_MAX, high = 0;
    for (int q = 0; q < count; q++) {
        const query *own = &w->queries[q];
        if (own->first >= start + KEY_SPLIT || own->first >= own->base) continue;
        low = lower(low, higher(own->first, start));
        high = higher(high, lower(own->base, start + KEY_SPLIT));
    }
    if (low < high) score_table(a, w, count, start, low, high, type);
    for (int q = 0; q < count; q++) {
        const query *own = &w->queries[q];
        int64_t from = higher(own->first, start), to = lower(own->end, start + KEY_SPLIT);
        if (from >= to) continue;
        if (own->base < to && (q == 0 || own[-1].row != own->row)) {
            int heads = 1;
            while (q + heads < count && own[heads].row == own->row) heads++;
            score_path(a, w, q, heads, start, higher(from, own->base), to, type);
        }
        weigh(a->rule, w, q, a->cache->head_size, start, from - start, to - start);
    }
    for (int first = 0; first < count; first += QUERY_TILE) {
        int some = (int)lower(QUERY_TILE, count - first);
        int64_t shared_low = start, shared_high = start + KEY_SPLIT;
        for (int q = first; q < first + some; q++) {
            shared_low = higher(shared_low, w->queries[q].first);
            shared_high = lower(shared_high, w->queries[q].base);
        }
        if (shared_high <= shared_low) shared_low = shared_high = start + KEY_SPLIT;
        for (int q = first; q < first + some; q++) {
            const query *own = &w->queries[q];
            int64_t from = higher(own->first, start), to = lower(own->end, start + KEY_SPLIT);
            add_all_values(a, w, q, 1, start, from, lower(shared_low, to), type);
        }
        add_all_values(a, w, first, some, start, shared_low, shared_high, type);
        for (int q = first; q < first + some; q++) {
            const query *own = &w->queries[q];
            int64_t from = higher(own->first, start), to = lower(own->end, start + KEY_SPLIT);
            add_all_values(a, w, q, 1, start, higher(from, shared_high), to, type);
        }
    }
}

INLINE void attend_queries(const attention_place *a, attention_work *w, int count, const void *queries,
                           int64_t query_stride, void *out, int64_t out_stride, const int32_t type) {
    const int64_t size = a->cache->head_size;
    int64_t first = INT64_MAX, end = 0;
    for (int q = 0; q < count; q++) {
        query *own = &w->queries[q];
        for (int64_t d = 0; d < size; d++) {
            w->vectors[q][d] = load_as(queries, own->row * query_stride + own->head * size + d, type);
        }
        memset(w->sums[q], 0, (size_t)size * sizeof(float));
        memset(w->lanes[q], 0, sizeof w->lanes[q]);
        own->most = -INFINITY;
        first = lower(first, own->first);
        end = higher(end, own->end);
    }
    for (int64_t start = first / KEY_SPLIT * KEY_SPLIT; start < end; start += KEY_SPLIT) {
        attend_split(a, w, count, start, type);
    }
    for (int q = 0; q < count; q++) {
        const query *own = &w->queries[q];
        const float total = sum_of_lanes(v16_load(w->lanes[q]));
        for (int64_t d = 0; d < size; d++) {
            store_as(out, own->row * out_stride + own->head * size + d, type, w->sums[q][d] / total);
        }
    }
}

// Rows [first, end) of one sequence, heads [head, last_head) of one kv head.
static void attend_tile(const attention_place *a, attention_work *w, int64_t first, int64_t end, int32_t head,
                        int32_t last_head, const void *queries, int64_t query_stride, void *out, int64_t out_stride) {
    const sd_rows *rows = a->rows;
    int count = 0;
    for (int64_t row = first; row < end; row++) {
        int64_t base = rows->base[row], position = rows->position[row], window = a->rule->window;
        int64_t last = rows->first == NULL ? position + 1 : base + rows->path_start[row + 1] - rows->path_start[row];
        int64_t begin = window > 0 && last > window ? last - window : 0;
        if (rows->first != NULL) begin = higher(begin, rows->first[row]);
        for (int32_t h = head; h < last_head; h++) {
            const int32_t *path = rows->path == NULL ? NULL : rows->path + rows->path_start[row];
            w->queries[count++] = (query){row, h, position, begin, base, last, path, 0};
        }
    }
    int32_t type = a->cache->type;
    if (type == SD_FLOAT32) attend_queries(a, w, count, queries, query_stride, out, out_stride, SD_FLOAT32);
    else if (type == SD_BFLOAT16) attend_queries(a, w, count, queries, query_stride, out, out_stride, SD_BFLOAT16);
    else attend_queries(a, w, count, queries, query_stride, out, out_stride, SD_FLOAT16);
}

#endif
