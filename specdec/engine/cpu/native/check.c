// The check of a step's rows against the sizes of a cache.
#include "kernels.h"

// Whether the blocks of a sequence's table exist.
static int has_blocks(const sd_rows *rows, int64_t sequence, int64_t block_count) {
    for (int64_t i = rows->table_start[sequence]; i < rows->table_start[sequence + 1]; i++) {
        if (rows->table[i] < 0 || rows->table[i] >= block_count) return 0;
    }
    return 1;
}

static const char *check_row(const sd_rows *rows, int64_t row, int64_t slot_count, int64_t block_size) {
    int64_t sequence = rows->sequence[row], base = rows->base[row];
    int64_t first = rows->path_start[row], end = rows->path_start[row + 1];
    if (sequence < 0 || sequence >= rows->sequence_count) return "a row's sequence does not exist";
    if (rows->slot[row] < 0 || rows->slot[row] >= slot_count) return "a row's slot lies outside the cache";
    if (base < 0) return "a row's base is negative";
    int64_t blocks = rows->table_start[sequence + 1] - rows->table_start[sequence];
    if (base > blocks * block_size) return "a row's base lies beyond its sequence's blocks";
    if (end < first) return "path_start is not ascending";
    if (base + (end - first) != (int64_t)rows->position[row] + 1) return "a row's base and path do not end at its position";
    for (int64_t i = first; i < end; i++) {
        if (rows->path[i] < 0 || rows->path[i] >= slot_count) return "a slot of a path lies outside the cache";
    }
    return NULL;
}

const char *sd_check_rows(const sd_rows *rows, int64_t block_count, int64_t block_size) {
    if (block_count <= 0 || block_size <= 0 || block_count > INT32_MAX / block_size) return "the cache is too large";
    if (rows->count < 0 || rows->sequence_count < 0 || rows->copy_count < 0) return "a count is negative";
    if (rows->table_start[0] != 0 || rows->path_start[0] != 0) return "a list does not start at 0";
    for (int64_t i = 0; i < rows->sequence_count; i++) {
        if (rows->table_start[i + 1] < rows->table_start[i]) return "table_start is not ascending";
        if (!has_blocks(rows, i, block_count)) return "a block lies outside the cache";
    }
    for (int64_t row = 0; row < rows->count; row++) {
        const char *wrong = check_row(rows, row, block_count * block_size, block_size);
        if (wrong != NULL) return wrong;
    }
    for (int64_t i = 0; i < rows->copy_count; i++) {
        if (rows->copy_row[i] < 0 || rows->copy_row[i] >= rows->count) return "a copied row does not exist";
        if (rows->copy_slot[i] < 0 || rows->copy_slot[i] >= block_count * block_size) {
            return "a copy's slot lies outside the cache";
        }
    }
    return NULL;
}
