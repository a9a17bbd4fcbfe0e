// A chain behind a step of a model with second inputs: guesses and steps of one row in turns, in one call.
#ifndef SPECDEC_CHAIN_H
#define SPECDEC_CHAIN_H

#include "sampling.h"
#include "step.h"

// The feature of the step's last row: the input of the next row, and then its own feature.
INLINE char *last_feature(const sd_model *model, const sd_rows *rows, const sd_step_arguments *asked) {
    return item_of(asked->features, (rows->count - 1) * model->hidden_size, model->type);
}

// Runs row `place` = 1, 2, ... behind those of the step, whose token was found last. Returns SD_*.
static int32_t run_behind(const sd_model *model, const sd_rows *rows, const sd_step_arguments *asked,
                          const sd_chain *chain, int64_t place, int32_t threads) {
    int64_t last = rows->count - 1, size = model->hidden_size, id = chain->ids[place - 1];
    int64_t known = rows->path_start[last + 1] - rows->path_start[last];
    const int64_t *blocks = rows->table_start + rows->sequence[last];
    const int32_t sequence = 0, position = rows->position[last] + (int32_t)place, logit_row = 0;
    const int64_t path_start[2] = {0, known + place}, table_start[2] = {0, blocks[1] - blocks[0]};
    const sd_rows row = {
        .count = 1,
        .sequence = &sequence,
        .position = &position,
        .slot = chain->path + known + place - 1,
        .base = rows->base + last,
        .path_start = path_start,
        .path = chain->path,
        .sequence_count = 1,
        .table_start = table_start,
        .table = rows->table + blocks[0],
        .first = rows->first ? rows->first + last : NULL,
    };
    const sd_cache *cache = &model->layers[0].cache;
    if (id < 0 || id >= chain->table_count || sd_check_rows(&row, cache->block_count, cache->block_size))
        return SD_OUT_OF_RANGE;
    char *x = last_feature(model, rows, asked), *second = chain->scratch, *normed = item_of(second, size, model->type);
    if (chain->before) normalize_row(chain->before, x, normed, model->type, size);
    if (chain->table) {
        memcpy(second, item_of(chain->table, id * size, model->type), (size_t)size * (model->type == SD_FLOAT32 ? 4 : 2));
    } else {
        unpack(chain->packed, &id, 1, second, model->type);
    }
    sd_step_arguments own = *asked;
    own.inputs = chain->before ? normed : x;
    own.seconds = second;
    own.logit_rows = &logit_row;
    own.is_finite = chain->is_finite + place;
    own.features = x;
    return step_on(model, &row, &own, threads);
}

static int32_t draft_chain(const sd_model *model, const sd_rows *rows, const sd_step_arguments *asked,
                           const sd_chain *chain, int32_t threads) {
    int64_t last = rows->count - 1;
    if (last < 0 || chain->count < 1 || asked->logit_count != 1 || asked->logit_rows[0] != last ||
        asked->feature_count != 1 || !model->second.gain)
        return SD_OUT_OF_RANGE;
    int32_t result = step_on(model, rows, asked, threads);
    chain->is_finite[0] = result == SD_DONE && asked->is_finite[last];
    for (int64_t i = 0; result == SD_DONE && chain->is_finite[i]; i++) {
        guess_row(asked->logits, model->output.out_size, chain->token_ids, chain->keys ? chain->keys + i : NULL,
                  chain->temperature, 1, chain->ids + i, chain->shares + i);
        if (i + 1 == chain->count) break;
        result = run_behind(model, rows, asked, chain, i + 1, threads);
    }
    return result;
}

#endif
