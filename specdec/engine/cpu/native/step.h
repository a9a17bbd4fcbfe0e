// One step of a model of the Llama family, or of a stack of T5: all layers and the output layer, one program of the pool.
//
// Every number is computed as the separate kernels compute it, in the order of `transformers`, and each operation's
// result is rounded to the model's type; so a row has the bits that single calls of the kernels give it. A layer has
// eight jobs, and four more of cross attention: products, shared by panels, attention by (row tile, head), the rest by
// rows; the caller does small ones.
#ifndef SPECDEC_STEP_H
#define SPECDEC_STEP_H

#include "attend.h"
#include "elements.h"
#include "parallel.h"
#include "products.h"
#include "rows.h"
#include "simd.h"

enum {
    STEP_ALIGNMENT = 64,
    ALONE_MAX = 8192  // up to so many numbers the caller adds and normalizes faster alone
};

// What the parts of a step's jobs share. All buffers but `partial` hold the model's type.
typedef struct {
    const sd_model *model;
    const sd_rows *rows;
    const sd_step_arguments *asked;
    sd_team team;
    int64_t qkv_size, attended_size;    // of a row
    char *x, *normed, *sums;            // [rows, hidden]: the residual, its norm, a product that is added to it
    char *qkv, *attended, *gate, *up;   // [rows, sizes of the layer]
    char *joined;                       // [rows, 2 hidden]: the norms of second inputs, then of the residual
    char *chosen;                       // [logits, hidden]: inputs of the output layer
    float *partial;                     // [rows, hidden]: a rank's part of a product
    sd_rows before;                     // the rows as cross attention sees them: [0, first)
    // Of the job at hand.
    const sd_layer *layer;
    const sd_weight *queries;               // of an attention: queries, or queries, keys and values
    const sd_rows *seen;                    // the rows as it sees them
    const sd_rule *rule;
    const sd_weight *weight;                // of a product that is added to the residual; NULL: there is none yet
    const sd_norm *norm_of_sums, *norm_of_x;  // before that sum, and after it
    const char *input;                      // of the product
} step_state;

// A part of an arena, or of no arena while its size is counted.
INLINE char *take_bytes(char *arena, int64_t *used, int64_t bytes) {
    char *found = arena ? arena + *used : NULL;
    *used += (bytes + STEP_ALIGNMENT - 1) / STEP_ALIGNMENT * STEP_ALIGNMENT;
    return found;
}

INLINE int32_t has_cross(const sd_model *model) { return model->layers[0].cross_queries.panels != NULL; }

// The rows that see what lies before the first position of these; their numbers are placed in an arena.
static sd_rows rows_before(const sd_rows *rows, char *arena, int64_t *used) {
    sd_rows before = *rows;
    int64_t bytes = (rows->count + 1) * (int64_t)sizeof(int64_t);
    char *zeros = take_bytes(arena, used, bytes);
    if (zeros) memset(zeros, 0, (size_t)bytes);
    before.base = rows->first;
    before.first = (const int32_t *)zeros;
    before.path_start = (const int64_t *)zeros;
    return before;
}

// Places the buffers of a step in an arena; returns its bytes.
static int64_t place_buffers(step_state *step, char *arena) {
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
    step->joined = take_bytes(arena, &used, model->second.gain ? 2 * hidden_bytes : 0);
    step->chosen = take_bytes(arena, &used, step->asked->logit_count * model->hidden_size * item);
    step->partial = (float *)take_bytes(arena, &used, step->asked->exchange ? rows * model->hidden_size * 4 : 0);
    if (has_cross(model)) step->before = rows_before(step->rows, arena, &used);
    return used;
}

// The part's share of the outputs of a weight: panels, and the columns in them.
typedef struct {
    int64_t first_panel, end_panel, first, count;
} panel_share;

static panel_share own_panels(const sd_weight *weight, int64_t rows, sd_thread part) {
    panel_share own;
    share_panels(weight, rows, part, &own.first_panel, &own.end_panel);
    int64_t end = own.end_panel * LANES < weight->out_size ? own.end_panel * LANES : weight->out_size;
    own.first = own.first_panel * LANES;
    own.count = higher(end - own.first, 0);
    return own;
}

// Embeds the part's rows: of the table, of the output layer's panels, or as given.
static void embed_job(void *argument, sd_thread part) {
    const step_state *step = argument;
    const sd_model *model = step->model;
    int64_t size = model->hidden_size, first, end;
    int32_t type = model->type;
    size_t bytes = (size_t)size * (type == SD_FLOAT32 ? 4 : 2);
    sd_part(step->rows->count, part, &first, &end);
    for (int64_t r = first; r < end; r++) {
        char *x = item_of(step->x, r * size, type);
        if (step->asked->inputs) {
            memcpy(x, item_of(step->asked->inputs, r * size, type), bytes);
            continue;
        }
        if (model->embedding) {
            memcpy(x, item_of(model->embedding, step->asked->ids[r] * size, type), bytes);
        } else {
            unpack(&model->output, step->asked->ids + r, 1, x, type);
        }
        if (model->embedding_scale != 1) multiply_row(x, NULL, model->embedding_scale, size, type);
    }
}

// A product of the input into the sums, or into the rank's part of them.
static void sums_job(void *argument, sd_thread part) {
    const step_state *step = argument;
    int64_t rows = step->rows->count, size = step->model->hidden_size;
    int32_t type = step->model->type;
    panel_share own = own_panels(step->weight, rows, part);
    sd_weight weight = *step->weight;
    if (step->asked->exchange) weight.bias = NULL;
    product_part(&weight, step->input, type, weight.in_size, step->asked->exchange ? (void *)step->partial : step->sums,
                 step->asked->exchange ? SD_FLOAT32 : type, size, rows, own.first_panel, own.end_panel);
}

// Adds the sums to the part's rows of the residual: those over ranks, then their bias, one rounding, their norm. Then
// the residual's norm.
static void add_job(void *argument, sd_thread part) {
    const step_state *step = argument;
    const sd_norm *norm = step->norm_of_sums;
    int64_t size = step->model->hidden_size, first, end;
    int32_t type = step->model->type;
    sd_part(step->rows->count, part, &first, &end);
    for (int64_t r = first; r < end; r++) {
        char *x = item_of(step->x, r * size, type), *sums = item_of(step->sums, r * size, type);
        char *normed = item_of(step->normed, r * size, type);
        if (step->weight) {
            if (step->asked->exchange) round_sum_row(step->partial + r * size, step->weight->bias, sums, size, type);
            if (norm->gain) normalize_row(norm, sums, normed, type, size);
            add_row(x, norm->gain ? normed : sums, step->model->residual_scale, size, type);
        }
        if (step->norm_of_x->gain) normalize_row(step->norm_of_x, x, normed, type, size);
    }
}

// The parts of a job over rows.
static int64_t row_parts(const step_state *step, int64_t size) {
    return step->rows->count * size <= ALONE_MAX ? 1 : least(step->rows->count, step->team.threads);
}

// Adds what `sums_job` found, if anything; returns the residual's norm, or the residual where `norm` has no gain.
static const char *add_sums(step_state *step, const sd_norm *norm) {
    step->norm_of_x = norm;
    sd_share(&step->team, add_job, step, row_parts(step, step->model->hidden_size));
    return norm->gain ? step->normed : step->x;
}

// A product of `input` for the residual, to which `add_sums` adds it, with its norm. Returns SD_*.
static int32_t sum_product(step_state *step, const sd_weight *weight, const sd_norm *norm, const char *input) {
    int64_t rows = step->rows->count;
    step->weight = weight;
    step->norm_of_sums = norm;
    step->input = input;
    sd_share(&step->team, sums_job, step, product_parts(weight, rows, step->team.threads));
    sd_exchange exchange = step->asked->exchange;
    return exchange && exchange(step->partial, rows * step->model->hidden_size) ? SD_EXCHANGE_FAILED : SD_DONE;
}

// Norm and rotation of some heads of one row, in place.
static void turn_heads(const step_state *step, const sd_norm *norm, char *heads, int32_t count, int64_t row) {
    const sd_model *model = step->model;
    const sd_layer *layer = step->layer;
    int64_t size = model->head_size, half = model->rotated_size / 2;
    int64_t angles = (int64_t)step->rows->position[row] * model->rotated_size;
    const char *cosines = layer->cosines ? item_of(layer->cosines, angles, model->type) : NULL;
    const char *sines = layer->cosines ? item_of(layer->sines, angles + half, model->type) : NULL;
    for (int32_t h = 0; h < count; h++) {
        char *head = item_of(heads, h * size, model->type);
        if (norm->gain) normalize_row(norm, head, head, model->type, size);
        if (cosines) rotate_row(head, cosines, sines, half, model->type);
    }
}

// Norms and rotations of the part's rows; their keys and values into the cache.
static void keys_job(void *argument, sd_thread part) {
    const step_state *step = argument;
    const sd_model *model = step->model;
    const sd_layer *layer = step->layer;
    const sd_rows *rows = step->rows;
    const sd_thread single = {0, 1};
    int64_t key = step->attended_size, value = key + (int64_t)model->kv_heads * model->head_size, first, end;
    sd_part(rows->count, part, &first, &end);
    for (int64_t r = first; r < end; r++) {
        char *row = item_of(step->qkv, r * step->qkv_size, model->type);
        turn_heads(step, &layer->query, row, model->heads, r);
        turn_heads(step, &layer->key, item_of(row, key, model->type), model->kv_heads, r);
    }
    sd_rows own = *rows;
    own.count = end - first;
    own.slot = rows->slot + first;
    char *row = item_of(step->qkv, first * step->qkv_size, model->type);
    write_part(&layer->cache, &own, item_of(row, key, model->type), step->qkv_size, item_of(row, value, model->type),
               step->qkv_size, single);
}

static void queries_job(void *argument, sd_thread part) {
    const step_state *step = argument;
    const sd_weight *weight = step->queries;
    panel_share own = own_panels(weight, step->rows->count, part);
    product_part(weight, step->input, step->model->type, weight->in_size, step->qkv, step->model->type, step->qkv_size,
                 step->rows->count, own.first_panel, own.end_panel);
}

static void attention_job(void *argument, sd_thread part) {
    const step_state *step = argument;
    attend_part(&step->layer->cache, step->seen, step->rule, step->model->heads, step->qkv, step->qkv_size,
                step->attended, step->attended_size, step->team.threads, part);
}

static void gate_job(void *argument, sd_thread part) {
    const step_state *step = argument;
    const sd_layer *layer = step->layer;
    int64_t rows = step->rows->count, size = step->model->hidden_size, wide = step->model->intermediate_size;
    int32_t type = step->model->type;
    panel_share own = own_panels(&layer->gate, rows, part);
    product_part(&layer->gate, step->input, type, size, step->gate, type, wide, rows, own.first_panel, own.end_panel);
    const int has_up = layer->up.panels != NULL;
    if (has_up)
        product_part(&layer->up, step->input, type, size, step->up, type, wide, rows, own.first_panel, own.end_panel);
    for (int64_t r = 0; r < rows; r++) {
        char *gate = item_of(step->gate, r * wide + own.first, type);
        activate_row(step->model->activation, gate, gate, type, own.count);
        if (has_up) multiply_row(gate, item_of(step->up, r * wide + own.first, type), 1, own.count, type);
    }
}

// The norms of the part's second inputs, each before the input of the product in its row.
static void join_job(void *argument, sd_thread part) {
    const step_state *step = argument;
    int64_t size = step->model->hidden_size, first, end;
    int32_t type = step->model->type;
    sd_part(step->rows->count, part, &first, &end);
    for (int64_t r = first; r < end; r++) {
        char *joined = item_of(step->joined, 2 * r * size, type);
        normalize_row(&step->model->second, item_of(step->asked->seconds, r * size, type), joined, type, size);
        memcpy(item_of(joined, size, type), item_of(step->input, r * size, type),
               (size_t)size * (type == SD_FLOAT32 ? 4 : 2));
    }
}

// Copies the residual as it enters a layer, if that is asked for.
static void keep_features(const step_state *step, int64_t layer) {
    const sd_step_arguments *asked = step->asked;
    int64_t size = step->model->hidden_size, count = asked->feature_count;
    int32_t type = step->model->type;
    for (int64_t i = 0; i < count; i++) {
        if (asked->feature_layers[i] != layer) continue;
        for (int64_t r = 0; r < step->rows->count; r++)
            memcpy(item_of(asked->features, (r * count + i) * size, type), item_of(step->x, r * size, type),
                   (size_t)size * (type == SD_FLOAT32 ? 4 : 2));
    }
}

// The product of the queries of an attention of the layer, of the residual's norm.
static void multiply_queries(step_state *step, const sd_norm *norm, const sd_weight *weight) {
    step->input = add_sums(step, norm);
    if (step->model->second.gain) {
        sd_share(&step->team, join_job, step, row_parts(step, 2 * (int64_t)step->model->hidden_size));
        step->input = step->joined;
    }
    step->queries = weight;
    sd_share(&step->team, queries_job, step, product_parts(weight, step->rows->count, step->team.threads));
}

// Attention to what the layer's cache holds for these rows, up to its last product, which `add_sums` adds. Returns SD_*.
static int32_t attend_in(step_state *step, const sd_rows *seen, const sd_rule *rule, const sd_weight *out,
                         const sd_norm *after) {
    step->seen = seen;
    step->rule = rule;
    sd_share(&step->team, attention_job, step, attention_parts(step->team.threads));
    return sum_product(step, out, after, step->attended);
}

// Up to the product that ends the layer, which `add_sums` adds. Returns SD_*.
static int32_t run_layer(step_state *step, const sd_layer *layer) {
    static const sd_norm none = {0};
    const sd_team *team = &step->team;
    const volatile int32_t *is_abandoned = step->asked->is_abandoned;
    step->layer = layer;
    multiply_queries(step, &layer->before_attention, &layer->qkv);
    keep_features(step, layer - step->model->layers);
    if (is_abandoned && *is_abandoned) return SD_ABANDONED;
    sd_share(team, keys_job, step, row_parts(step, step->qkv_size));
    int32_t result = attend_in(step, step->rows, &layer->rule, &layer->out, &layer->after_attention);
    if (result == SD_DONE && has_cross(step->model)) {
        multiply_queries(step, &layer->before_cross, &layer->cross_queries);
        result = attend_in(step, &step->before, &layer->cross_rule, &layer->cross_out, &none);
    }
    if (result != SD_DONE) return result;
    step->input = add_sums(step, &layer->before_mlp);
    sd_share(team, gate_job, step, product_parts(&layer->gate, step->rows->count, team->threads));
    return sum_product(step, &layer->down, &layer->after_mlp, step->gate);
}

// Logits of the rows that are asked for, and whether they are finite.
static void logits_job(void *argument, sd_thread part) {
    const step_state *step = argument;
    const sd_model *model = step->model;
    const sd_step_arguments *asked = step->asked;
    int64_t wide = model->output.out_size;
    panel_share own = own_panels(&model->output, asked->logit_count, part);
    product_part(&model->output, step->input, model->type, model->hidden_size, asked->logits, SD_FLOAT32, wide,
                 asked->logit_count, own.first_panel, own.end_panel);
    for (int64_t i = 0; i < asked->logit_count; i++) {
        float *logits = asked->logits + i * wide + own.first;
        if (model->logit_scale != 1 || model->logit_softcap != 0)
            cap_logits(logits, model->logit_scale, model->logit_softcap, own.count);
        if (!finite_row(logits, own.count, SD_FLOAT32))
            __atomic_store_n(asked->is_finite + asked->logit_rows[i], 0, __ATOMIC_RELAXED);
    }
}

// The last norm, finite flags, logits of the rows that are asked for.
static void finish_step(step_state *step) {
    const sd_step_arguments *asked = step->asked;
    int64_t size = step->model->hidden_size;
    int32_t type = step->model->type;
    const char *normed = add_sums(step, &step->model->last);
    keep_features(step, step->model->layer_count);
    for (int64_t r = 0; r < step->rows->count; r++)
        asked->is_finite[r] = (uint8_t)finite_row(item_of(normed, r * size, type), size, type);
    char *chosen = asked->hidden ? asked->hidden : step->chosen;
    for (int64_t i = 0; i < asked->logit_count; i++)
        memcpy(item_of(chosen, i * size, type), item_of(normed, asked->logit_rows[i] * size, type),
               (size_t)size * (type == SD_FLOAT32 ? 4 : 2));
    step->input = chosen;
    const sd_weight *output = &step->model->output;
    if (output->panels && asked->logit_count > 0)
        sd_share(&step->team, logits_job, step, product_parts(output, asked->logit_count, step->team.threads));
}

static int32_t run_step(step_state *step) {
    sd_share(&step->team, embed_job, step, row_parts(step, step->model->hidden_size));
    for (int32_t l = 0; l < step->model->layer_count; l++) {
        int32_t result = run_layer(step, step->model->layers + l);
        if (result != SD_DONE) return result;
    }
    finish_step(step);
    return SD_DONE;
}

// Whether every id, position and row that is asked for exists.
static int32_t is_within(const sd_model *model, const sd_rows *rows, const sd_step_arguments *asked) {
    int32_t has_table = model->embedding || (model->output.panels && model->vocabulary_size <= model->output.out_size);
    if (!asked->inputs && !has_table) return 0;
    if (model->second.gain && !asked->seconds) return 0;
    for (int64_t r = 0; has_cross(model) && r < rows->count; r++)
        if (!rows->first || rows->first[r] < 1) return 0;
    for (int64_t r = 0; r < rows->count; r++) {
        if (rows->position[r] < 0 || rows->position[r] >= model->positions_max) return 0;
        if (!asked->inputs && (asked->ids[r] < 0 || asked->ids[r] >= model->vocabulary_size)) return 0;
    }
    for (int64_t i = 0; i < asked->logit_count; i++)
        if (asked->logit_rows[i] < 0 || asked->logit_rows[i] >= rows->count) return 0;
    return 1;
}

static int32_t step_on(const sd_model *model, const sd_rows *rows, const sd_step_arguments *asked, int32_t threads) {
    step_state step = {.model = model, .rows = rows, .asked = asked};
    if (!is_within(model, rows, asked)) return SD_OUT_OF_RANGE;
    char *arena = sd_shared_scratch((size_t)place_buffers(&step, NULL));
    if (!arena) return SD_NO_MEMORY;
    place_buffers(&step, arena);
    step.team = sd_gather(threads);
    int32_t result = run_step(&step);
    sd_release(&step.team);
    return result;
}

#endif
