// Attention of all rows and heads of a step, cut into tiles that share the reading of keys and values. A row's bits do
// not depend on the tile: see attention.h.
#ifndef SPECDEC_ATTEND_H
#define SPECDEC_ATTEND_H

#include "attention.h"
#include "parallel.h"

// For each thread: parts of the work, and at least so many tiles, so that threads end together.
enum { PARTS_OF_ATTENTION = 4, UNITS_A_THREAD = 3 };

// The end of the tile that begins at row `first`: at most `most` rows of one sequence.
INLINE int64_t tile_end(const sd_rows *rows, int64_t first, int64_t most) {
    int64_t end = first + 1;
    while (end < rows->count && end - first < most && rows->sequence[end] == rows->sequence[first]) end++;
    return end;
}

static int64_t attention_parts(int32_t threads) { return threads > 1 ? (int64_t)threads * PARTS_OF_ATTENTION : 1; }

// How the work is cut into tiles: heads of one kv head, and rows of one sequence, at most.
typedef struct {
    int64_t heads, rows;
} attention_tile;

// Many rows share a tile, a head at a time. Few: the heads that share a key head do. Where there would be too few tiles
// for all threads to end together, they have fewer rows; and fewer heads, which read their keys again, only where a
// thread would have none.
static attention_tile tile_of(int64_t rows, int64_t kv_heads, int64_t group, int32_t threads) {
    const int is_few = rows < 2 * QUERIES_MAX;
    attention_tile tile = {is_few ? lower(group, QUERIES_MAX) : 1, 0};
    tile.rows = lower(QUERIES_MAX / tile.heads, rows);
    while (threads > 1 && tile.rows > 1 &&
           (rows + tile.rows - 1) / tile.rows * kv_heads * (group / tile.heads) < (int64_t)UNITS_A_THREAD * threads)
        tile.rows = (tile.rows + 1) / 2;
    while (tile.heads > 1 && rows * kv_heads * ((group + tile.heads - 1) / tile.heads) < threads)
        tile.heads = (tile.heads + 1) / 2;
    return tile;
}

// A part's tiles: every count-th of all.
static void attend_part(const sd_cache *cache, const sd_rows *rows, const sd_rule *rule, int32_t heads,
                        const void *queries, int64_t query_stride, void *out, int64_t out_stride, int32_t threads,
                        sd_thread part) {
    attention_work work;
    const int32_t group = heads / cache->kv_heads;
    const attention_tile tile = tile_of(rows->count, cache->kv_heads, group, threads);
    int64_t unit = 0;
    for (int64_t first = 0, end; first < rows->count; first = end) {
        end = tile_end(rows, first, tile.rows);
        attention_place place = {cache, rows, rule, heads, 0, rows->table + rows->table_start[rows->sequence[first]]};
        for (int32_t kv_head = 0; kv_head < cache->kv_heads; kv_head++) {
            place.kv_head = kv_head;
            for (int32_t h = 0; h < group; h += (int32_t)tile.heads, unit++) {
                if (unit % part.count != part.index) continue;
                int32_t head = kv_head * group + h, last = head + (int32_t)lower(tile.heads, group - h);
                attend_tile(&place, &work, first, end, head, last, queries, query_stride, out, out_stride);
            }
        }
    }
}

typedef struct {
    const sd_cache *cache;
    const sd_rows *rows;
    const sd_rule *rule;
    const void *queries;
    void *out;
    int64_t query_stride, out_stride;
    int32_t heads, threads;
} attend_call;

static void attend_job(void *argument, sd_thread part) {
    const attend_call *c = argument;
    attend_part(c->cache, c->rows, c->rule, c->heads, c->queries, c->query_stride, c->out, c->out_stride, c->threads,
                part);
}

static void attend(const sd_cache *cache, const sd_rows *rows, const sd_rule *rule, int32_t heads, const void *queries,
                   int64_t query_stride, void *out, int64_t out_stride, int32_t threads) {
    const sd_team team = sd_gather(threads);
    attend_call call = {cache, rows, rule, queries, out, query_stride, out_stride, heads, team.threads};
    sd_share(&team, attend_job, &call, attention_parts(team.threads));
    sd_release(&team);
}

#endif
