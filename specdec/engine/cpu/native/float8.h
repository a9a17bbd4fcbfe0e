// Numbers of FP8: E4M3 without infinities (OCP 8-bit Floating Point Specification 1.0), widened exactly.
//
// A byte has a sign, 4 bits e and 3 bits m: (1 + m / 8) 2^(e - 7), or m 2^-9 where e is 0. Panels hold no byte that is no
// number (e and m all ones).
//
// Of an output panels hold four bytes side by side, [in / 4][16][4]. Moved to where float32 has sign, exponent and
// mantissa, a byte is 2^120 times too small, denormal where e is 0 (which threads keep, see parallel.c).
//
// Where pairs of bfloat16 are multiplied, [in / 2][16][2] codes: bit 7 is the sign, bits 0 to 5 say which of 64 words, bit
// 6 turns bit 6 of that word over. A word is a bfloat16: two numbers whose bits differ there share one, and code 0 is
// zero, beside 2^-9. No number is a denormal bfloat16, which vdpbf16ps would take as zero.
#ifndef SPECDEC_FLOAT8_H
#define SPECDEC_FLOAT8_H

#include "simd.h"

// What widening keeps in registers: of FP8 the factor or the words; of integers what is looked up, or subtracted.
typedef struct {
    v16 low, high;
} lookup;

#if defined(__AVX512BF16__)
// Words 4 e to 4 e + 3 of an exponent e from 1 on: m from 0 to 3, and with bit 6 from 4 to 7.
#define WORDS_OF(e) (e + 120) << 7, (e + 120) << 7 | 0x10, (e + 120) << 7 | 0x20, (e + 120) << 7 | 0x30
static const uint16_t float8_words[64] = {
    // 0 or 2^-9; 2 or 3, 4 or 6, 5 or 7 times it
    118 << 7 | 0x40, 119 << 7, 120 << 7, 120 << 7 | 0x20,
    WORDS_OF(1), WORDS_OF(2), WORDS_OF(3), WORDS_OF(4), WORDS_OF(5), WORDS_OF(6), WORDS_OF(7), WORDS_OF(8),
    WORDS_OF(9), WORDS_OF(10), WORDS_OF(11), WORDS_OF(12), WORDS_OF(13), WORDS_OF(14), WORDS_OF(15),
};
#undef WORDS_OF

INLINE int64_t float8_place(int64_t k, int64_t lane) { return k / 2 * 2 * LANES + 2 * lane + k % 2; }

// A byte of a file as panels hold it.
INLINE uint8_t float8_stored(uint8_t byte) {
    const int e = byte >> 3 & 15, m = byte & 7;
    if (e > 0) return (uint8_t)((byte & 0x80) | (m & 4) << 4 | (4 * e + (m & 3)));
    return (uint8_t)((byte & 0x80) | (m < 4 ? (m & 1) << 6 | m >> 1 : (m & 2) << 5 | (2 + (m & 1))));
}

INLINE float float_of_float8(uint8_t stored) {
    const uint32_t word = (stored & 0x7f) == 0 ? 0 : float8_words[stored & 63] ^ (stored & 0x40u);
    return float_of_bits((word | (stored & 0x80u) << 8) << 16);
}

INLINE lookup float8_lookup(void) {
    return (lookup){v16_load((const float *)float8_words), v16_load((const float *)(float8_words + 32))};
}

// 16 outputs' pairs of bfloat16 of 32 bytes.
INLINE v16 pairs_of_float8(const int8_t *bytes, lookup words) {
    __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
    __mmask32 is_other = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x7f));  // than zero
    __m512i found = _mm512_maskz_permutex2var_epi16(is_other, _mm512_castps_si512(words.low), codes,
                                                    _mm512_castps_si512(words.high));
    const int xor_of_and = 0x78;  // found ^ (codes & those bits)
    found = _mm512_ternarylogic_epi32(found, codes, _mm512_set1_epi16((short)0x8040), xor_of_and);
    return _mm512_castsi512_ps(found);
}
#else
INLINE int64_t float8_place(int64_t k, int64_t lane) { return k / 4 * 4 * LANES + 4 * lane + k % 4; }

INLINE uint8_t float8_stored(uint8_t byte) { return byte; }

INLINE float float_of_float8(uint8_t stored) {
    return float_of_bits((stored & 0x80u) << 24 | (stored & 0x7fu) << 20) * 0x1p120f;
}

INLINE lookup float8_lookup(void) { return (lookup){v16_all(0x1p120f), v16_zero()}; }
#endif

// 16 outputs' values of unit `index`, from 0 to 3, of a line of 64 bytes.
INLINE v16 v16_of_float8(const int8_t *line, int index, lookup own) {
#if defined(__AVX512BF16__)
    __m512i pairs = _mm512_castps_si512(pairs_of_float8(line + index / 2 * 32, own));
    return _mm512_castsi512_ps(index % 2 ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000))
                                         : _mm512_slli_epi32(pairs, 16));
#elif defined(__AVX512F__)
    __m512i bytes = _mm512_slli_epi32(_mm512_loadu_si512(line), (unsigned)(24 - 8 * index));
    __m512i bits = _mm512_and_si512(_mm512_srai_epi32(bytes, 4), _mm512_set1_epi32((int)0x87f00000));
    return v16_mul(_mm512_castsi512_ps(bits), own.low);
#elif defined(__AVX2__)
    const __m256i mask = _mm256_set1_epi32((int)0x87f00000);
    __m256i low = _mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)line), 24 - 8 * index);
    __m256i high = _mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)line + 1), 24 - 8 * index);
    low = _mm256_and_si256(_mm256_srai_epi32(low, 4), mask);
    high = _mm256_and_si256(_mm256_srai_epi32(high, 4), mask);
    return v16_mul((v16){_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)}, own.low);
#else
    v16 found;
    for (int i = 0; i < 4; i++) {
        int32x4_t bytes = vshlq_s32(vreinterpretq_s32_s8(vld1q_s8(line + 16 * i)), vdupq_n_s32(24 - 8 * index));
        uint32x4_t bits = vandq_u32(vreinterpretq_u32_s32(vshrq_n_s32(bytes, 4)), vdupq_n_u32(0x87f00000));
        found.part[i] = vreinterpretq_f32_u32(bits);
    }
    return v16_mul(found, own.low);
#endif
}

#endif
