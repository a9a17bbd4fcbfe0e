// The boundary of the native kernels of a CPU step: everything that Python calls, and nothing else.
//
// Every number of a row is computed in one order that depends on the row alone: see docs/exactness.md. All functions
// take sizes that were checked by their caller, allocate nothing but the scratch of the pool, and may run on any number
// of threads without a change of a bit.
#ifndef SPECDEC_KERNELS_H
#define SPECDEC_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SD_PUBLIC __attribute__((visibility("default")))
#else
#define SD_PUBLIC
#endif

enum { SD_FLOAT32 = 0, SD_BFLOAT16 = 1, SD_FLOAT16 = 2, SD_NONE = -1 };        // types of numbers
enum { SD_INT4 = 3, SD_INT8 = 4, SD_FLOAT8 = 5 };  // of packed weights: integers, or FP8 (E4M3), in groups
enum { SD_SILU = 0, SD_GELU_TANH = 1, SD_GELU_ERF = 2, SD_RELU = 3 };         // activations
enum { SD_ROUND_ONCE = 0, SD_ROUND_FIRST = 1 };  // of a norm: round(n * gain), or round(round(n) * gain)

// A weight [out, in] in panels of 16 outputs; outputs beyond out_size are zero. Of packed weights scale * value, or
// scale * value + minimum, where a scale and a minimum belong to `group` inputs: a multiple of 8 that divides in_size
// and 512.
typedef struct {
    const void *panels;  // the result of sd_pack, or of sd_pack_groups
    const float *bias;   // [out_size]; NULL: none
    int64_t out_size, in_size;
    int32_t type;  // of the panels
    int32_t scale_type, minimum_type;  // of packed weights; minimum_type SD_NONE: none
    int64_t group;
} sd_weight;

// A root-mean-square norm (is_centered 0) or a layer norm (1, Ba et al. 2016).
typedef struct {
    const float *gain, *bias;  // [size]; bias NULL: none
    float epsilon;
    int32_t rounding;     // SD_ROUND_*
    int32_t is_centered;  // subtracts the mean first
} sd_norm;

// The cache of one layer, in blocks. A slot is block * block_size + offset.
typedef struct {
    void *keys;    // [blocks][kv_heads][head_size][block_size]: 16 positions of one element lie side by side
    void *values;  // [blocks][kv_heads][block_size][head_size]
    int64_t block_count, block_size;  // block_size: 8, or a multiple of 16
    int32_t kv_heads, head_size, type;
} sd_cache;

// The rows of a step. Row r attends to positions [0, base[r]) through its sequence's block table, then to the slots
// path[path_start[r]] .. path[path_start[r + 1] - 1], whose positions are base[r], base[r] + 1, ...; the last key is
// its own, at position[r]. A row of a chain has base = position + 1 and no path; a node of a tree has its ancestors
// below the base and itself on its path. Rows come after the rows that they see. With `first` a row attends to [first,
// base) and its path, at least one position, wherever its own is: rows of an encoder, and those that attend to its
// input.
typedef struct {
    int64_t count;
    const int32_t *sequence;     // [count] index of the block table
    const int32_t *position;     // [count]
    const int32_t *slot;         // [count] where the row's key and value are written
    const int32_t *base;         // [count]
    const int64_t *path_start;   // [count + 1]
    const int32_t *path;         // [path_start[count]]
    int64_t sequence_count;
    const int64_t *table_start;  // [sequence_count + 1]
    const int32_t *table;        // [table_start[sequence_count]] block ids
    const int32_t *first;        // [count] the first position it sees; NULL: 0, and the last is its own
} sd_rows;

// Rule of a layer's attention: softmax(softcap * tanh(scaling * q k / softcap) + bias) within `window` positions. The
// bias of a head is that of the key's distance from the query, key position - query position, or of the nearest
// distance in [-bias_reach, bias_reach].
typedef struct {
    float scaling, softcap;  // softcap 0: none
    int64_t window;          // 0: all positions; else the last `window`
    const float *bias;       // [heads][2 * bias_reach + 1]; NULL: none
    int64_t bias_reach;
} sd_rule;

// One layer of the Llama family, or of a stack of T5; the order of operations is that of `transformers`. A norm whose
// gain is NULL is left out; so are cross attention and `up` without panels. Cross attention of a row is that to the
// positions of its cache before the first that it sees.
typedef struct {
    sd_norm before_attention, after_attention, before_mlp, after_mlp;  // after_*: on the output, before the residual
    sd_norm query, key;                                                // of each head, before the rotation
    sd_weight qkv;      // queries of all heads, keys, values
    sd_weight out;      // [hidden, heads * head_size]
    sd_norm before_cross;
    sd_weight cross_queries;  // queries of all heads
    sd_weight cross_out;      // [hidden, heads * head_size]
    sd_weight gate, up; // [intermediate, hidden]
    sd_weight down;     // [hidden, intermediate]
    // [positions, rotated_size] of the model's type, of which the first half of the cosines and the second of the sines
    // are read; NULL: no rotation.
    const void *cosines, *sines;
    sd_rule rule, cross_rule;
    sd_cache cache;
} sd_layer;

typedef struct {
    const sd_layer *layers;
    int32_t layer_count, hidden_size, intermediate_size, heads, kv_heads, head_size, rotated_size;
    int32_t activation;  // SD_SILU ...
    int32_t type;        // of activations and cache: results of every operation are rounded to it
    const void *embedding;  // [vocabulary_size, hidden] of `type`; NULL: the output layer's weight, of the same type
    float embedding_scale;  // 1: none
    float residual_scale;   // 1: none
    // Of the second inputs of a model of one layer (EAGLE, arXiv 2503.01840): their norm lies before that of the residual
    // in each row of the input of its qkv, [out, 2 hidden]; gain NULL: it has none.
    sd_norm second;
    sd_norm last;
    sd_weight output;       // [logits of a row, hidden]; logits are float32, not rounded; panels NULL: no output layer
    float logit_scale, logit_softcap;  // 1, 0: none
    int64_t vocabulary_size, positions_max;  // ids and positions lie below
} sd_model;

// Called on the calling thread, in place of a sum over ranks: x [count] of float32 is replaced by its sum over all
// ranks, in rank order. Returns 0, or anything else to end the step.
typedef int32_t (*sd_exchange)(float *x, int64_t count);

typedef struct {
    const int64_t *ids;         // [rows]
    const void *inputs;         // [rows, hidden] of the model's type, instead of the embeddings of ids; NULL: none
    const int32_t *logit_rows;  // [logit_count] rows whose logits are asked
    int64_t logit_count;
    float *logits;              // [logit_count, output.out_size]
    void *hidden;               // [logit_count, hidden] of the model's type, for the output layer; NULL: not asked
    uint8_t *is_finite;         // [rows] 1 where the last hidden state, and the logits if asked, are finite
    const volatile int32_t *is_abandoned;  // read between layers, before a layer's keys are written; NULL: never
    sd_exchange exchange;       // NULL: one rank
    const void *seconds;        // [rows, hidden] of the model's type, of a model that has second inputs
    // Features of all rows: the residual as it enters layer feature_layers[i], or, of layer_count, after the last and
    // before the last norm.
    const int32_t *feature_layers;  // [feature_count]
    int64_t feature_count;
    void *features;             // [rows, feature_count, hidden] of the model's type
} sd_step_arguments;

// A chain of tokens behind the last row of a step of a model with second inputs. Each token is the one with the largest
// logit / temperature + noise of its key, as sd_guess finds it, of the last row; it is the second input of a row behind
// it, whose input is the only feature of the row before.
typedef struct {
    int64_t count;              // of tokens; one row less is run behind those of the step
    const sd_norm *before;      // of the inputs of these rows; NULL: none
    const void *table;          // [table_count][hidden] of the model's type: second inputs; NULL: those of `packed`
    const sd_weight *packed;
    int64_t table_count;
    const int32_t *path;        // the path of the last row, then the slots of the rows behind it
    const int64_t *token_ids;   // [output.out_size] of the columns
    const uint64_t *keys;       // [count]; NULL: no noise
    double temperature;
    void *scratch;              // [2][hidden] of the model's type
    int64_t *ids;               // [count] what is found, with the shares of sd_guess
    float *shares;
    uint8_t *is_finite;         // [count] as of a step; the first row that is not ends the chain
} sd_chain;

// SD_OUT_OF_RANGE: an id, a position, a row of logits, second inputs or the positions of cross attention do not exist.
enum { SD_DONE = 0, SD_ABANDONED = 1, SD_EXCHANGE_FAILED = 2, SD_NO_MEMORY = 3, SD_OUT_OF_RANGE = 4 };

// Version of the order of sums: increases with each change by which a result has other bits.
SD_PUBLIC int32_t sd_version(void);
// The family in force, or "" if this processor can run none: "fma" or "avx512_bf16". `sd_instructions`: the instruction
// set that computes it ("avx2", "avx512", "neon", "avx512_bf16"). `sd_use` chooses an instruction set by its name before
// any weight is packed; returns 0 if this processor or library does not have it.
SD_PUBLIC const char *sd_family(void);
SD_PUBLIC const char *sd_instructions(void);
SD_PUBLIC int32_t sd_use(const char *instructions);

// Bytes of the panels of a weight, of which its sizes and types are read.
SD_PUBLIC int64_t sd_packed_bytes(const sd_weight *weight);
// weight [out_size, in_size] of `type`, in strides of elements -> panels
SD_PUBLIC void sd_pack(const void *weight, int32_t type, int64_t out_size, int64_t in_size, int64_t out_stride,
                       int64_t in_stride, void *panels);
// values [out_size][in_size], a byte each: of SD_INT8 signed; of SD_INT4 signed, or with minima from 0 to 15; of
// SD_FLOAT8 all but 0x7f and 0xff, which are no numbers. scales, minima [out_size][in_size / group] of the weight's
// types. Its panels are not read.
SD_PUBLIC void sd_pack_groups(const sd_weight *weight, const int8_t *values, const void *scales, const void *minima,
                              void *panels);
// Outputs [count] of a weight [out, in] -> y [count][in_size] of y_type: as packed, or rounded once to the type.
SD_PUBLIC void sd_unpack(const sd_weight *weight, const int64_t *outputs, int64_t count, void *y, int32_t y_type);

// All arrays of rows below are [rows][stride] with unit distance of elements; strides count elements.
SD_PUBLIC void sd_product(const sd_weight *weight, const void *x, int32_t x_type, int64_t x_stride, void *y,
                          int32_t y_type, int64_t y_stride, int64_t rows, int32_t threads);
SD_PUBLIC void sd_normalize(const sd_norm *norm, const void *x, int64_t x_stride, void *y, int64_t y_stride,
                            int32_t type, int64_t rows, int64_t size, int32_t threads);
SD_PUBLIC void sd_activate(int32_t activation, const void *x, void *y, int32_t type, int64_t count, int32_t threads);
SD_PUBLIC void sd_tanh(const float *x, float *y, int64_t count, int32_t threads);
// Writes keys and values [rows][kv_heads * head_size] of the cache's type to the rows' slots.
SD_PUBLIC void sd_write(const sd_cache *cache, const sd_rows *rows, const void *keys, int64_t key_stride,
                        const void *values, int64_t value_stride, int32_t threads);
// queries [rows][heads * head_size] -> out, both of the cache's type
SD_PUBLIC void sd_attend(const sd_cache *cache, const sd_rows *rows, const sd_rule *rule, int32_t heads,
                         const void *queries, int64_t query_stride, void *out, int64_t out_stride, int32_t threads);
SD_PUBLIC void sd_argmax(const float *x, int64_t stride, int64_t rows, int64_t size, int64_t *best, int32_t threads);
// The perturbed argmax: of each row the token with the largest x / temperature + Gumbel noise of the row's key, or -1
// where two are too close to decide here (docs/exactness.md).
SD_PUBLIC void sd_race(const float *x, int64_t stride, int64_t rows, int64_t size, const uint64_t *keys,
                       const double *temperatures, int64_t *best, int32_t threads);
// A draft's guesses: of each row the `count` tokens with the largest x / temperature + noise, largest first, and their
// shares of the softmax of all; id 0 with share 0 where there are fewer. token_ids [size]: of the columns; NULL: column
// i is token i. keys NULL: no noise.
SD_PUBLIC void sd_guess(const float *x, int64_t stride, int64_t rows, int64_t size, const int64_t *token_ids,
                        const uint64_t *keys, const double *temperatures, int64_t count, int64_t *ids, float *shares,
                        int32_t threads);
// The logits of legal tokens: y [rows][size] is x where a token's bit in its row's mask is set (bit i of word w is token
// 32 w + i), else -infinity. is_empty: of each row, whether all are -infinity.
SD_PUBLIC void sd_mask(const float *x, int64_t stride, int64_t rows, int64_t size, const int32_t *masks,
                       int64_t mask_stride, float *y, int32_t *is_empty, int32_t threads);
// Runs one step; returns SD_*.
SD_PUBLIC int32_t sd_step(const sd_model *model, const sd_rows *rows, const sd_step_arguments *arguments,
                          int32_t threads);
// Runs one step, of which the logits of the last row alone and one feature are asked, and drafts a chain behind it.
// The feature and the logits of the last row are in the end those of the last row of the chain. Returns SD_*.
SD_PUBLIC int32_t sd_draft(const sd_model *model, const sd_rows *rows, const sd_step_arguments *arguments,
                           const sd_chain *chain, int32_t threads);
// Returns NULL if every index of the rows lies within a cache of these sizes, else what is wrong.
SD_PUBLIC const char *sd_check_rows(const sd_rows *rows, int64_t block_count, int64_t block_size);

#endif
