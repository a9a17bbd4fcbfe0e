// Packed weights: integers of 4 or 8 bits, or FP8, in groups along k, each with a scale and perhaps a minimum.
//
// A group of a panel multiplies like a panel of its values, which float32 and bfloat16 hold exactly: one running sum
// from 0. Its end adds minimum * (the group's sum of x), if there is one, then scale * that sum, to the output's own.
//
// Panels, 16 outputs each: [in / group][16] scales, then minima if there are any, then values, each from a line of 64
// bytes on. Of 4 bits [in / 8][16] words of 32 bits: the half k % 2 of a word holds k, k + 2, k + 4, k + 6, the lowest
// bits first; stored is the value, plus 8 where there are no minima. Of 8 bits [in / 2][16][2] signed bytes; of FP8 see
// float8.h.
#ifndef SPECDEC_GROUPS_H
#define SPECDEC_GROUPS_H

#include "float8.h"
#include "simd.h"
#include "tile.h"

enum { LINE = 64, GROUP_MIN = 8 };  // GROUP_MIN: divides every group

// Bytes from the start of a panel to its parts, and to the next panel.
typedef struct {
    int64_t minima, values, bytes;
} group_places;

INLINE int64_t lines_of(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }
INLINE int64_t size_of(int32_t type) { return type == SD_FLOAT32 ? 4 : type == SD_NONE ? 0 : 2; }
INLINE int is_packed(const sd_weight *w) { return w->type >= SD_INT4; }

static group_places places_of(const sd_weight *w) {
    const int64_t numbers = w->in_size / w->group * LANES;
    group_places places;
    places.minima = lines_of(numbers * size_of(w->scale_type));
    places.values = places.minima + lines_of(numbers * size_of(w->minimum_type));
    places.bytes = places.values + w->in_size * (w->type == SD_INT4 ? 8 : 16);
    return places;
}

// Where value k of a lane lies: of 4 bits the word, and the bits in it.
INLINE int64_t word_of(int64_t k, int64_t lane) { return k / 8 * LANES + lane; }
INLINE int shift_of(int64_t k) { return (int)(k % 8 / 2 * 4 + k % 2 * 16); }
INLINE int64_t byte_of(const sd_weight *w, int64_t k, int64_t lane) {
    return w->type == SD_FLOAT8 ? float8_place(k, lane) : k / 2 * 2 * LANES + 2 * lane + k % 2;
}
INLINE int zero_of(const sd_weight *w) { return w->type == SD_INT4 && w->minimum_type == SD_NONE ? 8 : 0; }

// 16 outputs' values of 4 bits at k of their words. `own`: of AVX-512 the numbers of the 16 values, which are looked up
// by the lowest four bits; else zero, which is less.
INLINE v16 v16_of_words(const uint32_t *words, int k, lookup own) {
    const int shift = shift_of(k);
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps(_mm512_srli_epi32(_mm512_loadu_si512(words), (unsigned)shift), own.low);
#elif defined(__AVX2__)
    const __m256i mask = _mm256_set1_epi32(15);
    __m256i low = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)words), shift);
    __m256i high = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)(words + 8)), shift);
    return (v16){_mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(low, mask)), own.low.low),
                 _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(high, mask)), own.low.high)};
#else
    v16 found;
    for (int i = 0; i < 4; i++) {
        uint32x4_t bits = vandq_u32(vshlq_u32(vld1q_u32(words + 4 * i), vdupq_n_s32(-shift)), vdupq_n_u32(15));
        found.part[i] = vsubq_f32(vcvtq_f32_u32(bits), own.low.part[i]);
    }
    return found;
#endif
}

// 16 outputs' values of 8 bits at an even k (is_odd 0) or the next.
INLINE v16 v16_of_bytes(const int8_t *bytes, int is_odd) {
#if defined(__AVX512F__)
    __m512i both = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)bytes));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(is_odd ? both : _mm512_slli_epi32(both, 24), is_odd ? 8 : 24));
#elif defined(__AVX2__)
    __m256i low = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)bytes));
    __m256i high = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)bytes + 1));
    low = is_odd ? _mm256_srai_epi32(low, 8) : _mm256_srai_epi32(_mm256_slli_epi32(low, 24), 24);
    high = is_odd ? _mm256_srai_epi32(high, 8) : _mm256_srai_epi32(_mm256_slli_epi32(high, 24), 24);
    return (v16){_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
#else
    v16 found;
    for (int i = 0; i < 4; i++) {
        int32x4_t both = vmovl_s16(vreinterpret_s16_s8(vld1_s8(bytes + 8 * i)));
        both = is_odd ? vshrq_n_s32(both, 8) : vshrq_n_s32(vshlq_n_s32(both, 24), 24);
        found.part[i] = vcvtq_f32_s32(both);
    }
    return found;
#endif
}

// 16 outputs' pairs of bfloat16: pair `index` of their words, or that of 32 bytes.
#if defined(__AVX512BF16__)
static const uint16_t values_of_words[2][32] = {
    // 0 to 15 and -8 to 7, twice: a shifted word has a bit of the next value above the four.
#define FROM_0 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, \
    0x4160, 0x4170
#define FROM_8 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, \
    0x40c0, 0x40e0
    {FROM_0, FROM_0},
    {FROM_8, FROM_8},
#undef FROM_0
#undef FROM_8
};

INLINE v16 pairs_of_words(const uint32_t *words, int index, lookup own) {
    __m512i shifted = _mm512_srli_epi32(_mm512_loadu_si512(words), (unsigned)(4 * index));
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(shifted, _mm512_castps_si512(own.low)));
}

// The upper halves of 32 numbers: of a float of 8 bits that is its bfloat16.
static const uint16_t upper_halves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                          33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

INLINE v16 pairs_of_bytes(const int8_t *bytes, lookup own) {
    const __m512i upper = _mm512_castps_si512(own.low);
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes + 1)));
    return _mm512_castsi512_ps(_mm512_permutex2var_epi16(_mm512_castps_si512(low), upper, _mm512_castps_si512(high)));
}
#endif

// Units of x that multiply one line of values.
INLINE int line_units(const int kind) {
    if (are_widened(kind)) return 1;
    return (kind == BY_INT4 || kind == BY_INT4_PAIRS ? 8 : 4) / (are_pairs(kind) ? 2 : 1);
}

// The values of unit `index` of a line; `own` is the lookup of the kind.
INLINE v16 values_at(const int kind, const char *line, int index, lookup own) {
    const int8_t *bytes = (const int8_t *)line;
    if (are_widened(kind)) return v16_load((const float *)line);
    if (kind == BY_INT4) return v16_of_words((const uint32_t *)line, index, own);
    if (kind == BY_INT8) return v16_of_bytes(bytes + index / 2 * 32, index % 2);
    if (kind == BY_FLOAT8) return v16_of_float8(bytes, index, own);
#if defined(__AVX512BF16__)
    if (kind == BY_INT4_PAIRS) return pairs_of_words((const uint32_t *)line, index, own);
    if (kind == BY_INT8_PAIRS) return pairs_of_bytes(bytes + index * 32, own);
    if (kind == BY_FLOAT8_PAIRS) return pairs_of_float8(bytes + index * 32, own);
#endif
    return own.low;
}

INLINE lookup lookup_of(const int kind, float zero) {
    if (kind == BY_FLOAT8 || kind == BY_FLOAT8_PAIRS) return float8_lookup();
#if defined(__AVX512BF16__)
    if (kind == BY_INT4_PAIRS) return (lookup){v16_load((const float *)values_of_words[zero != 0]), v16_zero()};
    if (kind == BY_INT8_PAIRS) return (lookup){v16_load((const float *)upper_halves), v16_zero()};
#endif
#if defined(__AVX512F__)
    const v16 integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (lookup){_mm512_sub_ps(integers, v16_all(zero)), v16_zero()};
#else
    return (lookup){v16_all(zero), v16_zero()};
#endif
}

// A loop of a constant number of turns, of TILE_ROWS at most, that is unrolled: what it indexes may stay in registers.
#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

// The sums of a tile: in registers, if these hold them beside those of a group, else in memory.
INLINE int are_kept(const int rows, const int panels) { return (2 * rows + 1) * panels < REGISTERS; }

// Adds a group of one panel to its sums.
INLINE void end_group(const int rows, const int p, const int is_kept, const int has_minima, const tile *t,
                      int64_t group, const v16 parts[TILE_ROWS][PANELS_MAX], v16 kept[TILE_ROWS][PANELS_MAX]) {
    const char *scales = t->scales + p * t->scales_bytes;
    const v16 scale = v16_load_as(scales, group * LANES, t->scale_type);
    __builtin_prefetch(scales + group * LANES * size_of(t->scale_type) + t->ahead, 0, 2);
    v16 minima = v16_zero();
    if (has_minima) minima = v16_load_as(t->minima + p * t->scales_bytes, group * LANES, t->minimum_type);
    EACH(r, rows) {
        float *at = t->sums + r * t->sums_stride + p * LANES;
        v16 sum = is_kept ? kept[r][p] : v16_load(at);
        if (has_minima) sum = v16_fma(minima, v16_all(t->x_sums[r * t->x_sums_stride + group]), sum);
        sum = v16_fma(scale, parts[r][p], sum);
        if (is_kept) kept[r][p] = sum;
        else v16_store(at, sum);
    }
}

// sums[r][p] += x[r][k] * panels[p][k], group by group, from the tile's group `group` on; see the order above.
INLINE void add_groups(const int kind, const int rows, const int panels, const int has_minima, const tile *t,
                       const char *w, const char *x, int64_t group, int64_t units) {
    const int64_t panel_bytes = t->panel_bytes, x_row = t->x_row, ahead = t->ahead;
    const int is_kept = are_kept(rows, panels);
    const lookup own = lookup_of(kind, t->zero);
    v16 kept[TILE_ROWS][PANELS_MAX];
    if (is_kept) {
        EACH(r, rows) EACH(p, panels) kept[r][p] = v16_load(t->sums + r * t->sums_stride + p * LANES);
    }
    for (const int64_t end = group + units / t->group_units; group < end; group++) {
        v16 parts[TILE_ROWS][PANELS_MAX];
        EACH(r, rows) EACH(p, panels) parts[r][p] = v16_zero();
        for (int64_t k = 0; k < t->group_units; k += line_units(kind), w += LINE, x += line_units(kind) * UNIT_BYTES) {
            for (int p = 0; p < panels; p++) __builtin_prefetch(w + p * panel_bytes + ahead, 0, 2);
            for (int i = 0; i < line_units(kind); i++) {
                v16 values[PANELS_MAX];
                const char *line = w;
                __asm__ volatile("" : "+r"(line));  // read again: kept in registers it would drive sums out of them
                for (int p = 0; p < panels; p++) values[p] = values_at(kind, line + p * panel_bytes, i, own);
                for (int r = 0; r < rows; r++) {
                    const float unit = unit_at(x + r * x_row, i);
                    for (int p = 0; p < panels; p++)
                        parts[r][p] = are_pairs(kind) ? v16_add_pair(values[p], unit, parts[r][p])
                                                      : v16_fma(v16_all(unit), values[p], parts[r][p]);
                }
            }
        }
        EACH(p, panels) end_group(rows, p, is_kept, has_minima, t, group, parts, kept);
    }
    if (is_kept) {
        EACH(r, rows) EACH(p, panels) v16_store(t->sums + r * t->sums_stride + p * LANES, kept[r][p]);
    }
}

// `units` values of each panel, widened to units [panels][BLOCK][16].
INLINE void widen_groups(const int kind, const tile *t, int64_t panels, float *to) {
    const lookup own = lookup_of(kind, t->zero);
    for (int64_t p = 0; p < panels; p++, to += BLOCK * LANES) {
        const char *line = t->panels + p * t->panel_bytes;
        for (int64_t k = 0; k < t->units; k += line_units(kind), line += LINE) {
            __builtin_prefetch(line + panel_bytes_of(kind, BLOCK), 0, 2);  // the next block of k
            EACH(i, line_units(kind)) v16_store(to + (k + i) * LANES, values_at(kind, line, i, own));
        }
    }
}

#endif
