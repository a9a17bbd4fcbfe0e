// The tiles of a product: some rows of x times some panels of weights, their sums in registers over a block of k.
//
// A tile is a function of its kind, its rows and its panels, all constants in it; see products.h for the order of sums
// and the panels.
#ifndef SPECDEC_TILES_H
#define SPECDEC_TILES_H

#include "groups.h"
#include "simd.h"
#include "tile.h"

// sums[r][p] += x[r][k] * panels[p][k], k rising; all rows and panels are independent of each other.
INLINE void add_units(const int kind, const int rows, const int panels, const tile *t, const char *w,
                      const char *x, int64_t units, v16 sums[TILE_ROWS][PANELS_MAX]) {
    const int step = kind == BY_BFLOAT16 ? 2 : 1;
    const int64_t panel_bytes = t->panel_bytes, x_row = t->x_row, ahead = t->ahead;
    int64_t k = 0;
    for (; k + step <= units; k += step, w += kind == BY_FLOAT16 ? 32 : 64) {
        for (int half = 0; half < step; half++) {
            v16 weights[PANELS_MAX];
            for (int p = 0; p < panels; p++) {
                const char *at = w + p * panel_bytes;
                if (half == 0) __builtin_prefetch(at + ahead, 0, 2);
                if (kind == BY_FLOAT32 || kind == BY_PAIRS) weights[p] = v16_load((const float *)at);
                if (kind == BY_BFLOAT16) weights[p] = v16_load_half((const uint32_t *)at, half);
                if (kind == BY_FLOAT16) weights[p] = v16_load_float16((const uint16_t *)at);
            }
            for (int r = 0; r < rows; r++) {
                const float unit = unit_at(x + r * x_row, k + half);
                for (int p = 0; p < panels; p++) {
                    sums[r][p] = kind == BY_PAIRS ? v16_add_pair(weights[p], unit, sums[r][p])
                                                  : v16_fma(v16_all(unit), weights[p], sums[r][p]);
                }
            }
        }
    }
    if (k == units) return;
    for (int r = 0; r < rows; r++) {
        for (int p = 0; p < panels; p++) {
            v16 weights = v16_load_half((const uint32_t *)(w + p * panel_bytes), 0);
            sums[r][p] = v16_fma(v16_all(unit_at(x + r * x_row, k)), weights, sums[r][p]);
        }
    }
}

INLINE tile next_panels(const int kind, tile t, int64_t count) {
    t.panels += count * t.panel_bytes;
    t.sums += count * LANES;
    if (are_groups(kind)) {
        t.scales += count * t.scales_bytes;
        t.minima += count * t.scales_bytes;
    }
    return t;
}

INLINE void add_group_blocks(const int kind, const int rows, const int panels, const tile *t) {
    for (int64_t k = 0; k < t->units; k += BLOCK) {
        const char *w = t->panels + panel_bytes_of(kind, k), *x = t->x + k / BLOCK * t->x_step;
        const int64_t group = k / t->group_units, units = least(BLOCK, t->units - k);
        if (t->x_sums != NULL) add_groups(kind, rows, panels, 1, t, w, x, group, units);
        else add_groups(kind, rows, panels, 0, t, w, x, group, units);
    }
}

INLINE void add_tile(const int kind, const int rows, const int panels, const tile *t) {
    if (are_groups(kind)) {
        // Widened values are quick to read again: by fewer panels, whose sums registers keep from group to group.
        const int some = are_widened(kind) && !are_kept(rows, panels) && panels > 2 ? 2 : panels;
        for (int p = 0; p < panels; p += some) {
            const tile part = next_panels(kind, *t, p);
            if (panels - p >= some) add_group_blocks(kind, rows, some, &part);
            else add_group_blocks(kind, rows, 1, &part);
        }
        return;
    }
    v16 sums[TILE_ROWS][PANELS_MAX];
    for (int r = 0; r < rows; r++) {
        for (int p = 0; p < panels; p++) sums[r][p] = v16_load(t->sums + r * t->sums_stride + p * LANES);
    }
    for (int64_t k = 0; k < t->units; k += BLOCK) {
        add_units(kind, rows, panels, t, t->panels + panel_bytes_of(kind, k), t->x + k / BLOCK * t->x_step,
                  least(BLOCK, t->units - k), sums);
    }
    for (int r = 0; r < rows; r++) {
        for (int p = 0; p < panels; p++) v16_store(t->sums + r * t->sums_stride + p * LANES, sums[r][p]);
    }
}

// add_tile for each kind, each number of rows, and 1, 2 or the most panels.
typedef void (*tile_function)(const tile *t);
#define TILE(kind, rows)                                                                           \
    static void add_##kind##_##rows##_1(const tile *t) { add_tile(kind, rows, 1, t); }             \
    static void add_##kind##_##rows##_2(const tile *t) { add_tile(kind, rows, 2, t); }             \
    static void add_##kind##_##rows##_wide(const tile *t) { add_tile(kind, rows, WIDE_##rows, t); }
#define ENTRY(kind, rows) {add_##kind##_##rows##_1, add_##kind##_##rows##_2, add_##kind##_##rows##_wide}
#if defined(__AVX512F__)
#define EACH_ROWS(what, kind, between) what(kind, 1) between what(kind, 2) between what(kind, 3) between what(kind, 4) \
    between what(kind, 5) between what(kind, 6) between what(kind, 7) between what(kind, 8)
static const int wide_panels[TILE_ROWS] = {WIDE_1, WIDE_2, WIDE_3, WIDE_4, WIDE_5, WIDE_6, WIDE_7, WIDE_8};
#else
#define EACH_ROWS(what, kind, between) what(kind, 1) between what(kind, 2) between what(kind, 3) between what(kind, 4) \
    between what(kind, 5) between what(kind, 6)
static const int wide_panels[TILE_ROWS] = {WIDE_1, WIDE_2, WIDE_3, WIDE_4, WIDE_5, WIDE_6};
#endif
#define NOTHING
#define COMMA ,
EACH_ROWS(TILE, BY_FLOAT32, NOTHING)
EACH_ROWS(TILE, BY_BFLOAT16, NOTHING)
EACH_ROWS(TILE, BY_FLOAT16, NOTHING)
EACH_ROWS(TILE, BY_INT4, NOTHING)
EACH_ROWS(TILE, BY_INT8, NOTHING)
EACH_ROWS(TILE, BY_FLOAT8, NOTHING)
EACH_ROWS(TILE, BY_GROUPS, NOTHING)
#if defined(__AVX512BF16__)
EACH_ROWS(TILE, BY_PAIRS, NOTHING)
EACH_ROWS(TILE, BY_INT4_PAIRS, NOTHING)
EACH_ROWS(TILE, BY_INT8_PAIRS, NOTHING)
EACH_ROWS(TILE, BY_FLOAT8_PAIRS, NOTHING)
EACH_ROWS(TILE, BY_GROUP_PAIRS, NOTHING)
#endif
static const tile_function tile_functions[][TILE_ROWS][3] = {
    {EACH_ROWS(ENTRY, BY_FLOAT32, COMMA)},
    {EACH_ROWS(ENTRY, BY_BFLOAT16, COMMA)},
    {EACH_ROWS(ENTRY, BY_FLOAT16, COMMA)},
    {EACH_ROWS(ENTRY, BY_INT4, COMMA)},
    {EACH_ROWS(ENTRY, BY_INT8, COMMA)},
    {EACH_ROWS(ENTRY, BY_FLOAT8, COMMA)},
    {EACH_ROWS(ENTRY, BY_GROUPS, COMMA)},
#if defined(__AVX512BF16__)
    {EACH_ROWS(ENTRY, BY_PAIRS, COMMA)},
    {EACH_ROWS(ENTRY, BY_INT4_PAIRS, COMMA)},
    {EACH_ROWS(ENTRY, BY_INT8_PAIRS, COMMA)},
    {EACH_ROWS(ENTRY, BY_FLOAT8_PAIRS, COMMA)},
    {EACH_ROWS(ENTRY, BY_GROUP_PAIRS, COMMA)},
#endif
};

// A tile of `rows` rows (1 .. TILE_ROWS) and any number of panels.
static void add_panels(int kind, int64_t rows, int64_t panels, tile t) {
    const tile_function *functions = tile_functions[kind][rows - 1];
    for (int64_t p = 0, some; p < panels; p += some) {
        int64_t wide = wide_panels[rows - 1];
        int is_wide = panels - p >= wide;
        some = is_wide ? wide : panels - p >= 2 ? 2 : 1;
        functions[is_wide ? 2 : some - 1](&t);
        t = next_panels(kind, t, some);
    }
}

#endif
