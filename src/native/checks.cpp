#include "checks.hpp"

#include <algorithm>

#include "limits.hpp"
#include "reach.hpp"

namespace kvant {
namespace {

// Columns, rows and pages beyond this would overflow where they are added up.
constexpr int64_t MOST = (int64_t)1 << 40;

bool none_negative(std::initializer_list<int64_t> counts) {
    return std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count >= 0; });
}

// In whole numbers of `unit` bytes. What kernels add up must not overflow: not even the stride of
// an only row, which leads nowhere.
bool are_strides(std::initializer_list<int64_t> strides, int64_t unit) {
    return std::all_of(strides.begin(), strides.end(), [&](int64_t stride) {
        return stride >= 0 && stride <= MOST && stride % unit == 0;
    });
}

bool is_dtype(int64_t dtype) {
    return dtype == KVANT_F32 || dtype == KVANT_BF16 || dtype == KVANT_F16;
}
bool is_dim(int64_t dim) { return dim >= 16 && dim <= MAX_DIM && dim % 16 == 0; }
bool is_number_of_threads(int64_t threads) { return threads >= 1 && threads <= MAX_THREADS; }

// What a coded row is made of; false where no kernel knows it.
bool is_format(int64_t format, int64_t bits, int64_t group, int64_t dim) {
    if (dim % 32 && (bits == 3 || bits == 5)) return false;
    const bool few = bits >= 2 && bits <= 4;
    switch (format) {
    case KVANT_AFFINE:
        return (few || bits == 5 || bits == 6 || bits == 8) &&
               (group == 16 || group == 32 || group == 64 || group == MAX_GROUP_WIDTH);
    case KVANT_CODEBOOK: return few && group == dim;
    case KVANT_FP8: return bits == 8 && group == dim;
    }
    return false;
}

int64_t groups_of(int64_t format, int64_t dim, int64_t group) {
    return format == KVANT_AFFINE ? (dim + group - 1) / group : 1;
}

struct Shape {
    int64_t batch, heads, count, dim, dtype;
};

// Are rows of this shape there, at strides of whole numbers?
bool there(const kvant_rows &rows, const Shape &shape) {
    const int64_t size = size_of(shape.dtype);
    const int64_t need = reach({{shape.batch, rows.batch}, {shape.heads, rows.head},
                                {shape.count, rows.row}}, shape.dim * size);
    return need == 0 || (are_strides({rows.batch, rows.head, rows.row}, size) &&
                         holds(rows.data, rows.nbytes, need, size));
}

// How many slots of pages of so many bytes there are.
int64_t slots_of(const kvant_pages &pages, int64_t heads, int64_t page, int64_t unit) {
    const int64_t need = reach({{heads, pages.head}}, page);
    if (!holds(pages.data, pages.nbytes, need, unit)) return 0;
    if (!are_strides({pages.slot, pages.head}, unit)) return 0;
    return pages.slot > 0 ? (pages.nbytes - need) / pages.slot + 1 : 1;
}

// The slots that all fields of a side have.
int64_t slots_of(const kvant_side &side, const kvant_request &r) {
    if (side.format == KVANT_RAW) {
        const int64_t size = size_of(side.dtype);
        return slots_of(side.codes, r.heads, product({r.page, side.dim, size}), size);
    }
    const int64_t params = times(r.page, 2 * groups_of(side.format, side.dim, side.group));
    const int64_t codes = times(r.page, side.dim * side.bits / 8);
    const int64_t slots = std::min(slots_of(side.codes, r.heads, codes, 1),
                                   slots_of(side.scale, r.heads, params, 2));
    if (side.format != KVANT_AFFINE) return slots;
    return std::min(slots, slots_of(side.bias, r.heads, params, 2));
}

// What is wrong with a side as such, and with its dense rows.
const char *refused(const kvant_side &side, const kvant_request &r) {
    if (!is_dtype(side.dtype)) return "dtype: rows of no type that is known";
    if (!is_dim(side.dim)) return "dim: not a multiple of 16 from 16 to 256";
    if (side.format != KVANT_RAW && !is_format(side.format, side.bits, side.group, side.dim))
        return "format: no codes of such bits and groups in rows so wide";
    if (side.format != KVANT_AFFINE && side.bias.data)
        return "bias: only affine codes have one";
    if (side.format == KVANT_CODEBOOK &&
        !holds(side.levels, side.levels_nbytes, (int64_t)sizeof(float) << side.bits, sizeof(float)))
        return "levels: fewer than the codes tell apart";
    if (!there(side.dense, {r.batch, r.heads, r.num_dense, side.dim, side.dtype}))
        return "dense: rows that are not there";
    if (!there(side.sinks, {r.batch, r.heads, r.num_sinks, side.dim, side.dtype}))
        return "sinks: rows that are not there";
    return nullptr;
}

// Does the table name slots that there are, and nothing else?
bool names_pages(const kvant_request &r, int64_t slots) {
    uint64_t last = 0;
    for (int64_t b = 0; b < r.batch; b++)
        for (int64_t i = 0; i < r.num_pages; i++)
            last = std::max(last, (uint64_t)r.page_table[b * r.table_stride + i]);
    return last < (uint64_t)slots;
}

const char *refused_pages(const kvant_request &r) {
    if (r.page < 1 || times(plus(r.first_page, r.num_pages), r.page) > MOST)
        return "page: pages of no rows, or more of them than can be counted";
    const int64_t table = reach({{r.batch, times(r.table_stride, 8)}, {r.num_pages, 8}}, 8);
    if (!are_strides({r.table_stride}, 1) || !holds(r.page_table, r.page_table_nbytes, table, 8))
        return "page_table: entries that are not there";
    if (!r.batch || !r.num_pages) return nullptr;
    if (r.page % BLOCK) return "page: sealed pages of no multiple of 64 rows";
    if (!names_pages(r, std::min(slots_of(r.keys, r), slots_of(r.values, r))))
        return "page_table: slots that the codes, scales and biases do not have";
    return nullptr;
}

// The columns that queries stand at and that rows begin with.
const char *refused_columns(const kvant_request &r) {
    if (r.columns > MOST || r.dense_from > MOST || r.num_dense > MOST || r.num_sinks > MOST)
        return "columns: more than can be counted";
    if (r.queries > r.columns) return "columns: fewer than queries";
    if (!holds(r.start, r.start_nbytes, times(r.batch, 8), 8)) return "start: fewer than sequences";
    for (int64_t b = 0; b < r.batch; b++)
        if (r.start[b] < 0 || r.start[b] > MOST) return "start: no column that can be counted";
    return nullptr;
}

// What comes in with a request for attention, and what is to leave.
const char *refused_queries(const kvant_request &r) {
    const int64_t heads = times(r.heads, r.group), rows = product({r.batch, heads, r.queries});
    if (!is_dtype(r.q_dtype) || !is_dtype(r.out_dtype)) return "q_dtype: no type that is known";
    if (!there(r.q, {r.batch, heads, r.queries, r.keys.dim, r.q_dtype}))
        return "q: queries that are not there";
    const int64_t size = size_of(r.out_dtype);
    if (!holds(r.out, r.out_nbytes, product({rows, r.values.dim, size}), size))
        return "out: less room than the outputs take";
    if (r.lse && !holds(r.lse, r.lse_nbytes, times(rows, sizeof(float)), sizeof(float)))
        return "lse: less room than there are queries";
    if (r.sink_logits &&
        !holds(r.sink_logits, r.sink_logits_nbytes, times(heads, sizeof(float)), sizeof(float)))
        return "sink_logits: fewer than heads";
    return nullptr;
}

bool apart(const void *a, int64_t a_nbytes, const void *b, int64_t b_nbytes) {
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x + (uintptr_t)a_nbytes <= y || y + (uintptr_t)b_nbytes <= x;
}

// Kernels go by the table and the starts while others write: these must stay what was checked.
bool overwritten(const void *data, int64_t nbytes, const kvant_request &r) {
    return data && !(apart(data, nbytes, r.page_table, r.page_table_nbytes) &&
                     apart(data, nbytes, r.start, r.start_nbytes));
}

}  // namespace

const char *refused(const kvant_request &r) {
    if (!none_negative({r.batch, r.heads, r.queries, r.first_page, r.num_pages, r.dense_from,
                        r.num_dense, r.num_sinks, r.columns, r.dense_until, r.own_from, r.window,
                        r.mask_sinks, r.chunk}) || r.tail < -1)
        return "a count: below zero";
    if (r.group < 1 || r.group > MAX_GROUP) return "group: not from 1 to 16";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (const char *why = refused(r.keys, r)) return why;
    if (const char *why = refused(r.values, r)) return why;
    if (const char *why = refused_queries(r)) return why;
    if (const char *why = refused_columns(r)) return why;
    if (const char *why = refused_pages(r)) return why;
    if (overwritten(r.out, r.out_nbytes, r) || overwritten(r.lse, r.lse_nbytes, r))
        return "out: memory that says where rows lie";
    return nullptr;
}

const char *refused(const kvant_seal_request &r) {
    if (!none_negative({r.batch, r.pages, r.heads})) return "a count: below zero";
    if (!is_dtype(r.dtype)) return "dtype: rows of no type that is known";
    if (!is_dim(r.dim)) return "dim: not a multiple of 16 from 16 to 256";
    if (!is_format(r.format, r.bits, r.group, r.dim))
        return "format: no codes of such bits and groups in rows so wide";
    if (r.format != KVANT_AFFINE && r.bias) return "bias: only affine codes have one";
    if (r.page < 16 || r.page % 16) return "page: no multiple of 16 rows";
    if (r.arrangement < KVANT_ROWS || r.arrangement > KVANT_VALUES)
        return "arrangement: none that is known";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (r.format == KVANT_CODEBOOK) {
        const int64_t levels = (int64_t)1 << r.bits, size = sizeof(float);
        if (!holds(r.levels, r.levels_nbytes, levels * size, size))
            return "levels: fewer than the codes tell apart";
        if (!holds(r.boundaries, r.boundaries_nbytes, (levels - 1) * size, size))
            return "boundaries: fewer than there are between the levels";
    }
    if (!there(r.rows, {r.batch, r.heads, times(r.pages, r.page), r.dim, r.dtype}))
        return "rows: more than there are";
    const int64_t rows = product({r.batch, r.pages, r.heads, r.page});
    const int64_t params = product({rows, groups_of(r.format, r.dim, r.group), 2});
    if (!holds(r.codes, r.codes_nbytes, times(rows, r.dim * r.bits / 8), 1))
        return "codes: less room than they take";
    if (!holds(r.scale, r.scale_nbytes, params, 2)) return "scale: less room than the scales take";
    if (r.format == KVANT_AFFINE && !holds(r.bias, r.bias_nbytes, params, 2))
        return "bias: less room than the biases take";
    return nullptr;
}

const char *refused(const kvant_rotate_request &r) {
    if (!none_negative({r.batch, r.heads, r.count})) return "a count: below zero";
    if (!is_dtype(r.dtype)) return "dtype: rows of no type that is known";
    if (!is_dim(r.dim)) return "dim: not a multiple of 16 from 16 to 256";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (!holds(r.signs, r.signs_nbytes, times(r.dim, sizeof(float)), sizeof(float)))
        return "signs: fewer than channels";
    if (!there(r.rows, {r.batch, r.heads, r.count, r.dim, r.dtype}))
        return "rows: more than there are";
    const int64_t size = size_of(r.dtype);
    if (!holds(r.out, r.out_nbytes, product({r.batch, r.heads, r.count, r.dim, size}), size))
        return "out: less room than the rows take";
    return nullptr;
}

const char *refused(const kvant_put_request &r) {
    if (!none_negative({r.batch, r.heads, r.slot, r.count})) return "a count: below zero";
    if (r.sides < 0 || r.sides > 2) return "sides: not from 0 to 2";
    for (int64_t i = 0; i < r.sides; i++) {
        const kvant_put_side &side = r.side[i];
        const kvant_rows &rows = side.rows;
        if (side.slots < 0 || side.bytes < 1) return "room: no slots, or none of a size";
        if (plus(r.slot, r.count) > side.slots) return "slot: beyond the room";
        const int64_t own = times(side.slots, side.bytes);
        if ((r.heads > 1 && side.head < own) || (r.batch > 1 && side.batch < own))
            return "room: heads that overlap";
        if (!are_strides({side.batch, side.head, rows.batch, rows.head, rows.row}, 1))
            return "strides: below zero, or beyond any memory";
        const Axis batch = {r.batch, side.batch}, head = {r.heads, side.head};
        if (!holds(side.room, side.room_nbytes, reach({batch, head, {side.slots, side.bytes}}, side.bytes), 1))
            return "room: more slots than memory";
        if (!holds(rows.data, rows.nbytes,
                   reach({{r.batch, rows.batch}, {r.heads, rows.head}, {r.count, rows.row}}, side.bytes), 1))
            return "rows: more than there are";
    }
    return nullptr;
}

bool is_empty(const kvant_request &r) { return !r.batch || !r.heads || !r.queries; }
bool is_empty(const kvant_seal_request &r) { return !r.batch || !r.pages || !r.heads; }
bool is_empty(const kvant_rotate_request &r) { return !r.batch || !r.heads || !r.count; }
bool is_empty(const kvant_put_request &r) { return !r.batch || !r.heads || !r.count; }

}  // namespace kvant
