// The check of a step's rows against the sizes of a cache.
#include "kernels.h"

// Whether `count` parts begin at 0 and end where the next begins, none before it begins: no part reaches beyond the end
// of the last.
static int is_divided(const int64_t *starts, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (starts[i + 1] < starts[i]) return 0;
    }
    return starts[0] == 0;
}

static int are_below(const int32_t *indices, int64_t first, int64_t end, int64_t limit) {
    for (int64_t i = first; i < end; i++) {
        if (indices[i] < 0 || indices[i] >= limit) return 0;
    }
    return 1;
}

static const char *check_row(const sd_rows *rows, int64_t row, int64_t slot_count, int64_t block_size) {
    int64_t sequence = rows->sequence[row], base = rows->base[row], position = rows->position[row];
    int64_t first = rows->path_start[row], end = rows->path_start[row + 1];
    if (sequence < 0 || sequence >= rows->sequence_count) return "a row's sequence does not exist";
    if (rows->slot[row] < 0 || rows->slot[row] >= slot_count) return "a row's slot lies outside the cache";
    if (base < 0 || position < 0) return "a row's base or position is negative";
    int64_t blocks = rows->table_start[sequence + 1] - rows->table_start[sequence];
    if (base > blocks * block_size) return "a row's base lies beyond its sequence's blocks";
    if (rows->first == NULL) {
        if (base + (end - first) != position + 1) return "a row's base and path do not end at its position";
    } else if (rows->first[row] < 0 || rows->first[row] > base || rows->first[row] >= base + (end - first)) {
        return "a row's first position does not lie before its last";
    }
    if (!are_below(rows->path, first, end, slot_count)) return "a slot of a path lies outside the cache";
    return NULL;
}

const char *sd_check_rows(const sd_rows *rows, int64_t block_count, int64_t block_size) {
    if (block_count <= 0 || block_size <= 0 || block_count > INT32_MAX / block_size) return "the cache is too large";
    if (rows->count < 0 || rows->sequence_count < 0) return "a count is negative";
    // Before any list is read: its parts lie within it.
    if (!is_divided(rows->table_start, rows->sequence_count)) return "table_start does not ascend from 0";
    if (!is_divided(rows->path_start, rows->count)) return "path_start does not ascend from 0";
    int64_t slot_count = block_count * block_size;
    if (!are_below(rows->table, 0, rows->table_start[rows->sequence_count], block_count)) {
        return "a block lies outside the cache";
    }
    for (int64_t row = 0; row < rows->count; row++) {
        const char *wrong = check_row(rows, row, slot_count, block_size);
        if (wrong != NULL) return wrong;
    }
    return NULL;
}
