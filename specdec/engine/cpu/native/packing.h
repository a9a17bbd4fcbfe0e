// The layout of weights [out, in] for products, and their outputs out of it again.
//
// Panels, 16 outputs each: float32, float16 [ceil(out / 16)][in][16]; bfloat16 [ceil(out / 16)][ceil(in / 2)][16][2];
// packed weights: see groups.h.
#ifndef SPECDEC_PACKING_H
#define SPECDEC_PACKING_H

#include <string.h>

#include "groups.h"
#include "simd.h"
#include "tile.h"

static int64_t weight_panel_bytes(const sd_weight *w) {
    if (is_packed(w)) return places_of(w).bytes;
    int64_t elements = w->type == SD_BFLOAT16 ? quotient_up(w->in_size, 2) * 2 : w->in_size;
    return elements * LANES * size_of(w->type);
}

static int64_t packed_bytes(const sd_weight *w) { return quotient_up(w->out_size, LANES) * weight_panel_bytes(w); }

static void pack(const void *weight, int32_t type, int64_t out_size, int64_t in_size, int64_t out_stride,
                 int64_t in_stride, void *panels) {
    const int is_paired = type == SD_BFLOAT16;
    const int64_t elements = is_paired ? quotient_up(in_size, 2) * 2 : in_size;
    memset(panels, 0, (size_t)packed_bytes(&(sd_weight){.type = type, .out_size = out_size, .in_size = in_size}));
    for (int64_t n = 0; n < out_size; n++) {
        int64_t start = n / LANES * LANES * elements, lane = n % LANES;
        for (int64_t k = 0; k < in_size; k++) {
            int64_t from = n * out_stride + k * in_stride;
            int64_t to = start + (is_paired ? k / 2 * 2 * LANES + lane * 2 + k % 2 : k * LANES + lane);
            if (type == SD_FLOAT32) {
                ((float *)panels)[to] = ((const float *)weight)[from];
            } else {
                ((uint16_t *)panels)[to] = ((const uint16_t *)weight)[from];
            }
        }
    }
}

// Numbers [in / group] of one output, to lane n % 16.
static void pack_numbers(const sd_weight *w, const void *from, int32_t type, int64_t n, char *to) {
    const int64_t groups = w->in_size / w->group, size = size_of(type);
    for (int64_t g = 0; g < groups; g++)
        memcpy(to + (g * LANES + n % LANES) * size, (const char *)from + (n * groups + g) * size, (size_t)size);
}

static void pack_groups(const sd_weight *w, const int8_t *values, const void *scales, const void *minima,
                        void *panels) {
    const group_places places = places_of(w);
    memset(panels, 0, (size_t)packed_bytes(w));
    for (int64_t n = 0; n < w->out_size; n++, values += w->in_size) {
        char *panel = (char *)panels + n / LANES * places.bytes;
        pack_numbers(w, scales, w->scale_type, n, panel);
        if (w->minimum_type != SD_NONE) pack_numbers(w, minima, w->minimum_type, n, panel + places.minima);
        for (int64_t k = 0; k < w->in_size; k++) {
            if (w->type != SD_INT4) {
                const int8_t byte = w->type == SD_INT8 ? values[k] : (int8_t)float8_stored((uint8_t)values[k]);
                (panel + places.values)[byte_of(w, k, n % LANES)] = byte;
            } else {
                uint32_t *words = (uint32_t *)(void *)(panel + places.values);
                words[word_of(k, n % LANES)] |= (uint32_t)(values[k] + zero_of(w)) << shift_of(k);
            }
        }
    }
}

// Output n of a packed weight -> y [in_size] of y_type, rounded once.
static void unpack_groups(const sd_weight *w, int64_t n, void *y, int64_t y_first, int32_t y_type) {
    const group_places places = places_of(w);
    const char *panel = (const char *)w->panels + n / LANES * places.bytes, *values = panel + places.values;
    for (int64_t k = 0; k < w->in_size; k++) {
        const int64_t number = k / w->group * LANES + n % LANES;
        float value;
        if (w->type != SD_INT4) {
            const int8_t byte = ((const int8_t *)values)[byte_of(w, k, n % LANES)];
            value = w->type == SD_INT8 ? (float)byte : float_of_float8((uint8_t)byte);
        } else {
            uint32_t word;
            memcpy(&word, values + 4 * word_of(k, n % LANES), 4);
            value = (float)((int32_t)(word >> shift_of(k) & 15) - zero_of(w));
        }
        float found = load_as(panel, number, w->scale_type) * value;
        if (w->minimum_type != SD_NONE) found += load_as(panel + places.minima, number, w->minimum_type);
        store_as(y, y_first + k, y_type, found);
    }
}

static void unpack(const sd_weight *w, const int64_t *outputs, int64_t count, void *y, int32_t y_type) {
    const int is_paired = w->type == SD_BFLOAT16;
    const int64_t size = w->in_size, panel = weight_panel_bytes(w);
    for (int64_t i = 0; i < count; i++) {
        if (is_packed(w)) {
            unpack_groups(w, outputs[i], y, i * size, y_type);
            continue;
        }
        const char *from = (const char *)w->panels + outputs[i] / LANES * panel;
        const int64_t lane = outputs[i] % LANES;
        for (int64_t k = 0; k < size; k++) {
            int64_t at = is_paired ? k / 2 * 2 * LANES + lane * 2 + k % 2 : k * LANES + lane;
            store_as(y, i * size + k, y_type, load_as(from, at, w->type));
        }
    }
}

#endif
