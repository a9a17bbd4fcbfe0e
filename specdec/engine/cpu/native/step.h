// One step of a model of the Llama family: all layers and the output layer, one program of the pool.
//
// Every number is computed as the separate kernels compute it, in the order of `transformers`, and each operation's
// result is rounded to the model's type; so a row has the bits that single calls of the kernels give it. Threads share
// a product by panels, attention by (row tile, head), the rest by rows, and meet six times a layer.
#ifndef SPECDEC_STEP_H
#define SPECDEC_STEP_H

#include "attention.h"
#include "elements.h"
#include "parallel.h"
#include "products.h"
#include "rows.h"
#include "simd.h"

enum {
    STEP_ALIGNMENT = 64,
    // Up to so many numbers, a thread that normalizes all rows for itself is faster than a share of them and a meeting.
    ALONE_MAX = 4096
};

// What the threads of a step share. All buffers but `partial` hold the model's type.
typedef struct {
    const sd_model *model;
    const sd_rows *rows;
    const sd_step_arguments *asked;
    int64_t qkv_size, attended_size;    // of a row
    char *x, *normed, *sums;            // [rows, hidden]: the residual, its norm, a product that is added to it
    char *qkv, *attended, *gate, *up;   // [rows, sizes of the layer]
    char *chosen;                       // [logits, hidden]: inputs of the output layer
    float *partial;                     // [rows, hidden]: a rank's part of a product
    char *own;                          // [threads, own_bytes]
    int64_t own_bytes;
    int32_t result;  // SD_*; thread 0 writes it, the others read it after the next meeting
} step_state;

// A part of an arena, or of no arena while its size is counted.
INLINE char *take_bytes(char *arena, int64_t *used, int64_t bytes) {
    char *found = arena ? arena + *used : NULL;
    *used += (bytes + STEP_ALIGNMENT - 1) / STEP_ALIGNMENT * STEP_ALIGNMENT;
    return found;
}

// Places the buffers of a step in an arena; returns its bytes.
static int64_t place_buffers(step_state *step, char *arena, int32_t threads) {
    const sd_model *model = step->model;
    int64_t rows = step->rows->count, item = model->type == SD_FLOAT32 ? 4 : 2, used = 0;
    int64_t hidden_bytes = rows * model->hidden_size * item;
    step->attended_size = (int64_t)model->heads * model->head_size;
    step->qkv_size = step->attended_size + 2 * (int64_t)model->kv_heads * model->head_size;
    step->x = take_bytes(arena, &used, hidden_bytes);
    step->normed = take_bytes(arena, &used, hidden_bytes);
    step->sums = take_bytes(arena, &used, hidden_bytes);
    step->qkv = take_bytes(arena, &used, rows * step->qkv_size * item);
    step->attended = take_bytes(arena, &used, rows * step->attended_size * item);
    step->gate = take_bytes(arena, &used, rows * model->intermediate_size * item);
    step->up = take_bytes(arena, &used, rows * model->intermediate_size * item);
    step->chosen = take_bytes(arena, &used, step->asked->logit_count * model->hidden_size * item);
    step->partial = (float *)take_bytes(arena, &used, step->asked->exchange ? rows * model->hidden_size * 4 : 0);
    step->own_bytes = 0;
    take_bytes(NULL, &step->own_bytes, higher(higher(ALONE_MAX, model->hidden_size), model->head_size) * item);
    step->own = take_bytes(arena, &used, threads * step->own_bytes);
    return used;
}

// The thread's share of the outputs of a weight: panels, and the columns in them.
typedef struct {
    int64_t first_panel, end_panel, first, count;
} panel_share;

static panel_share own_panels(const sd_weight *weight, sd_thread thread) {
    panel_share own;
    sd_part((weight->out_size + LANES - 1) / LANES, thread, &own.first_panel, &own.end_panel);
    int64_t end = own.end_panel * LANES < weight->out_size ? own.end_panel * LANES : weight->out_size;
    own.first = own.first_panel * LANES;
    own.count = higher(end - own.first, 0);
    return own;
}

// Output `index` of a weight as it was packed: [in_size] of its type.
static void unpack_output(const sd_weight *weight, int64_t index, void *y) {
    int64_t size = weight->in_size, lane = index % LANES, panel = index / LANES;
    if (weight->type == SD_BFLOAT16) {
        const uint16_t *pairs = (const uint16_t *)weight->panels + panel * ((size + 1) / 2) * 2 * LANES + 2 * lane;
        for (int64_t k = 0; k < size; k++) ((uint16_t *)y)[k] = pairs[k / 2 * 2 * LANES + k % 2];
    } else if (weight->type == SD_FLOAT16) {
        const uint16_t *from = (const uint16_t *)weight->panels + panel * size * LANES + lane;
        for (int64_t k = 0; k < size; k++) ((uint16_t *)y)[k] = from[k * LANES];
    } else {
        const float *from = (const float *)weight->panels + panel * size * LANES + lane;
        for (int64_t k = 0; k < size; k++) ((float *)y)[k] = from[k * LANES];
    }
}

// Embeds the thread's rows: of the table, of the output layer's panels, or as given.
static void embed_rows(step_state *step, sd_thread thread) {
    const sd_model *model = step->model;
    int64_t size = model->hidden_size, first, end;
    int32_t type = model->type;
    size_t bytes = (size_t)size * (type == SD_FLOAT32 ? 4 : 2);
    sd_part(step->rows->count, thread, &first, &end);
    for (int64_t r = first; r < end; r++) {
        char *x = item_of(step->x, r * size, type);
        if (step->asked->inputs) {
            memcpy(x, item_of(step->asked->inputs, r * size, type), bytes);
            continue;
        }
        if (model->embedding) {
            memcpy(x, item_of(model->embedding, step->asked->ids[r] * size, type), bytes);
        } else {
            unpack_output(&model->output, step->asked->ids[r], x);
        }
        if (model->embedding_scale != 1) multiply_row(x, NULL, model->embedding_scale, size, type);
    }
}

// The norm of all rows of the residual; the residual itself where there is no norm.
static const char *normalize_all(step_state *step, const sd_norm *norm, sd_thread thread) {
    int64_t size = step->model->hidden_size, rows = step->rows->count, first = 0, end = rows;
    int32_t type = step->model->type;
    if (!norm->gain) return step->x;
    int32_t is_alone = rows == 1 || rows * size <= ALONE_MAX;
    char *normed = is_alone ? step->own + thread.index * step->own_bytes : step->normed;
    if (!is_alone) sd_part(rows, thread, &first, &end);
    for (int64_t r = first; r < end; r++)
        normalize_row(norm, item_of(step->x, r * size, type), item_of(normed, r * size, type), type, size);
    if (!is_alone) sd_meet(thread);
    return normed;
}

// Adds a product of `x` [rows, weight->in_size] to the residual: its sum over ranks, then its bias, one rounding, its
// norm. Returns 0 if the exchange failed.
static int32_t add_product(step_state *step, const sd_weight *weight, const sd_norm *norm, const char *x,
                           sd_thread thread) {
    const sd_model *model = step->model;
    int64_t size = model->hidden_size, rows = step->rows->count, first = 0, end = rows;
    int32_t type = model->type;
    panel_share own = own_panels(weight, thread);
    if (step->asked->exchange) {
        sd_weight part = *weight;
        part.bias = NULL;
        product_part(&part, x, type, weight->in_size, step->partial, SD_FLOAT32, size, rows, own.first_panel,
                     own.end_panel);
        sd_meet(thread);
        if (thread.index == 0 && step->asked->exchange(step->partial, rows * size)) step->result = SD_EXCHANGE_FAILED;
        sd_meet(thread);
        if (step->result != SD_DONE) return 0;
        const float *bias = weight->bias ? weight->bias + own.first : NULL;
        for (int64_t r = 0; r < rows; r++)
            round_sum_row(step->partial + r * size + own.first, bias, item_of(step->sums, r * size + own.first, type),
                          own.count, type);
    } else {
        product_part(weight, x, type, weight->in_size, step->sums, type, size, rows, own.first_panel, own.end_panel);
    }
    const char *sums = step->sums;
    if (norm->gain) {
        sd_meet(thread);
        sd_part(rows, thread, &first, &end);
        own.first = 0;
        own.count = size;
        for (int64_t r = first; r < end; r++)
            normalize_row(norm, item_of(step->sums, r * size, type), item_of(step->normed, r * size, type), type, size);
        sums = step->normed;
    }
    for (int64_t r = first; r < end; r++) {
        int64_t place = r * size + own.first;
        add_row(item_of(step->x, place, type), item_of(sums, place, type), model->residual_scale, own.count, type);
    }
    sd_meet(thread);
    return 1;
}

// Norm and rotation of some heads of one row, in place.
static void turn_heads(step_state *step, const sd_layer *layer, const sd_norm *norm, char *heads, int32_t count,
                       int64_t row, sd_thread thread) {
    const sd_model *model = step->model;
    int64_t size = model->head_size, half = model->rotated_size / 2;
    int64_t angles = (int64_t)step->rows->position[row] * model->rotated_size;
    const char *cosines = layer->cosines ? item_of(layer->cosines, angles, model->type) : NULL;
    const char *sines = layer->cosines ? item_of(layer->sines, angles + half, model->type) : NULL;
    char *normed = step->own + thread.index * step->own_bytes;
    for (int32_t h = 0; h < count; h++) {
        char *head = item_of(heads, h * size, model->type);
        if (norm->gain) {
            normalize_row(norm, head, normed, model->type, size);
            memcpy(head, normed, (size_t)size * (model->type == SD_FLOAT32 ? 4 : 2));
        }
        if (cosines) rotate_row(head, cosines, sines, half, model->type);
    }
}

// Norms and rotations of the thread's rows; their keys and values into the cache.
static void write_keys(step_state *step, const sd_layer *layer, sd_thread thread) {
    const sd_model *model = step->model;
    const sd_rows *rows = step->rows;
    const sd_thread single = {0, 1};
    int64_t key = step->attended_size, value = key + (int64_t)model->kv_heads * model->head_size, first, end;
    sd_part(rows->count, thread, &first, &end);
    for (int64_t r = first; r < end; r++) {
        char *row = item_of(step->qkv, r * step->qkv_size, model->type);
        turn_heads(step, layer, &layer->query, row, model->heads, r, thread);
        turn_heads(step, layer, &layer->key, item_of(row, key, model->type), model->kv_heads, r, thread);
    }
    sd_rows own = *rows;
    own.count = end - first;
    own.slot = rows->slot + first;
    char *row = item_of(step->qkv, first * step->qkv_size, model->type);
    write_part(&layer->cache, &own, item_of(row, key, model->type), step->qkv_size, item_of(row, value, model->type),
               step->qkv_size, single);
}

// Returns 0 if the step ends here.
static int32_t run_layer(step_state *step, const sd_layer *layer, sd_thread thread) {
    const sd_model *model = step->model;
    const volatile int32_t *is_abandoned = step->asked->is_abandoned;
    int64_t rows = step->rows->count, size = model->hidden_size, wide = model->intermediate_size;
    int32_t type = model->type;
    const char *normed = normalize_all(step, &layer->before_attention, thread);
    panel_share own = own_panels(&layer->qkv, thread);
    product_part(&layer->qkv, normed, type, size, step->qkv, type, step->qkv_size, rows, own.first_panel,
                 own.end_panel);
    if (thread.index == 0 && is_abandoned && *is_abandoned) step->result = SD_ABANDONED;
    sd_meet(thread);
    if (step->result != SD_DONE) return 0;
    write_keys(step, layer, thread);
    sd_meet(thread);
    attend_part(&layer->cache, step->rows, &layer->rule, model->heads, step->qkv, step->qkv_size, step->attended,
                step->attended_size, thread);
    sd_meet(thread);
    if (!add_product(step, &layer->out, &layer->after_attention, step->attended, thread)) return 0;
    normed = normalize_all(step, &layer->before_mlp, thread);
    own = own_panels(&layer->gate, thread);
    product_part(&layer->gate, normed, type, size, step->gate, type, wide, rows, own.first_panel, own.end_panel);
    product_part(&layer->up, normed, type, size, step->up, type, wide, rows, own.first_panel, own.end_panel);
    for (int64_t r = 0; r < rows; r++) {
        char *gate = item_of(step->gate, r * wide + own.first, type);
        activate_row(model->activation, gate, gate, type, own.count);
        multiply_row(gate, item_of(step->up, r * wide + own.first, type), 1, own.count, type);
    }
    sd_meet(thread);
    return add_product(step, &layer->down, &layer->after_mlp, step->gate, thread);
}

// The last norm, finite flags, logits of the rows that are asked for.
static void finish_step(step_state *step, sd_thread thread) {
    const sd_model *model = step->model;
    const sd_step_arguments *asked = step->asked;
    int64_t size = model->hidden_size, wide = model->output.out_size, first, end;
    int32_t type = model->type;
    char *normed = step->own + thread.index * step->own_bytes;
    char *chosen = asked->hidden ? asked->hidden : step->chosen;
    sd_part(step->rows->count, thread, &first, &end);
    for (int64_t r = first; r < end; r++) {
        normalize_row(&model->last, item_of(step->x, r * size, type), normed, type, size);
        asked->is_finite[r] = (uint8_t)finite_row(normed, size, type);
    }
    sd_part(asked->logit_count, thread, &first, &end);
    for (int64_t i = first; i < end; i++)
        normalize_row(&model->last, item_of(step->x, asked->logit_rows[i] * size, type),
                      item_of(chosen, i * size, type), type, size);
    sd_meet(thread);
    if (!model->output.panels) return;
    panel_share own = own_panels(&model->output, thread);
    product_part(&model->output, chosen, type, size, asked->logits, SD_FLOAT32, wide, asked->logit_count,
                 own.first_panel, own.end_panel);
    for (int64_t i = 0; i < asked->logit_count; i++) {
        float *logits = asked->logits + i * wide + own.first;
        if (model->logit_scale != 1 || model->logit_softcap != 0)
            cap_logits(logits, model->logit_scale, model->logit_softcap, own.count);
        if (!finite_row(logits, own.count, SD_FLOAT32))
            __atomic_store_n(asked->is_finite + asked->logit_rows[i], 0, __ATOMIC_RELAXED);
    }
}

static void step_program(void *argument, sd_thread thread) {
    step_state *step = argument;
    embed_rows(step, thread);
    sd_meet(thread);
    for (int32_t l = 0; l < step->model->layer_count; l++)
        if (!run_layer(step, step->model->layers + l, thread)) return;
    finish_step(step, thread);
}

// Whether every id, position and row that is asked for exists.
static int32_t is_within(const sd_model *model, const sd_rows *rows, const sd_step_arguments *asked) {
    int32_t has_table = model->embedding || (model->output.panels && model->vocabulary_size <= model->output.out_size);
    if (!asked->inputs && !has_table) return 0;
    for (int64_t r = 0; r < rows->count; r++) {
        if (rows->position[r] < 0 || rows->position[r] >= model->positions_max) return 0;
        if (!asked->inputs && (asked->ids[r] < 0 || asked->ids[r] >= model->vocabulary_size)) return 0;
    }
    for (int64_t i = 0; i < asked->logit_count; i++)
        if (asked->logit_rows[i] < 0 || asked->logit_rows[i] >= rows->count) return 0;
    return 1;
}

static int32_t step_on(const sd_model *model, const sd_rows *rows, const sd_step_arguments *asked, int32_t threads) {
    step_state step = {.model = model, .rows = rows, .asked = asked, .result = SD_DONE};
    if (!is_within(model, rows, asked)) return SD_OUT_OF_RANGE;
    char *arena = sd_shared_scratch((size_t)place_buffers(&step, NULL, threads));
    if (!arena) return SD_NO_MEMORY;
    place_buffers(&step, arena, threads);
    sd_run(step_program, &step, threads);
    return step.result;
}

#endif
