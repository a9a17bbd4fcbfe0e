// Products y = x W' + bias of any number of rows, in one order of sums.
//
// The order: each output is one running sum along k, from 0, in float32, one fused multiply-add a step; in the family
// avx512_bf16 with bfloat16 weights and x one vdpbf16ps a pair (2k, 2k + 1), an odd end paired with zeros; then + bias
// in float32, then one rounding to the type of y. No lane is added to another and no sum is split, so the bits of a row
// depend on neither the rows beside it, nor their number, nor that of threads. Blocks along k keep the sums in memory.
//
// Of packed weights (groups.h) the running sums are those of a group; the output's own adds them up, group by group. Where
// rows are many their values are widened once for all tiles, which changes no number.
//
// Panels, 16 outputs each: see packing.h.
#ifndef SPECDEC_PRODUCTS_H
#define SPECDEC_PRODUCTS_H

#include <stddef.h>
#include <string.h>

#include "packing.h"
#include "parallel.h"
#include "simd.h"
#include "tiles.h"

// Of a product of several tiles: outputs, and rows, of a block; rows from which weights are widened once for all tiles:
// of 16 bits, of groups, of 4 bits that a table turns into pairs.
enum { BLOCK_PANELS = 8, BLOCK_X_BYTES = 2 << 20, WIDENED_16 = 256, WIDENED_GROUPS = 24, WIDENED_INT4_PAIRS = 128 };

// Weights are prefetched for the panels that follow those of a tile, or, where these lie farther, in the same panels.
enum { AHEAD_MAX = 256 << 10, AHEAD_IN_PANEL = 16 << 10 };

// A block of x as units: x[r][k] -> to[r * BLOCK + unit]; a pair that k ends is filled with zero.
static void prepare_block(int kind, const void *x, int32_t type, int64_t stride, int64_t rows, int64_t first_unit,
                          int64_t units, int64_t in_size, float *to) {
    for (int64_t r = 0; r < rows; r++, to += BLOCK) {
        if (are_pairs(kind)) {
            int64_t elements = least(in_size - 2 * first_unit, 2 * units);
            if (elements & 1) to[units - 1] = 0;
            memcpy(to, (const uint16_t *)x + r * stride + 2 * first_unit, (size_t)elements * 2);
            continue;
        }
        int64_t from = r * stride + first_unit, k = 0;
        if (type == SD_FLOAT32) {
            memcpy(to, (const float *)x + from, (size_t)units * 4);
        } else if (type == SD_BFLOAT16) {
            for (; k < units; k++) to[k] = load_as(x, from + k, SD_BFLOAT16);
        } else {
            for (; k + LANES <= units; k += LANES) v16_store(to + k, v16_load_as(x, from + k, SD_FLOAT16));
            for (; k < units; k++) to[k] = load_as(x, from + k, SD_FLOAT16);
        }
    }
}

// `units` weights of each panel as units [panels][BLOCK][16]; returns how these are multiplied.
static int widen(int kind, const tile *t, int64_t panel_count, float *to) {
    if (kind == BY_INT4) widen_groups(BY_INT4, t, panel_count, to);
    if (kind == BY_INT8) widen_groups(BY_INT8, t, panel_count, to);
    if (kind == BY_FLOAT8) widen_groups(BY_FLOAT8, t, panel_count, to);
#if defined(__AVX512BF16__)
    if (kind == BY_INT4_PAIRS) widen_groups(BY_INT4_PAIRS, t, panel_count, to);
    if (kind == BY_INT8_PAIRS) widen_groups(BY_INT8_PAIRS, t, panel_count, to);
    if (kind == BY_FLOAT8_PAIRS) widen_groups(BY_FLOAT8_PAIRS, t, panel_count, to);
#endif
    if (are_groups(kind)) return are_pairs(kind) ? BY_GROUP_PAIRS : BY_GROUPS;
    const char *panels = t->panels;
    const int64_t panel_bytes = t->panel_bytes, units = t->units;
    for (int64_t p = 0; p < panel_count; p++, panels += panel_bytes, to += BLOCK * LANES) {
        if (kind == BY_FLOAT16) {
            const uint16_t *from = (const uint16_t *)panels;
            for (int64_t k = 0; k < units; k++) v16_store(to + k * LANES, v16_load_float16(from + k * LANES));
            continue;
        }
        const uint32_t *from = (const uint32_t *)panels;
        for (int64_t k = 0; k < units; k++) {
            v16_store(to + k * LANES, k & 1 ? v16_load_half(from + k / 2 * LANES, 1)
                                            : v16_load_half(from + k / 2 * LANES, 0));
        }
    }
    return BY_FLOAT32;
}

// y = sums + bias, rounded once to the type of y.
INLINE void finish(const sd_weight *w, const float *sums, int64_t sums_stride, void *y, const int32_t y_type,
                   int64_t y_stride, int64_t rows, int64_t first_panel, int64_t panels) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t p = 0; p < panels; p++) {
            int64_t n = (first_panel + p) * LANES, count = least(LANES, w->out_size - n);
            const float *from = sums + r * sums_stride + p * LANES;
            if (count == LANES) {
                v16 sum = v16_load(from);
                if (w->bias != NULL) sum = v16_add(sum, v16_load(w->bias + n));
                v16_store_as(y, r * y_stride + n, y_type, sum);
                continue;
            }
            for (int64_t i = 0; i < count; i++) {
                float sum = w->bias != NULL ? from[i] + w->bias[n + i] : from[i];
                store_as(y, r * y_stride + n + i, y_type, sum);
            }
        }
    }
}

static void finish_as(const sd_weight *w, const float *sums, int64_t sums_stride, void *y, int32_t y_type,
                      int64_t y_stride, int64_t rows, int64_t first_panel, int64_t panels) {
    if (y_type == SD_FLOAT32) finish(w, sums, sums_stride, y, SD_FLOAT32, y_stride, rows, first_panel, panels);
    if (y_type == SD_BFLOAT16) finish(w, sums, sums_stride, y, SD_BFLOAT16, y_stride, rows, first_panel, panels);
    if (y_type == SD_FLOAT16) finish(w, sums, sums_stride, y, SD_FLOAT16, y_stride, rows, first_panel, panels);
}

// How a product is cut, and its memory.
typedef struct {
    int kind;
    int64_t units;                // of a whole sum
    int64_t rows, panels, step;   // of a block; step: units
    int is_direct;                // x has units already, and is read where it lies
    int is_whole, is_widened;    // x is prepared for all of k at once; weights are widened once for all tiles
    int64_t groups;               // of packed weights with minima, within a whole sum; else 0
    float *x, *sums, *weights;    // x [blocks][rows][BLOCK], sums [rows][panels * 16], weights [panels][BLOCK][16]
    float *x_sums;                // [rows][groups]
} product_plan;

// For lack of memory: blocks that lie on the stack.
enum { SMALL_X = TILE_ROWS * BLOCK, SMALL_SUMS = TILE_ROWS * LANES, SMALL_X_SUMS = TILE_ROWS * 2 * BLOCK / GROUP_MIN };

// How the panels of a weight multiply x of a type.
static int kind_of(const sd_weight *w, int32_t x_type) {
#if defined(__AVX512BF16__)
    static const int pairs[] = {[SD_INT4] = BY_INT4_PAIRS, [SD_INT8] = BY_INT8_PAIRS, [SD_FLOAT8] = BY_FLOAT8_PAIRS};
    if (x_type == SD_BFLOAT16 && w->type == SD_BFLOAT16) return BY_PAIRS;
    if (x_type == SD_BFLOAT16 && is_packed(w)) return pairs[w->type];
#endif
    (void)x_type;
    static const int kinds[] = {BY_FLOAT32, BY_BFLOAT16, BY_FLOAT16, BY_INT4, BY_INT8, BY_FLOAT8};
    return kinds[w->type];
}

static product_plan plan_product(const sd_weight *w, int32_t x_type, int64_t rows, int64_t panels, float *small) {
    product_plan plan = {.kind = kind_of(w, x_type)};
    plan.units = are_pairs(plan.kind) ? quotient_up(w->in_size, 2) : w->in_size;
    plan.is_direct = are_pairs(plan.kind) ? w->in_size % 2 == 0 : x_type == SD_FLOAT32;
    plan.groups = is_packed(w) && w->minimum_type != SD_NONE ? w->in_size / w->group : 0;
    plan.is_whole = 1;
    int64_t blocks = quotient_up(plan.units, BLOCK);
    plan.is_widened = !are_widened(plan.kind) && rows >= (plan.kind == BY_INT4_PAIRS  ? WIDENED_INT4_PAIRS
                                                          : are_groups(plan.kind) ? WIDENED_GROUPS
                                                                                  : WIDENED_16);
    plan.rows = rows;
    plan.panels = rows > TILE_ROWS ? least(panels, BLOCK_PANELS) : wide_panels[rows - 1];
    plan.step = rows > TILE_ROWS ? BLOCK : blocks * BLOCK;
    int64_t rows_max = BLOCK_X_BYTES / (blocks * BLOCK * 4) / MANY_ROWS * MANY_ROWS;
    if (rows > TILE_ROWS && rows > rows_max) plan.rows = rows_max > MANY_ROWS ? rows_max : MANY_ROWS;
    int64_t x = plan.is_direct ? 0 : plan.rows * blocks * BLOCK, sums = plan.rows * plan.panels * LANES;
    int64_t weights = plan.is_widened ? plan.panels * BLOCK * LANES : 0;
    plan.x = sd_own_scratch((size_t)(x + sums + weights + plan.rows * plan.groups) * sizeof(float));
    if (plan.x == NULL) {
        plan.is_whole = plan.is_widened = 0;
        plan.rows = least(rows, TILE_ROWS);
        plan.panels = 1;
        plan.step = BLOCK;
        plan.x = small;
        x = SMALL_X;
        sums = SMALL_SUMS;
        weights = 0;
        if (plan.groups > 0) plan.groups = least(plan.groups, elements_of(plan.kind, BLOCK) / w->group);
    }
    plan.sums = plan.x + x;
    plan.weights = plan.sums + sums;
    plan.x_sums = plan.weights + weights;
    return plan;
}

// sums += the products of one block of k, for the plan's panels and some of its rows. The tile is that of all of them.
static void add_block(const product_plan *plan, tile t, int64_t rows, int64_t panel_count) {
    const char *x = t.x;
    const float *x_sums = t.x_sums;
    int kind = plan->kind;
    if (plan->is_widened) {
        kind = widen(kind, &t, panel_count, plan->weights);
        t.panels = (const char *)plan->weights;
        t.panel_bytes = BLOCK * LANES * 4;
    }
    if (rows <= TILE_ROWS) {
        t.ahead = wide_panels[rows - 1] * t.panel_bytes;
        if (t.ahead > AHEAD_MAX) t.ahead = AHEAD_IN_PANEL;
        add_panels(kind, rows, panel_count, t);
        return;
    }
    int64_t tiles = quotient_up(rows, are_groups(kind) && !are_widened(kind) ? TILE_ROWS : MANY_ROWS);
    for (int64_t i = 0; i < tiles; i++) {
        int64_t first = rows * i / tiles, end = rows * (i + 1) / tiles;
        t.x = x + first * t.x_row;
        if (x_sums != NULL) t.x_sums = x_sums + first * t.x_sums_stride;
        // The first tile reads the weights from memory: meanwhile the next block of k arrives.
        t.ahead = i > 0 ? 0 : panel_bytes_of(kind, BLOCK);
        t.sums = plan->sums + first * t.sums_stride;
        add_panels(kind, end - first, panel_count, t);
    }
}

// The sums of x over each group of k in [first, end): eight running sums, which are then added in pairs.
INLINE void sum_groups_as(const int32_t type, const void *x, int64_t stride, int64_t rows, int64_t first, int64_t end,
                          int64_t group, float *to, int64_t to_stride) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t k = first; k < end; k += group) {
            float sums[GROUP_MIN] = {0};
            for (int64_t i = k; i < k + group; i += GROUP_MIN)
                for (int j = 0; j < GROUP_MIN; j++) sums[j] += load_as(x, r * stride + i + j, type);
            for (int width = GROUP_MIN / 2; width > 0; width /= 2)
                for (int j = 0; j < width; j++) sums[j] += sums[j + width];
            to[r * to_stride + (k - first) / group] = sums[0];
        }
    }
}

static void sum_groups(const void *x, int32_t type, int64_t stride, int64_t rows, int64_t first, int64_t end,
                       int64_t group, float *to, int64_t to_stride) {
    if (type == SD_FLOAT32) sum_groups_as(SD_FLOAT32, x, stride, rows, first, end, group, to, to_stride);
    if (type == SD_BFLOAT16) sum_groups_as(SD_BFLOAT16, x, stride, rows, first, end, group, to, to_stride);
    if (type == SD_FLOAT16) sum_groups_as(SD_FLOAT16, x, stride, rows, first, end, group, to, to_stride);
}

// What a tile of packed weights reads beside the values, from element k on.
static void set_groups(tile *t, const product_plan *plan, const sd_weight *w, const char *panel, int64_t k) {
    const group_places places = places_of(w);
    const int64_t group = k / w->group * LANES;
    t->group_units = w->group / elements_of(plan->kind, 1);
    t->scale_type = w->scale_type;
    t->minimum_type = w->minimum_type;
    t->zero = (float)zero_of(w);
    t->panels = panel + places.values + panel_bytes_of(plan->kind, k / elements_of(plan->kind, 1));
    t->scales = panel + group * size_of(w->scale_type);
    t->minima = panel + places.minima + group * size_of(w->minimum_type);
    t->scales_bytes = places.bytes;
    if (plan->groups > 0) t->x_sums = plan->x_sums + (plan->is_whole ? k / w->group : 0);
    t->x_sums_stride = plan->groups;
}

// The outputs of the panels [first_panel, end_panel) of all rows; one thread's part, without a barrier.
static void product_part(const sd_weight *w, const void *x, int32_t x_type, int64_t x_stride, void *y, int32_t y_type,
                         int64_t y_stride, int64_t rows, int64_t first_panel, int64_t end_panel) {
    if (rows <= 0 || first_panel >= end_panel) return;
    float small[SMALL_X + SMALL_SUMS + SMALL_X_SUMS];
    const product_plan plan = plan_product(w, x_type, rows, end_panel - first_panel, small);
    const int64_t panel_bytes = weight_panel_bytes(w), item = x_type == SD_FLOAT32 ? 4 : 2;
    for (int64_t row = 0; row < rows; row += plan.rows) {
        int64_t some_rows = least(plan.rows, rows - row);
        const char *from = (const char *)x + row * x_stride * item;
        char *to = (char *)y + row * y_stride * (y_type == SD_FLOAT32 ? 4 : 2);
        for (int64_t k = 0; !plan.is_direct && plan.is_whole && k < plan.units; k += BLOCK) {
            prepare_block(plan.kind, from, x_type, x_stride, some_rows, k, least(BLOCK, plan.units - k), w->in_size,
                          plan.x + k * some_rows);
        }
        if (plan.groups > 0 && plan.is_whole)
            sum_groups(from, x_type, x_stride, some_rows, 0, w->in_size, w->group, plan.x_sums, plan.groups);
        for (int64_t p = first_panel; p < end_panel; p += plan.panels) {
            int64_t panels = least(plan.panels, end_panel - p);
            memset(plan.sums, 0, (size_t)(some_rows * plan.panels) * LANES * sizeof(float));
            for (int64_t k = 0; k < plan.units; k += plan.step) {
                const char *panel = (const char *)w->panels + p * panel_bytes;
                tile t = {.panels = panel + panel_bytes_of(plan.kind, k),
                          .panel_bytes = panel_bytes, .units = least(plan.step, plan.units - k),
                          .x = from + k * UNIT_BYTES, .x_row = x_stride * item, .x_step = BLOCK * UNIT_BYTES,
                          .sums = plan.sums, .sums_stride = plan.panels * LANES};
                if (!plan.is_direct) {
                    if (!plan.is_whole)
                        prepare_block(plan.kind, from, x_type, x_stride, some_rows, k, t.units, w->in_size, plan.x);
                    t.x = (const char *)(plan.is_whole ? plan.x + k * some_rows : plan.x);
                    t.x_row = BLOCK * UNIT_BYTES;
                    t.x_step = some_rows * t.x_row;
                }
                if (is_packed(w)) {
                    int64_t first = elements_of(plan.kind, k), end = first + elements_of(plan.kind, t.units);
                    if (plan.groups > 0 && !plan.is_whole)
                        sum_groups(from, x_type, x_stride, some_rows, first, end, w->group, plan.x_sums, plan.groups);
                    set_groups(&t, &plan, w, panel, first);
                }
                add_block(&plan, t, some_rows, panels);
            }
            finish_as(w, plan.sums, plan.panels * LANES, to, y_type, y_stride, some_rows, p, panels);
        }
    }
}

// Parts of a product: of whole tiles, a few for each thread; where rows are few, at most PART_BYTES of weights each.
enum { PARTS_A_THREAD = 4, MANY_PARTS_A_THREAD = 2, PART_BYTES = 256 << 10 };

INLINE int64_t tile_panels(int64_t rows) {
    return rows > TILE_ROWS ? BLOCK_PANELS : wide_panels[rows > 0 ? rows - 1 : 0];
}

static int64_t product_parts(const sd_weight *w, int64_t rows, int32_t threads) {
    if (threads <= 1) return 1;
    int64_t tiles = quotient_up(quotient_up(w->out_size, LANES), tile_panels(rows));
    if (rows > TILE_ROWS) return least(tiles, (int64_t)threads * MANY_PARTS_A_THREAD);
    int64_t few = (int64_t)threads * PARTS_A_THREAD, small = w->out_size / LANES * weight_panel_bytes(w) / PART_BYTES;
    return least(tiles, few > small ? few : small);
}

// The panels of a part.
static void share_panels(const sd_weight *w, int64_t rows, sd_thread part, int64_t *first, int64_t *end) {
    int64_t panels = quotient_up(w->out_size, LANES), tile = tile_panels(rows);
    sd_part(quotient_up(panels, tile), part, first, end);
    *first = least(*first * tile, panels);
    *end = least(*end * tile, panels);
}

typedef struct {
    const sd_weight *weight;
    const void *x;
    void *y;
    int32_t x_type, y_type;
    int64_t x_stride, y_stride, rows;
} product_call;

static void product_job(void *argument, sd_thread part) {
    const product_call *c = argument;
    int64_t first, end;
    share_panels(c->weight, c->rows, part, &first, &end);
    product_part(c->weight, c->x, c->x_type, c->x_stride, c->y, c->y_type, c->y_stride, c->rows, first, end);
}

static void product(const sd_weight *weight, const void *x, int32_t x_type, int64_t x_stride, void *y, int32_t y_type,
                    int64_t y_stride, int64_t rows, int32_t threads) {
    product_call call = {weight, x, y, x_type, y_type, x_stride, y_stride, rows};
    const sd_team team = sd_gather(threads);
    sd_share(&team, product_job, &call, product_parts(weight, rows, team.threads));
    sd_release(&team);
}

#endif
