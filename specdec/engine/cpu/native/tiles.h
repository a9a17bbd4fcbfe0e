// The tiles of a product: some rows of x times some panels of weights, their sums in registers over a block of k.
//
// A tile is a function of its kind, its rows and its panels, all constants in it; see products.h for the order of sums
// and the panels.
#ifndef SPECDEC_TILES_H
#define SPECDEC_TILES_H

#include <string.h>

#include "simd.h"

// How a tile multiplies: by the panels' type, and in PAIRS by vdpbf16ps.
enum { BY_FLOAT32, BY_BFLOAT16, BY_FLOAT16, BY_PAIRS };

// A unit of x is 32 bits: one float, or a pair of bfloat16. Sums run over blocks of BLOCK units. Rows of x that are no
// units yet are prepared, block by block.
enum { UNIT_BYTES = 4, BLOCK = 512 };

// Rows of a tile and the most panels beside each other: as many sums as fill the registers.
#if defined(__AVX512F__)
enum { TILE_ROWS = 8, WIDE_1 = 8, WIDE_2 = 4, WIDE_3 = 4, WIDE_4 = 4, WIDE_5 = 4, WIDE_6 = 4, WIDE_7 = 3, WIDE_8 = 3 };
enum { MANY_ROWS = 6, PANELS_MAX = 8 };  // rows of a tile where there are several tiles; the most of WIDE_*
#else
enum { TILE_ROWS = 6, WIDE_1 = 4, WIDE_2 = 3, WIDE_3 = 2, WIDE_4 = 1, WIDE_5 = 1, WIDE_6 = 1 };
enum { MANY_ROWS = 6, PANELS_MAX = 4 };
#endif

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 16 outputs' weights at 2k (is_odd 0) or 2k + 1 of a bfloat16 panel.
INLINE v16 v16_load_half(const uint32_t *p, int is_odd) {
#if defined(__AVX512F__)
    __m512i pair = _mm512_loadu_si512(p);
    return _mm512_castsi512_ps(is_odd ? _mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000))
                                      : _mm512_slli_epi32(pair, 16));
#elif defined(__AVX2__)
    __m256i low = _mm256_loadu_si256((const __m256i *)p), high = _mm256_loadu_si256((const __m256i *)(p + 8));
    __m256i mask = _mm256_set1_epi32((int)0xffff0000);
    low = is_odd ? _mm256_and_si256(low, mask) : _mm256_slli_epi32(low, 16);
    high = is_odd ? _mm256_and_si256(high, mask) : _mm256_slli_epi32(high, 16);
    return (v16){_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)};
#else
    v16 found;
    for (int i = 0; i < 4; i++) {
        uint32x4_t pair = vld1q_u32(p + 4 * i);
        pair = is_odd ? vandq_u32(pair, vdupq_n_u32(0xffff0000)) : vshlq_n_u32(pair, 16);
        found.part[i] = vreinterpretq_f32_u32(pair);
    }
    return found;
#endif
}

INLINE v16 v16_add_pair(const void *panel, float x, v16 sum) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(panel), (__m512bh)_mm512_castps_si512(v16_all(x)));
#else
    (void)panel, (void)x;
    return sum;
#endif
}

INLINE float unit_at(const char *x, int64_t k) {
    float unit;
    memcpy(&unit, x + k * UNIT_BYTES, UNIT_BYTES);
    return unit;
}

// Bytes of a panel's weights for `units` units of x.
INLINE int64_t panel_bytes_of(int kind, int64_t units) {
    if (kind == BY_FLOAT32 || kind == BY_PAIRS) return units * 64;
    return kind == BY_FLOAT16 ? units * 32 : quotient_up(units, 2) * 64;
}

typedef struct {
    const char *panels;     // the first panel, at the first unit of the block
    int64_t panel_bytes;    // from panel to panel
    const char *x;          // the tile's first row, at the first unit of the block
    int64_t x_row, x_step;  // bytes from row to row, and from block to block
    int64_t units;          // of the sum
    float *sums;            // the tile's first row and panel
    int64_t sums_stride;
    int64_t ahead;          // bytes from the weights that are read to those that are prefetched
} tile;

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
                if (kind == BY_FLOAT32) weights[p] = v16_load((const float *)at);
                if (kind == BY_BFLOAT16) weights[p] = v16_load_half((const uint32_t *)at, half);
                if (kind == BY_FLOAT16) weights[p] = v16_load_float16((const uint16_t *)at);
            }
            for (int r = 0; r < rows; r++) {
                const float unit = unit_at(x + r * x_row, k + half);
                for (int p = 0; p < panels; p++) {
                    sums[r][p] = kind == BY_PAIRS ? v16_add_pair(w + p * panel_bytes, unit, sums[r][p])
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

INLINE void add_tile(const int kind, const int rows, const int panels, const tile *t) {
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
#if defined(__AVX512BF16__)
EACH_ROWS(TILE, BY_PAIRS, NOTHING)
#endif
static const tile_function tile_functions[][TILE_ROWS][3] = {
    {EACH_ROWS(ENTRY, BY_FLOAT32, COMMA)},
    {EACH_ROWS(ENTRY, BY_BFLOAT16, COMMA)},
    {EACH_ROWS(ENTRY, BY_FLOAT16, COMMA)},
#if defined(__AVX512BF16__)
    {EACH_ROWS(ENTRY, BY_PAIRS, COMMA)},
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
        t.panels += some * t.panel_bytes;
        t.sums += some * LANES;
    }
}

#endif
