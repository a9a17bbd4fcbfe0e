// Runs the native kernels over plans read from a file, for the sanitizers: each plan is the sizes of a small model and
// the rows of a step. Rows that sd_check_rows refuses are not run. Every array is an allocation of its own, exactly as
// long as the kernels may use it.
//
//   driver FILE INSTRUCTIONS
//
// prints a line a plan: "refused REASON", or "accepted BITS", a sum over all results; ends with 1 if another number of
// threads gave other bits. numbers.h fills arrays; plans.py writes the files.
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "numbers.h"

enum { TIED = 1, INPUTS = 2, EXCHANGE = 4, FAILING = 8, ABANDONED = 16, HEAD_NORMS = 32, AFTER_NORMS = 64, CENTERED = 128,
       BIASES = 256, NANS = 512, HIDDEN = 1024, SPANS = 2048, DISTANCES = 4096, CROSS = 8192, UNGATED = 16384,
       SECONDS = 32768, FEATURES = 65536 };

typedef struct {
    int64_t seed, type, weight_type, activation, block_size, block_count, kv_heads, group, head_size, hidden, between,
        layers, rotated, vocabulary, positions_max, window, softcap, threads, flags;
} sizes;

typedef struct {
    sizes n;
    sd_rows rows;
    int64_t path_count, table_count, logit_count;
    int64_t *ids;
    int32_t *logit_rows;
} plan;

// Reads the next number; returns 0 at the end of the file.
static int read_number(FILE *file, int64_t *number) { return fscanf(file, "%" SCNd64, number) == 1; }

static int64_t need_number(FILE *file) {
    int64_t number;
    if (!read_number(file, &number)) exit_because("the file ends inside a plan");
    return number;
}

static int32_t *read_int32s(FILE *file, int64_t count) {
    int32_t *found = memory_of(count * 4);
    for (int64_t i = 0; i < count; i++) found[i] = (int32_t)need_number(file);
    return found;
}

static int64_t *read_int64s(FILE *file, int64_t count) {
    int64_t *found = memory_of(count * 8);
    for (int64_t i = 0; i < count; i++) found[i] = need_number(file);
    return found;
}

// Returns 0 at the end of the file.
static int read_plan(FILE *file, plan *p) {
    int64_t *fields = &p->n.seed;
    if (!read_number(file, fields)) return 0;
    for (size_t i = 1; i < sizeof(sizes) / sizeof(int64_t); i++) fields[i] = need_number(file);
    sd_rows *rows = &p->rows;
    rows->count = need_number(file);
    rows->sequence_count = need_number(file);
    p->path_count = need_number(file);
    p->table_count = need_number(file);
    p->logit_count = need_number(file);
    rows->sequence = read_int32s(file, rows->count);
    rows->position = read_int32s(file, rows->count);
    rows->slot = read_int32s(file, rows->count);
    rows->base = read_int32s(file, rows->count);
    rows->path_start = read_int64s(file, rows->count + 1);
    rows->path = read_int32s(file, p->path_count);
    rows->table_start = read_int64s(file, rows->sequence_count + 1);
    rows->table = read_int32s(file, p->table_count);
    rows->first = p->n.flags & SPANS ? read_int32s(file, rows->count) : NULL;
    p->ids = read_int64s(file, rows->count);
    p->logit_rows = read_int32s(file, p->logit_count);
    return 1;
}

// Integers or FP8 in groups, of sizes and types that follow from the seed; the bias is set by the caller.
static sd_weight new_groups(int64_t out_size, int64_t in_size, const plan *p) {
    int64_t group = 8, longest = 8 << (p->n.seed % 7);
    while (group < longest && in_size % (2 * group) == 0) group *= 2;
    int32_t scale_type = (int32_t)(p->n.seed % 3), minimum_type = p->n.seed % 2 ? SD_NONE : (int32_t)(p->n.seed % 5 % 3);
    sd_weight weight = {NULL, NULL, out_size, in_size, (int32_t)p->n.weight_type, scale_type, minimum_type, group};
    int64_t groups = out_size * (in_size / group);
    void *scales = numbers_of(groups, scale_type);
    void *minima = minimum_type == SD_NONE ? NULL : numbers_of(groups, minimum_type);
    int8_t *values = memory_of(out_size * in_size);
    for (int64_t i = 0; i < out_size * in_size; i++) {
        int32_t byte = (int32_t)(next_number() & 255);
        if (weight.type == SD_FLOAT8) byte = (byte & 127) == 127 ? 0 : byte;
        values[i] = (int8_t)(weight.type == SD_INT4 ? byte % 16 - (minima ? 0 : 8) : byte - 128);
    }
    void *panels = memory_of(sd_packed_bytes(&weight));
    sd_pack_groups(&weight, values, scales, minima, panels);
    weight.panels = panels;
    return weight;
}

static sd_weight new_weight(int64_t out_size, int64_t in_size, const plan *p) {
    const float *bias = p->n.flags & BIASES ? numbers_of(out_size, SD_FLOAT32) : NULL;
    int32_t type = (int32_t)p->n.weight_type;
    if (type >= SD_INT4) {
        if (in_size % 8 == 0) {
            sd_weight weight = new_groups(out_size, in_size, p);
            weight.bias = bias;
            return weight;
        }
        type = (int32_t)p->n.type;
    }
    sd_weight weight = {NULL, bias, out_size, in_size, type, SD_NONE, SD_NONE, 0};
    // Packed from a transposed weight with a gap behind each of its rows.
    int64_t stride = out_size + 3;
    void *numbers = numbers_of((in_size - 1) * stride + out_size, type);
    void *panels = memory_of(sd_packed_bytes(&weight));
    sd_pack(numbers, type, out_size, in_size, 1, stride, panels);
    weight.panels = panels;
    return weight;
}

static sd_norm new_norm(int64_t size, const plan *p, int64_t flag) {
    if (flag && !(p->n.flags & flag)) return (sd_norm){0};
    int32_t is_centered = p->n.flags & CENTERED ? 1 : 0;
    const float *bias = is_centered ? numbers_of(size, SD_FLOAT32) : NULL;
    return (sd_norm){numbers_of(size, SD_FLOAT32), bias, 1e-5f, p->n.seed % 2 ? SD_ROUND_FIRST : SD_ROUND_ONCE, is_centered};
}

// Whether the rows of its model have second inputs.
static int has_seconds(const plan *p) { return p->n.flags & SECONDS && p->n.layers == 1 && !(p->n.flags & CROSS); }

static sd_layer new_layer(const plan *p) {
    const sizes *n = &p->n;
    int64_t attended = n->kv_heads * n->group * n->head_size, one = n->kv_heads * n->head_size;
    int64_t angles = n->positions_max * n->rotated;
    sd_layer layer = {
        .before_attention = new_norm(n->hidden, p, 0),
        .after_attention = new_norm(n->hidden, p, AFTER_NORMS),
        .before_mlp = new_norm(n->hidden, p, 0),
        .after_mlp = new_norm(n->hidden, p, AFTER_NORMS),
        .query = new_norm(n->head_size, p, HEAD_NORMS),
        .key = new_norm(n->head_size, p, HEAD_NORMS),
        .qkv = new_weight(attended + 2 * one, has_seconds(p) ? 2 * n->hidden : n->hidden, p),
        .out = new_weight(n->hidden, attended, p),
        .gate = new_weight(n->between, n->hidden, p),
        .up = new_weight(n->between, n->hidden, p),
        .down = new_weight(n->hidden, n->between, p),
        .cosines = n->rotated ? numbers_of(angles, (int32_t)n->type) : NULL,
        .sines = n->rotated ? numbers_of(angles, (int32_t)n->type) : NULL,
        .rule = {0.3f, (float)n->softcap, n->window, NULL, n->seed % 9},
        .cache = {NULL, NULL, n->block_count, n->block_size, (int32_t)n->kv_heads, (int32_t)n->head_size,
                  (int32_t)n->type},
    };
    int64_t distances = 2 * layer.rule.bias_reach + 1;
    if (n->flags & UNGATED) layer.up = (sd_weight){0};
    if (n->flags & CROSS) {
        layer.before_cross = new_norm(n->hidden, p, 0);
        layer.cross_queries = new_weight(attended, n->hidden, p);
        layer.cross_out = new_weight(n->hidden, attended, p);
        layer.cross_rule = (sd_rule){1, 0, 0, NULL, 0};
    }
    if (n->flags & DISTANCES) layer.rule.bias = numbers_of(n->kv_heads * n->group * distances, SD_FLOAT32);
    int64_t count = n->block_count * n->block_size * one;
    layer.cache.keys = numbers_of(count, layer.cache.type);
    layer.cache.values = numbers_of(count, layer.cache.type);
    if (n->flags & NANS) {
        memset(layer.cache.keys, 0xff, (size_t)(count * item_size(layer.cache.type)));
        memset(layer.cache.values, 0xff, (size_t)(count * item_size(layer.cache.type)));
    }
    return layer;
}

static sd_model new_model(const plan *p) {
    const sizes *n = &p->n;
    sd_layer *layers = memory_of(n->layers * (int64_t)sizeof(sd_layer));
    for (int64_t i = 0; i < n->layers; i++) layers[i] = new_layer(p);
    return (sd_model){
        .layers = layers,
        .layer_count = (int32_t)n->layers,
        .hidden_size = (int32_t)n->hidden,
        .intermediate_size = (int32_t)n->between,
        .heads = (int32_t)(n->kv_heads * n->group),
        .kv_heads = (int32_t)n->kv_heads,
        .head_size = (int32_t)n->head_size,
        .rotated_size = (int32_t)n->rotated,
        .activation = (int32_t)n->activation,
        .type = (int32_t)n->type,
        .embedding = n->flags & TIED ? NULL : numbers_of(n->vocabulary * n->hidden, (int32_t)n->type),
        .embedding_scale = n->seed % 3 ? 1.0f : 2.5f,
        .residual_scale = n->seed % 5 ? 1.0f : 0.5f,
        .second = has_seconds(p) ? new_norm(n->hidden, p, 0) : (sd_norm){0},
        .last = new_norm(n->hidden, p, 0),
        .output = new_weight(n->vocabulary, n->hidden, p),
        .logit_scale = n->seed % 7 ? 1.0f : 0.25f,
        .logit_softcap = (float)n->softcap,
        .vocabulary_size = n->vocabulary,
        .positions_max = n->positions_max,
    };
}

static int32_t keep_sum(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] += 0.5f;
    return 0;
}

static int32_t fail(float *x, int64_t count) { return x[count - 1] == 12345.0f ? 1 : 2; }

// The kernels one by one over the rows.
static void run_kernels(const plan *p, const sd_model *model, int32_t threads) {
    const sd_layer *layer = model->layers;
    int32_t type = model->type;
    int64_t rows = p->rows.count, hidden = model->hidden_size, wide = layer->qkv.in_size, x_stride = wide + 5;
    int64_t attended = (int64_t)model->heads * model->head_size, one = (int64_t)model->kv_heads * model->head_size;
    void *x = numbers_of(rows ? (rows - 1) * x_stride + wide : 0, type);
    int64_t qkv_size = attended + 2 * one;
    char *qkv = memory_of(rows * qkv_size * item_size(type));
    sd_product(&layer->qkv, x, type, x_stride, qkv, type, qkv_size, rows, threads);
    add_numbers(qkv, rows * qkv_size, type);
    char *outputs = memory_of(rows * hidden * item_size(type));
    sd_unpack(&model->output, p->ids, rows, outputs, type);
    add_numbers(outputs, rows * hidden, type);
    char *normed = memory_of(rows * hidden * item_size(type));
    sd_normalize(&layer->before_mlp, x, x_stride, normed, hidden, type, rows, hidden, threads);
    sd_activate(model->activation, normed, normed, type, rows * hidden, threads);
    add_numbers(normed, rows * hidden, type);
    float *logits = memory_of(rows * model->vocabulary_size * 4);
    sd_product(&model->output, normed, type, hidden, logits, SD_FLOAT32, model->vocabulary_size, rows, threads);
    sd_tanh(logits, logits, rows * model->vocabulary_size, threads);
    int64_t *best = memory_of(rows * 8);
    sd_argmax(logits, model->vocabulary_size, rows, model->vocabulary_size, best, threads);
    add_bits(best, rows * 8);
    uint64_t *seeds = memory_of(rows * 8);
    double *temperatures = memory_of(rows * 8);
    for (int64_t r = 0; r < rows; r++) {
        seeds[r] = 0x9E3779B97F4A7C15u * (uint64_t)(r + 1);
        temperatures[r] = 0.5 + (double)(r % 3);
    }
    sd_race(logits, model->vocabulary_size, rows, model->vocabulary_size, seeds, temperatures, best, threads);
    add_bits(best, rows * 8);
    int64_t count = model->vocabulary_size < 4 ? model->vocabulary_size : 4, *ids = memory_of(rows * count * 8);
    float *shares = memory_of(rows * count * 4);
    int64_t *token_ids = memory_of(model->vocabulary_size * 8);
    for (int64_t i = 0; i < model->vocabulary_size; i++) token_ids[i] = 3 * i;
    for (int kind = 0; kind < 4; kind++) {
        sd_guess(logits, model->vocabulary_size, rows, model->vocabulary_size, kind & 1 ? token_ids : NULL,
                 kind & 2 ? NULL : seeds, temperatures, count, ids, shares, threads);
        add_bits(ids, rows * count * 8);
        add_numbers(shares, rows * count, SD_FLOAT32);
    }
    int64_t word_count = (model->vocabulary_size + 31) / 32;
    int32_t *masks = memory_of(rows * word_count * 4), *is_empty = memory_of(rows * 4);
    for (int64_t i = 0; i < rows * word_count; i++) masks[i] = i % 5 ? (int32_t)(0x9E3779B9u * (uint32_t)i) : 0;
    float *legal = memory_of(rows * model->vocabulary_size * 4);
    sd_mask(logits, model->vocabulary_size, rows, model->vocabulary_size, masks, word_count, legal, is_empty, threads);
    add_bits(legal, rows * model->vocabulary_size * 4);
    add_bits(is_empty, rows * 4);
    char *keys = qkv + attended * item_size(type), *values = keys + one * item_size(type);
    sd_write(&layer->cache, &p->rows, keys, qkv_size, values, qkv_size, threads);
    char *out = memory_of(rows * attended * item_size(type));
    sd_attend(&layer->cache, &p->rows, &layer->rule, model->heads, qkv, qkv_size, out, attended, threads);
    add_numbers(out, rows * attended, type);
}

static void run_step(const plan *p, const sd_model *model, int32_t threads) {
    const sizes *n = &p->n;
    int32_t is_abandoned = n->flags & ABANDONED ? 1 : 0;
    int64_t hidden_bytes = p->logit_count * n->hidden * item_size(model->type);
    const int32_t layers[] = {0, model->layer_count};
    int64_t feature_count = n->flags & FEATURES ? 2 : 0, feature_size = p->rows.count * feature_count * n->hidden;
    sd_step_arguments asked = {
        .ids = p->ids,
        .inputs = n->flags & INPUTS ? numbers_of(p->rows.count * n->hidden, model->type) : NULL,
        .logit_rows = p->logit_rows,
        .logit_count = p->logit_count,
        .logits = memory_of(p->logit_count * n->vocabulary * 4),
        .hidden = n->flags & HIDDEN ? memory_of(hidden_bytes) : NULL,
        .is_finite = memory_of(p->rows.count),
        .is_abandoned = &is_abandoned,
        .exchange = n->flags & FAILING ? fail : n->flags & EXCHANGE ? keep_sum : NULL,
        .seconds = has_seconds(p) ? numbers_of(p->rows.count * n->hidden, model->type) : NULL,
        .feature_layers = layers,
        .feature_count = feature_count,
        .features = memory_of(feature_size * item_size(model->type)),
    };
    int32_t code = sd_step(model, &p->rows, &asked, threads);
    add_bits(&code, sizeof code);
    if (code != SD_DONE) return;
    add_numbers(asked.logits, p->logit_count * n->vocabulary, SD_FLOAT32);
    add_bits(asked.is_finite, p->rows.count);
    add_numbers(asked.features, feature_size, model->type);
    if (asked.hidden) add_numbers(asked.hidden, hidden_bytes / item_size(model->type), model->type);
    int64_t count = n->block_count * n->block_size * n->kv_heads * n->head_size;
    for (int64_t i = 0; i < n->layers; i++) add_numbers(model->layers[i].cache.keys, count, model->type);
}

// A chain behind the last row, of second inputs from a table or from the output layer's panels.
static void run_chain(const plan *p, const sd_model *model, int32_t threads) {
    const sizes *n = &p->n;
    int64_t rows = p->rows.count, size = n->hidden, item = item_size(model->type), tokens = 3;
    if (!has_seconds(p) || !rows) return;
    int64_t first = p->rows.path_start[rows - 1], known = p->rows.path_start[rows] - first;
    const int32_t layers[] = {model->layer_count}, last = (int32_t)rows - 1;
    int32_t *path = memory_of((known + tokens - 1) * 4);
    for (int64_t i = 0; i < known; i++) path[i] = p->rows.path[first + i];
    for (int64_t i = known; i < known + tokens - 1; i++) path[i] = (int32_t)(i * 7 % (n->block_count * n->block_size));
    uint64_t keys[] = {1, 2, 3};
    sd_step_arguments asked = {
        .ids = p->ids,
        .inputs = numbers_of(rows * size, model->type),
        .logit_rows = &last,
        .logit_count = 1,
        .logits = memory_of(n->vocabulary * 4),
        .is_finite = memory_of(rows),
        .seconds = numbers_of(rows * size, model->type),
        .feature_layers = layers,
        .feature_count = 1,
        .features = memory_of(rows * size * item),
    };
    sd_chain chain = {
        .count = tokens,
        .before = n->flags & HIDDEN ? &model->last : NULL,
        .table = n->flags & INPUTS ? numbers_of(n->vocabulary * size, model->type) : NULL,
        .packed = &model->output,
        .table_count = n->vocabulary,
        .path = path,
        .keys = n->flags & FEATURES ? keys : NULL,
        .temperature = 0.5,
        .scratch = memory_of(2 * size * item),
        .ids = memory_of(tokens * 8),
        .shares = memory_of(tokens * 4),
        .is_finite = memory_of(tokens),
    };
    int32_t code = sd_draft(model, &p->rows, &asked, &chain, threads);
    add_bits(&code, sizeof code);
    add_bits(chain.is_finite, tokens);
    add_bits(chain.ids, tokens * 8);
    add_numbers(chain.shares, tokens, SD_FLOAT32);
    if (code == SD_DONE) add_numbers(asked.features, rows * size, model->type);
}

// Another caller at the same time.
static void *run_neighbour(void *argument) {
    const sd_model *model = argument;
    float x[4096] = {0}, y[4096];
    if (model->hidden_size > 4096 || model->vocabulary_size > 4096) return NULL;
    for (int i = 0; i < 3; i++)
        sd_product(&model->output, x, SD_FLOAT32, model->hidden_size, y, SD_FLOAT32, model->vocabulary_size, 1, 3);
    return NULL;
}

static uint64_t run(const plan *p, int32_t threads) {
    pthread_t neighbour;
    begin_numbers((uint64_t)p->n.seed);
    sd_model model = new_model(p);
    int has_neighbour = threads > 1 && pthread_create(&neighbour, NULL, run_neighbour, &model) == 0;
    run_kernels(p, &model, threads);
    run_step(p, &model, threads);
    run_chain(p, &model, threads);
    if (has_neighbour) pthread_join(neighbour, NULL);
    return bits_so_far();
}

static int report_bits(void) {
    fprintf(stderr, "driver: other bits with more threads\n");
    return 1;
}

int main(int count, char **arguments) {
    plan p = {0};
    int code = 0;
    if (count != 3) exit_because("usage: driver FILE INSTRUCTIONS");
    FILE *file = fopen(arguments[1], "r");
    if (!file) exit_because("the file cannot be read");
    if (!sd_use(arguments[2])) exit_because("these instructions are not here");
    while (read_plan(file, &p)) {
        int64_t paths = p.rows.path_start[p.rows.count], blocks = p.rows.table_start[p.rows.sequence_count];
        // What Python compares before: the lengths of the arrays.
        const char *wrong = paths != p.path_count || blocks != p.table_count ? "another length" : NULL;
        if (!wrong) wrong = sd_check_rows(&p.rows, p.n.block_count, p.n.block_size);
        if (wrong) {
            printf("refused %s\n", wrong);
        } else {
            uint64_t alone = run(&p, 1), together = run(&p, (int32_t)p.n.threads);
            printf("accepted %016" PRIx64 "\n", alone);
            if (alone != together) code = report_bits();
        }
        fflush(stdout);
        free_all();
    }
    fclose(file);
    return code;
}
