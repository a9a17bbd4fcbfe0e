// For driver.c: memory that is freed together, arrays of numbers from a seed, a sum over the bits of results.
#ifndef NUMBERS_H
#define NUMBERS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels.h"

enum { ALLOCATIONS_MAX = 4096 };
static void *allocations[ALLOCATIONS_MAX];
static int allocation_count;
static uint64_t random_state, bits;

static void exit_because(const char *reason) {
    fprintf(stderr, "driver: %s\n", reason);
    exit(1);
}

static void *memory_of(int64_t bytes) {
    // One byte at least: an address for nothing.
    void *found = bytes >= 0 && allocation_count < ALLOCATIONS_MAX ? malloc(bytes ? (size_t)bytes : 1) : NULL;
    if (!found) exit_because("no memory");
    allocations[allocation_count++] = found;
    return found;
}

static void free_all(void) {
    while (allocation_count) free(allocations[--allocation_count]);
}

static void begin_numbers(uint64_t seed) {
    random_state = seed * 2654435761u + 88172645463325252u;
    bits = 14695981039346656037u;
}

static uint32_t next_number(void) {  // xorshift (Marsaglia 2003)
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 32);
}

static int64_t item_size(int32_t type) { return type == SD_FLOAT32 ? 4 : 2; }

// Numbers of magnitudes from 1/8 to 1.
static void *numbers_of(int64_t count, int32_t type) {
    void *found = memory_of(count * item_size(type));
    for (int64_t i = 0; i < count; i++) {
        uint32_t r = next_number(), sign = r >> 31, exponent = r % 3;
        uint32_t single = sign << 31 | (124 + exponent) << 23 | (r >> 4 & 0x7fffff);
        if (type == SD_FLOAT32) ((uint32_t *)found)[i] = single;
        else if (type == SD_BFLOAT16) ((uint16_t *)found)[i] = (uint16_t)(single >> 16);
        else ((uint16_t *)found)[i] = (uint16_t)(sign << 15 | (12 + exponent) << 10 | (r >> 4 & 0x3ff));
    }
    return found;
}

static void add_bits(const void *results, int64_t bytes) {  // FNV-1a
    for (int64_t i = 0; i < bytes; i++) bits = (bits ^ ((const uint8_t *)results)[i]) * 1099511628211u;
}

// Of what is not a number only that it is none: its sign and payload follow from the order of operands, which is the
// compiler's choice.
static void add_numbers(const void *results, int64_t count, int32_t type) {
    const uint32_t magnitude = type == SD_FLOAT32 ? 0x7fffffffu : 0x7fffu;
    const uint32_t infinity = type == SD_FLOAT32 ? 0x7f800000u : type == SD_BFLOAT16 ? 0x7f80u : 0x7c00u;
    for (int64_t i = 0; i < count; i++) {
        uint32_t number = type == SD_FLOAT32 ? ((const uint32_t *)results)[i] : ((const uint16_t *)results)[i];
        if ((number & magnitude) > infinity) number = magnitude;
        add_bits(&number, sizeof number);
    }
}

static uint64_t bits_so_far(void) { return bits; }

#endif
