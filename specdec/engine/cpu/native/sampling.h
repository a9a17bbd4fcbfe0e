// Tokens under the noise of COUPLED: the target's choice, and the guesses of a draft. And the logits of legal tokens.
//
// The target's choice is the perturbed argmax: the token with the largest score s + G of a row. s = (x - largest x) / temperature,
// and G = -log(-log(u)), u = (h + 1/2) / 2^52 with the noise h of the row's key and the token's id (specdec/decoding/
// noise.py).
//
// Two logarithms of every token would be the whole cost, so most tokens are left out by a bound: -log(u) >= 1 - u, thus
// G <= -log(1 - u), and log2 of a number is at least its bits, read as exponent and mantissa. The scores of the others
// are computed with a logarithm that may round otherwise than the library that decides in torch: a row whose two best
// scores lie closer than any such difference is left to torch. So both choose the same token.
#ifndef SPECDEC_SAMPLING_H
#define SPECDEC_SAMPLING_H

#include <math.h>  // INFINITY
#include <stdint.h>
#include <string.h>

#include "elementary.h"
#include "parallel.h"
#include "simd.h"

enum { RACED = 256 };              // tokens that are computed together
#define LEAST_GUMBEL -3.7          // G of h = 0 is -3.61
#define SCORE_ERROR 1e-9           // relative to 1 + |score|: a hundred thousand times that of both logarithms together
#define LEAST_SCORE -87.0f         // its e^s is the least normal number; below it a token counts for nothing
#define INVERSE_TEMPERATURE_MAX 1e30
#define LN2 0x1.62e42fefa39efp-1
#define LN2_ABOVE 0x1.62e42fefa39f0p-1

INLINE uint64_t noise_of(uint64_t key, int64_t id) {
    uint64_t h = key + (uint64_t)(id + 1) * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    return (h ^ (h >> 31)) >> 12;
}

// 1 - u.
INLINE double above(uint64_t noise) {
    uint64_t bits = noise | 0x3FF0000000000000u;
    double number;
    memcpy(&number, &bits, sizeof number);  // 1 + noise / 2^52
    return 2 - number - 0x1p-53;            // exact
}

// An upper bound of G.
INLINE double gumbel_bound(uint64_t noise) {
    double rest = above(noise);
    uint64_t bits;
    memcpy(&bits, &rest, sizeof bits);
    return LN2_ABOVE * (1023 - (double)(int32_t)(bits >> 32) * 0x1p-20);
}

// log of a normal number above 0, to 1e-15 of its value: log m = 2 artanh((m - 1) / (m + 1)), m from 1/sqrt 2 to sqrt 2.
static double log_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t exponent = (int64_t)(bits - 0x3FE6A09E667F3BCDu) >> 52;  // the bits of 1/sqrt 2
    bits -= (uint64_t)exponent << 52;
    memcpy(&x, &bits, sizeof x);
    double z = (x - 1) / (x + 1), square = z * z, sum = 0;
    for (int term = 23; term > 1; term -= 2) sum = (sum + 1.0 / term) * square;
    return (double)exponent * LN2 + 2 * (z + z * sum);
}

INLINE double gumbel(uint64_t noise) { return -log_of(-log_of(((double)noise + 0.5) * 0x1p-52)); }

static float largest_of(const float *x, int64_t size) {
    v16 most = v16_all(x[0]);
    float lanes[LANES], largest = x[0];
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) most = v16_max(v16_load(x + i), most);
    v16_store(lanes, most);
    for (int lane = 0; lane < LANES; lane++) largest = lanes[lane] > largest ? lanes[lane] : largest;
    for (; i < size; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

INLINE double error_of(double score) { return SCORE_ERROR * (1 + (score < 0 ? -score : score)); }

// Returns -1 where torch has to decide: close scores, or numbers that are none.
static int64_t race_row(const float *x, int64_t size, uint64_t key, double temperature) {
    double largest = largest_of(x, size), inverse = 1 / temperature;
    double best = -INFINITY, second = -INFINITY, least = LEAST_GUMBEL;  // the likeliest token reaches it
    int64_t found = -1;
    if (!(inverse <= INVERSE_TEMPERATURE_MAX)) return -1;
    for (int64_t start = 0; start < size; start += RACED) {
        int64_t count = size - start < RACED ? size - start : RACED;
        double bounds[RACED];
        int64_t is_any = 0;
        for (int64_t j = 0; j < count; j++) {
            bounds[j] = ((double)x[start + j] - largest) * inverse + gumbel_bound(noise_of(key, start + j));
        }
        for (int64_t j = 0; j < count; j++) is_any |= bounds[j] >= least;
        for (int64_t j = 0; is_any && j < count; j++) {
            if (!(bounds[j] >= least)) continue;
            double score = ((double)x[start + j] - largest) / temperature + gumbel(noise_of(key, start + j));
            if (score > best) {
                second = best;
                best = score;
                found = start + j;
                least = best - error_of(best) > least ? best - error_of(best) : least;
            } else if (score > second) {
                second = score;
            }
        }
    }
    return best - second > error_of(best) ? found : -1;
}

typedef struct {
    const float *x;
    int64_t stride, rows, size;
    const uint64_t *keys;
    const double *temperatures;
    int64_t *best;
    const int64_t *token_ids;
    int64_t count;  // of the guesses
    float *shares;
} race_call;

static void race_program(void *argument, sd_thread thread) {
    const race_call *c = argument;
    int64_t first, end;
    sd_part(c->rows, thread, &first, &end);
    for (int64_t r = first; r < end; r++) {
        c->best[r] = race_row(c->x + r * c->stride, c->size, c->keys[r], c->temperatures[r]);
    }
}

static void race(const float *x, int64_t stride, int64_t rows, int64_t size, const uint64_t *keys,
                 const double *temperatures, int64_t *best, int32_t threads) {
    race_call call = {.x = x, .stride = stride, .rows = rows, .size = size, .keys = keys,
                      .temperatures = temperatures, .best = best};
    sd_run(race_program, &call, threads);
}

// The guesses of a draft: under the same noise the tokens with the largest e^s / -log(u), which is e^(s + G), without
// noise those with the largest x; and each one's share of the sum, over all tokens, of that or of e^s. They decide no
// text: everything is float32, in any order that is fast. Of equal ones the first is the larger.

// log of a normal number above 0, to 1e-7 of its value. `below`: 1 - x, which is precise where x is near 1.
INLINE float near_log(float x, float below) {
    int32_t bits = (int32_t)bits_of_float(x), exponent = (bits - 0x3F3504F3) >> 23;  // the bits of 1/sqrt 2
    float m = float_of_bits((uint32_t)(bits - (int32_t)((uint32_t)exponent << 23)));
    float far = m - 1.0f, f = exponent == 0 ? -below : far, z = f / (2.0f + f), square = z * z;
    float sum = __builtin_fmaf(square, 0.111111111f, 0.142857143f);
    sum = __builtin_fmaf(square, sum, 0.2f);
    sum = __builtin_fmaf(square, sum, 0.333333333f);
    return __builtin_fmaf((float)exponent, 0.693147181f, 2.0f * __builtin_fmaf(z * square, sum, z));
}

// e^s of a block of scores, over -log(u) of the noise if there is a key; 0 where it counts for nothing.
INLINE void weigh_block(const float *scores, const int64_t *ids, int64_t width, const uint64_t *key, float *weights) {
    if (key) {
        float u[RACED], rest[RACED];
        for (int64_t j = 0; j < width; j++) {
            double own = above(noise_of(*key, ids[j]));
            u[j] = (float)(1 - own);
            rest[j] = (float)own;
        }
        for (int64_t j = 0; j < width; j++) weights[j] = exp_of(scores[j]) / -near_log(u[j], rest[j]);
    } else {
        for (int64_t j = 0; j < width; j++) weights[j] = exp_of(scores[j]);
    }
    for (int64_t j = 0; j < width; j++) weights[j] = scores[j] > LEAST_SCORE ? weights[j] : 0.0f;
}

// `token_ids` NULL: those of the columns; `key` NULL: no noise. `shares` first hold what orders the guesses.
static void guess_row(const float *x, int64_t size, const int64_t *token_ids, const uint64_t *key, double temperature,
                      int64_t count, int64_t *ids, float *shares) {
    float largest = largest_of(x, size), inverse = (float)(1 / temperature);
    double total = 0;
    for (int64_t i = 0; i < count; i++) {
        ids[i] = 0;
        shares[i] = key ? 0 : -INFINITY;
    }
    for (int64_t start = 0; start < size; start += RACED) {
        int64_t width = size - start < RACED ? size - start : RACED, own[RACED];
        float scores[RACED], weights[RACED] = {0}, least = shares[count - 1];
        const float *ranks = key ? weights : x + start;
        int32_t is_any = 0;
        for (int64_t j = 0; j < width; j++) own[j] = token_ids ? token_ids[start + j] : start + j;
        for (int64_t j = 0; j < width; j++) scores[j] = (x[start + j] - largest) * inverse;
        weigh_block(scores, own, width, key, weights);
        for (int64_t j = 0; j < width; j++) is_any |= ranks[j] > least;
        v16 sums = v16_zero();
        for (int64_t j = 0; j < RACED; j += LANES) sums = v16_add(sums, v16_load(weights + j));
        float lanes[LANES];
        v16_store(lanes, sums);
        for (int lane = 0; lane < LANES; lane++) total += (double)lanes[lane];
        for (int64_t j = 0; is_any && j < width; j++) {
            if (!(ranks[j] > shares[count - 1])) continue;
            int64_t place = count - 1;
            for (; place > 0 && shares[place - 1] < ranks[j]; place--) {
                ids[place] = ids[place - 1];
                shares[place] = shares[place - 1];
            }
            ids[place] = own[j];
            shares[place] = ranks[j];
        }
    }
    for (int64_t i = 0; i < count; i++) {
        float score = key ? 0 : (shares[i] - largest) * inverse;
        double weight = key ? shares[i] : score > LEAST_SCORE ? exp_of(score) : 0;
        shares[i] = total > 0 ? (float)(weight / total) : 0.0f;
    }
}

typedef struct {
    const float *x;
    int64_t stride, rows, size;
    const int32_t *masks;
    int64_t mask_stride;
    float *y;
    int32_t *is_empty;
} mask_call;

// Whether any of `count` tokens of one word, at most 32, is left.
INLINE int32_t mask_word(const float *x, uint32_t word, int64_t count, float *y) {
    int32_t is_any = 0;
    for (int64_t j = 0; j < count; j++) {
        y[j] = word >> j & 1 ? x[j] : -INFINITY;
        is_any |= y[j] != -INFINITY;
    }
    return is_any;
}

static void mask_program(void *argument, sd_thread thread) {
    const mask_call *c = argument;
    int64_t first, end;
    sd_part(c->rows, thread, &first, &end);
    for (int64_t r = first; r < end; r++) {
        const float *x = c->x + r * c->stride;
        const int32_t *words = c->masks + r * c->mask_stride;
        float *y = c->y + r * c->size;
        int32_t is_any = 0;
        int64_t i = 0;
        for (; i + 32 <= c->size; i += 32) is_any |= mask_word(x + i, (uint32_t)words[i / 32], 32, y + i);
        if (i < c->size) is_any |= mask_word(x + i, (uint32_t)words[i / 32], c->size - i, y + i);
        c->is_empty[r] = !is_any;
    }
}

static void mask(const float *x, int64_t stride, int64_t rows, int64_t size, const int32_t *masks, int64_t mask_stride,
                 float *y, int32_t *is_empty, int32_t threads) {
    mask_call call = {x, stride, rows, size, masks, mask_stride, y, is_empty};
    sd_run(mask_program, &call, threads);
}

static void guess_program(void *argument, sd_thread thread) {
    const race_call *c = argument;
    int64_t first, end, count = c->count;
    sd_part(c->rows, thread, &first, &end);
    for (int64_t r = first; r < end; r++) {
        guess_row(c->x + r * c->stride, c->size, c->token_ids, c->keys ? c->keys + r : NULL, c->temperatures[r], count,
                  c->best + r * count, c->shares + r * count);
    }
}

static void guess(const float *x, int64_t stride, int64_t rows, int64_t size, const int64_t *token_ids,
                  const uint64_t *keys, const double *temperatures, int64_t count, int64_t *ids, float *shares,
                  int32_t threads) {
    race_call call = {.x = x, .stride = stride, .rows = rows, .size = size, .keys = keys, .temperatures = temperatures,
                      .best = ids, .token_ids = token_ids, .count = count, .shares = shares};
    sd_run(guess_program, &call, threads);
}

#endif
