// A tile of a product: what it multiplies by, its sizes, and how one number is multiplied.
#ifndef SPECDEC_TILE_H
#define SPECDEC_TILE_H

#include <string.h>

#include "simd.h"

// How a tile multiplies: by the panels' type, and in PAIRS by vdpbf16ps.
// BY_GROUPS: values of groups that have been widened to units.
enum { BY_FLOAT32, BY_BFLOAT16, BY_FLOAT16, BY_INT4, BY_INT8, BY_FLOAT8, BY_GROUPS };
enum { BY_PAIRS = BY_GROUPS + 1, BY_INT4_PAIRS, BY_INT8_PAIRS, BY_FLOAT8_PAIRS, BY_GROUP_PAIRS };
INLINE int are_pairs(int kind) { return kind >= BY_PAIRS; }
INLINE int are_groups(int kind) { return kind != BY_PAIRS && kind >= BY_INT4; }
INLINE int are_widened(int kind) {
    return kind == BY_FLOAT32 || kind == BY_PAIRS || kind == BY_GROUPS || kind == BY_GROUP_PAIRS;
}

// A unit of x is 32 bits: one float, or a pair of bfloat16. Sums run over blocks of BLOCK units. Rows of x that are no
// units yet are prepared, block by block.
enum { UNIT_BYTES = 4, BLOCK = 512 };

// Rows of a tile and the most panels beside each other: as many sums as fill the registers. MANY_ROWS: of one of several
// tiles; PANELS_MAX: the most of WIDE_*; REGISTERS: of 16 lanes.
#if defined(__AVX512F__)
enum { TILE_ROWS = 8, WIDE_1 = 8, WIDE_2 = 4, WIDE_3 = 4, WIDE_4 = 4, WIDE_5 = 4, WIDE_6 = 4, WIDE_7 = 3, WIDE_8 = 3 };
enum { MANY_ROWS = 6, PANELS_MAX = 8, REGISTERS = 32 };
#else
enum { TILE_ROWS = 6, WIDE_1 = 4, WIDE_2 = 3, WIDE_3 = 2, WIDE_4 = 1, WIDE_5 = 1, WIDE_6 = 1 };
enum { MANY_ROWS = 6, PANELS_MAX = 4, REGISTERS = 8 };
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

// sum + a pair of bfloat16 of each output times that of x.
INLINE v16 v16_add_pair(v16 pairs, float x, v16 sum) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(pairs), (__m512bh)_mm512_castps_si512(v16_all(x)));
#else
    (void)pairs, (void)x;
    return sum;
#endif
}

INLINE float unit_at(const char *x, int64_t k) {
    float unit;
    memcpy(&unit, x + k * UNIT_BYTES, UNIT_BYTES);
    return unit;
}

// Elements of x in some units.
INLINE int64_t elements_of(int kind, int64_t units) { return are_pairs(kind) ? 2 * units : units; }

// Bytes of a panel's weights for `units` units of x, of groups without their scales.
INLINE int64_t panel_bytes_of(int kind, int64_t units) {
    if (are_widened(kind)) return units * 64;
    if (are_groups(kind)) return elements_of(kind, units) * (kind == BY_INT4 || kind == BY_INT4_PAIRS ? 8 : 16);
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
    // Of groups, from the block's first unit on: see groups.h.
    const char *scales, *minima;  // of the first panel
    int64_t scales_bytes;         // from panel to panel
    int64_t group_units;
    int32_t scale_type, minimum_type;
    float zero;           // less than what is stored
    const float *x_sums;  // [rows][x_sums_stride] sums of x over a group; NULL: no minima
    int64_t x_sums_stride;
} tile;

#endif
