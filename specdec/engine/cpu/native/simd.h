// Sixteen float32 lanes, the same on every instruction set: one register of AVX-512, two of AVX2, four of NEON.
//
// Lanes are never added to each other here, and every operation is rounded as IEEE 754 says, so a kernel written with
// them has the same bits on all three.
#ifndef SPECDEC_SIMD_H
#define SPECDEC_SIMD_H

#include <stdint.h>
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
enum { LANES = 16 };

#if defined(__AVX512F__)
typedef __m512 v16;
INLINE v16 v16_zero(void) { return _mm512_setzero_ps(); }
INLINE v16 v16_all(float x) { return _mm512_set1_ps(x); }
INLINE v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v16_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }  // a > b ? a : b
INLINE v16 v16_load_bfloat16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE v16 v16_load_float16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void v16_store_bfloat16(uint16_t *p, v16 x) {
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i more = _mm512_add_epi32(_mm512_and_si512(high, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, more), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
}
INLINE void v16_store_float16(uint16_t *p, v16 x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
typedef struct {
    __m256 low, high;
} v16;
INLINE v16 v16_all(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE v16 v16_zero(void) { return v16_all(0); }
INLINE v16 v16_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v16_store(float *p, v16 x) {
    _mm256_storeu_ps(p, x.low);
    _mm256_storeu_ps(p + 8, x.high);
}
INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
    return (v16){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE v16 v16_mul(v16 a, v16 b) { return (v16){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE v16 v16_add(v16 a, v16 b) { return (v16){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE v16 v16_max(v16 a, v16 b) { return (v16){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE __m256 v8_widen(__m128i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
INLINE v16 v16_load_bfloat16(const uint16_t *p) {
    const __m128i *q = (const __m128i *)p;
    return (v16){v8_widen(_mm_loadu_si128(q)), v8_widen(_mm_loadu_si128(q + 1))};
}
INLINE v16 v16_load_float16(const uint16_t *p) {
    const __m128i *q = (const __m128i *)p;
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
INLINE __m256i v8_round_bfloat16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i more = _mm256_add_epi32(_mm256_and_si256(high, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, more), 16);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
}
INLINE void v16_store_bfloat16(uint16_t *p, v16 x) {
    __m256i both = _mm256_packus_epi32(v8_round_bfloat16(x.low), v8_round_bfloat16(x.high));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(both, 0xd8));
}
INLINE void v16_store_float16(uint16_t *p, v16 x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)p + 1, _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
typedef struct {
    float32x4_t part[4];
} v16;
#define EACH_PART(expression)                          \
    v16 found;                                         \
    for (int i = 0; i < 4; i++) found.part[i] = expression; \
    return found
INLINE v16 v16_all(float x) { EACH_PART(vdupq_n_f32(x)); }
INLINE v16 v16_zero(void) { return v16_all(0); }
INLINE v16 v16_load(const float *p) { EACH_PART(vld1q_f32(p + 4 * i)); }
INLINE void v16_store(float *p, v16 x) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.part[i]);
}
INLINE v16 v16_fma(v16 a, v16 b, v16 c) { EACH_PART(vfmaq_f32(c.part[i], a.part[i], b.part[i])); }
INLINE v16 v16_mul(v16 a, v16 b) { EACH_PART(vmulq_f32(a.part[i], b.part[i])); }
INLINE v16 v16_add(v16 a, v16 b) { EACH_PART(vaddq_f32(a.part[i], b.part[i])); }
INLINE v16 v16_max(v16 a, v16 b) {
    EACH_PART(vbslq_f32(vcgtq_f32(a.part[i], b.part[i]), a.part[i], b.part[i]));
}
INLINE v16 v16_load_bfloat16(const uint16_t *p) {
    EACH_PART(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
INLINE v16 v16_load_float16(const uint16_t *p) { EACH_PART(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
#undef EACH_PART
INLINE void v16_store_bfloat16(uint16_t *p, v16 x) {
    for (int i = 0; i < 4; i++) {
        uint32x4_t bits = vreinterpretq_u32_f32(x.part[i]), high = vshrq_n_u32(bits, 16);
        uint32x4_t more = vaddq_u32(vandq_u32(high, vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
        uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, more), 16), is_number = vceqq_f32(x.part[i], x.part[i]);
        vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(is_number, rounded, vorrq_u32(high, vdupq_n_u32(0x40)))));
    }
}
INLINE void v16_store_float16(uint16_t *p, v16 x) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.part[i])));
}
#endif

// 16 numbers of a type that is a constant at the call.
INLINE v16 v16_load_as(const void *p, int64_t index, int32_t type) {
    if (type == SD_FLOAT32) return v16_load((const float *)p + index);
    if (type == SD_BFLOAT16) return v16_load_bfloat16((const uint16_t *)p + index);
    return v16_load_float16((const uint16_t *)p + index);
}

INLINE void v16_store_as(void *p, int64_t index, int32_t type, v16 x) {
    if (type == SD_FLOAT32) {
        v16_store((float *)p + index, x);
    } else if (type == SD_BFLOAT16) {
        v16_store_bfloat16((uint16_t *)p + index, x);
    } else {
        v16_store_float16((uint16_t *)p + index, x);
    }
}

// Rounded to a type and back.
INLINE v16 v16_round_as(v16 x, int32_t type) {
    if (type == SD_FLOAT32) return x;
    uint16_t rounded[LANES];
    v16_store_as(rounded, 0, type, x);
    return v16_load_as(rounded, 0, type);
}

INLINE float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

// To the nearest bfloat16, ties to even; not-a-number stays one.
INLINE uint16_t bfloat16_of(float x) {
    uint32_t bits = bits_of_float(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : rounded);
}

INLINE float load_as(const void *p, int64_t index, int32_t type) {
    if (type == SD_FLOAT32) return ((const float *)p)[index];
    if (type == SD_BFLOAT16) return float_of_bits((uint32_t)((const uint16_t *)p)[index] << 16);
#if defined(__x86_64__)
    return _cvtsh_ss(((const uint16_t *)p)[index]);
#else
    __fp16 half;
    memcpy(&half, (const uint16_t *)p + index, 2);
    return half;
#endif
}

INLINE void store_as(void *p, int64_t index, int32_t type, float x) {
    if (type == SD_FLOAT32) {
        ((float *)p)[index] = x;
    } else if (type == SD_BFLOAT16) {
        ((uint16_t *)p)[index] = bfloat16_of(x);
    } else {
#if defined(__x86_64__)
        ((uint16_t *)p)[index] = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
        __fp16 half = (__fp16)x;
        memcpy((uint16_t *)p + index, &half, 2);
#endif
    }
}

// Rounded to a type and back.
INLINE float round_as(float x, int32_t type) {
    uint32_t stored = 0;
    store_as(&stored, 0, type, x);
    return load_as(&stored, 0, type);
}

#endif
