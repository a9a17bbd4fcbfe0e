// exp, tanh and erf in float32, of operations that IEEE 754 rounds alone: the same bits on every instruction set, in a
// vector or alone. Errors are at most some units in the last place; not-a-number stays one.
#ifndef SPECDEC_ELEMENTARY_H
#define SPECDEC_ELEMENTARY_H

#include <math.h>

#include "simd.h"

// e^x = 2^n e^r with |r| <= ln 2 / 2 (Cody and Waite 1980); the polynomial is that of Cephes' expf.
INLINE float exp_of(float x) {
    const float least_x = -104.0f, most_x = 89.0f, to_integer = 12582912.0f;  // beyond: 0, infinity; 1.5 * 2^23
    float c = x < least_x ? least_x : x;
    c = c > most_x ? most_x : c;
    float shifted = __builtin_fmaf(c, 1.44269504f, to_integer), n = shifted - to_integer;
    float r = __builtin_fmaf(n, -0.693359375f, c);
    r = __builtin_fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p, r * r, r) + 1.0f;
    // 2^n as two factors, each of which is a normal number: only the last product is rounded.
    int32_t power = (int32_t)(bits_of_float(shifted) - 0x4b400000u), half = power >> 1;
    float first = float_of_bits((uint32_t)(half + 127) << 23);
    float second = float_of_bits((uint32_t)(power - half + 127) << 23);
    return p * first * second;
}

// x + x^3 P(x^2) near 0 (Cephes' tanhf), else by exp.
INLINE float tanh_of(float x) {
    float size = __builtin_fabsf(x), z = x * x;
    float p = -5.70498872745e-3f;
    p = __builtin_fmaf(p, z, 2.06390887954e-2f);
    p = __builtin_fmaf(p, z, -5.37397155531e-2f);
    p = __builtin_fmaf(p, z, 1.33314422036e-1f);
    p = __builtin_fmaf(p, z, -3.33332819422e-1f);
    float near = __builtin_fmaf(p * z, x, x);
    float far = __builtin_copysignf(1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f), x);
    return size < 0.625f ? near : far;
}

// The same in all lanes.
INLINE v16 v16_tanh(v16 x) {
    float lanes[LANES];
    v16_store(lanes, x);
    for (int i = 0; i < LANES; i++) lanes[i] = tanh_of(lanes[i]);
    return v16_load(lanes);
}

INLINE v16 v16_div(v16 a, v16 b) {
    float dividends[LANES], divisors[LANES];
    v16_store(dividends, a);
    v16_store(divisors, b);
    for (int i = 0; i < LANES; i++) dividends[i] /= divisors[i];
    return v16_load(dividends);
}

// a where all bits of the mask are set, b where none is: no branch, which would keep compilers from vectors.
INLINE float chosen(uint32_t mask, float a, float b) {
    return float_of_bits((bits_of_float(a) & mask) | (bits_of_float(b) & ~mask));
}

INLINE uint32_t mask_of(int is_set) { return 0u - (uint32_t)is_set; }

// One of four, by the range of |x| in which x lies.
#define BY_RANGE(near, one, far, last) chosen(is_near, near, chosen(is_one, one, chosen(is_far, far, last)))

// The rational functions p(s) / q(s) are those of Sun's fdlibm (s_erf.c, 1993), in float32. There is no branch, so that
// lanes of different ranges are computed together; a coefficient of zero before the first changes no bit.
INLINE float erf_of(float x) {
    const float size = __builtin_fabsf(x), square = size * size;
    const uint32_t is_near = mask_of(size < 0.84375f), is_one = mask_of(size < 1.25f);
    const uint32_t is_far = mask_of(size < 2.857142857f), is_last = mask_of(size < 6.0f), is_number = mask_of(x == x);
    const float s = chosen(is_near, square, chosen(is_one, size - 1.0f, 1.0f / square));
    float p = BY_RANGE(0.0f, 0.0f, -9.8143291473e+00f, 0.0f);
    p = __builtin_fmaf(p, s, BY_RANGE(0.0f, -2.1663755178e-03f, -8.1287437439e+01f, -4.8351919556e+02f));
    p = __builtin_fmaf(p, s, BY_RANGE(0.0f, 3.5478305072e-02f, -1.8460508728e+02f, -1.0250950928e+03f));
    p = __builtin_fmaf(p, s, BY_RANGE(-2.3763017452e-05f, -1.1089469492e-01f, -1.6239666748e+02f, -6.3756646729e+02f));
    p = __builtin_fmaf(p, s, BY_RANGE(-5.7702702470e-03f, 3.1834661961e-01f, -6.2375331879e+01f, -1.6063638306e+02f));
    p = __builtin_fmaf(p, s, BY_RANGE(-2.8481749818e-02f, -3.7220788002e-01f, -1.0558626175e+01f, -1.7757955551e+01f));
    p = __builtin_fmaf(p, s, BY_RANGE(-3.2504209876e-01f, 4.1485610604e-01f, -6.9385856390e-01f, -7.9928326607e-01f));
    p = __builtin_fmaf(p, s, BY_RANGE(1.2837916613e-01f, -2.3621185683e-03f, -9.8649440333e-03f, -9.8649431020e-03f));
    float q = BY_RANGE(0.0f, 0.0f, -6.0424413532e-02f, 0.0f);
    q = __builtin_fmaf(q, s, BY_RANGE(0.0f, 0.0f, 6.5702495575e+00f, -2.2440952301e+01f));
    q = __builtin_fmaf(q, s, BY_RANGE(0.0f, 1.1984500103e-02f, 1.0863500214e+02f, 4.7452853394e+02f));
    q = __builtin_fmaf(q, s, BY_RANGE(-3.9602282413e-06f, 1.3637083583e-02f, 4.2900814819e+02f, 2.5530502930e+03f));
    q = __builtin_fmaf(q, s, BY_RANGE(1.3249473704e-04f, 1.2617121637e-01f, 6.4538726807e+02f, 3.1998581543e+03f));
    q = __builtin_fmaf(q, s, BY_RANGE(5.0813062117e-03f, 7.1828655899e-02f, 4.3456588745e+02f, 1.5367296143e+03f));
    q = __builtin_fmaf(q, s, BY_RANGE(6.5022252500e-02f, 5.4039794207e-01f, 1.3765776062e+02f, 3.2579251099e+02f));
    q = __builtin_fmaf(q, s, BY_RANGE(3.9791721106e-01f, 1.0642088205e-01f, 1.9651271820e+01f, 3.0338060379e+01f));
    q = __builtin_fmaf(q, s, BY_RANGE(1.0f, 1.0f, 1.0f, 1.0f));
    const float ratio = p / q, near = __builtin_fmaf(x, ratio, x), one = 8.4506291151e-01f + ratio;
    const float head = float_of_bits(bits_of_float(size) & 0xfffff000u);  // its square is exact
    float tail = exp_of(__builtin_fmaf(-head, head, -0.5625f));
    tail *= exp_of(__builtin_fmaf(head - size, head + size, ratio));
    const float far = chosen(is_last, 1.0f - tail / size, 1.0f);
    const float found = chosen(is_near, near, __builtin_copysignf(chosen(is_one, one, far), x));
    return chosen(is_number, found, x);
}
#undef BY_RANGE

#endif
