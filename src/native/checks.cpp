#include "checks.hpp"

#include <algorithm>

#include "limits.hpp"
#include "bounds.hpp"
#include "read_ranges.hpp"

namespace kvant {
namespace {

// Sums of more columns, rows or pages than this could overflow.
constexpr int64_t MAX_COUNT = (int64_t)1 << 40;

bool none_negative(std::initializer_list<int64_t> counts) {
    return std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count >= 0; });
}

// Whether strides are multiples of `unit` bytes in range. Sums in kernels must not overflow, so even
// the unused stride of a single row is checked.
bool are_strides(std::initializer_list<int64_t> strides, int64_t unit) {
    return std::all_of(strides.begin(), strides.end(), [&](int64_t stride) {
        return stride >= 0 && stride <= MAX_COUNT && stride % unit == 0;
    });
}

bool is_dtype(int64_t dtype) {
    return dtype == KVANT_F32 || dtype == KVANT_BF16 || dtype == KVANT_F16;
}
bool is_dim(int64_t dim) { return dim >= 16 && dim <= MAX_DIM && dim % 16 == 0; }
bool is_number_of_threads(int64_t threads) { return threads >= 1 && threads <= MAX_THREADS; }

// Whether kernels support a coded format.
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

// Whether rows of a shape are inside their memory, at valid strides.
bool is_inside(const kvant_rows &rows, const Shape &shape) {
    const int64_t size = size_of(shape.dtype);
    const int64_t need = reach({{shape.batch, rows.batch}, {shape.heads, rows.head},
                                {shape.count, rows.row}}, shape.dim * size);
    return need == 0 || (are_strides({rows.batch, rows.head, rows.row}, size) &&
                         holds(rows.data, rows.nbytes, need, size));
}

// Whether a tensor of a shape is inside its memory.
bool is_inside(const kvant_numbers &x, const kvant_four &n, int64_t size) {
    const kvant_four &by = x.stride;
    const int64_t need = reach({{n.first, by.first}, {n.second, by.second}, {n.third, by.third},
                                {n.last, by.last}}, size);
    return need == 0 || (are_strides({by.first, by.second, by.third, by.last}, size) &&
                         holds(x.data, x.nbytes, need, size));
}

// Whether a struct is inside its memory.
template <class Struct> bool is_inside(const Struct *data, int64_t nbytes) {
    return holds(data, nbytes, sizeof(Struct), alignof(Struct));
}

// The number of pages, `slot` bytes apart and of `need` bytes each, that fit into `nbytes`.
int64_t slots_in(int64_t nbytes, int64_t need, int64_t slot) {
    return slot > 0 ? std::max<int64_t>(0, nbytes - need) / slot + 1 : 1;
}

int64_t slots_of(const kvant_pages &pages, int64_t heads, int64_t page, int64_t unit) {
    const int64_t need = reach({{heads, pages.head}}, page);
    if (!holds(pages.data, pages.nbytes, need, unit)) return 0;
    if (!are_strides({pages.slot, pages.head}, unit)) return 0;
    return slots_in(pages.nbytes, need, pages.slot);
}

// The number of slots that all sealed fields of a side have.
int64_t sealed_slots(const kvant_side &side, int64_t heads, int64_t page) {
    if (side.format == KVANT_RAW) {
        const int64_t size = size_of(side.dtype);
        return slots_of(side.codes, heads, product({page, side.dim, size}), size);
    }
    const int64_t params = times(page, 2 * groups_of(side.format, side.dim, side.group));
    const int64_t codes = times(page, side.dim * side.bits / 8);
    const int64_t slots = std::min(slots_of(side.codes, heads, codes, 1),
                                   slots_of(side.scale, heads, params, 2));
    if (side.format != KVANT_AFFINE) return slots;
    return std::min(slots, slots_of(side.bias, heads, params, 2));
}

int64_t open_slots(const kvant_side &side, int64_t heads, int64_t rows) {
    const kvant_open &open = side.open;
    const int64_t size = size_of(side.dtype);
    const int64_t need = reach({{heads, open.head}, {rows, open.row}}, side.dim * size);
    if (!holds(open.data, open.nbytes, need, size)) return 0;
    if (!are_strides({open.slot, open.head, open.row}, size)) return 0;
    return slots_in(open.nbytes, need, open.slot);
}

const char *check(const kvant_weight &w) {
    if (w.outs < 0 || w.outs > MAX_COUNT) return "outs: out of range";
    if (w.width < WEIGHT_UNIT || w.width > MAX_COUNT || w.width % WEIGHT_UNIT)
        return "width: not a multiple of 32, or out of range";
    if (w.format == KVANT_RAW) {
        if (w.dtype != KVANT_BF16 && w.dtype != KVANT_F16) return "weight: not of 16 bits";
        return holds(w.codes, w.codes_nbytes, product({w.outs, w.width, 2}), 2)
                   ? nullptr
                   : "weight: fewer than outputs";
    }
    if (w.format != KVANT_AFFINE || !is_format(w.format, w.bits, w.group, w.part))
        return "format: unsupported bits and group of a weight";
    if (w.part < WEIGHT_UNIT || w.part > MAX_DIM || w.part % WEIGHT_UNIT || w.part % w.group ||
        w.width % w.part)
        return "part: not a multiple of 32 and of the group that divides the width";
    const int64_t rows = (w.outs + BLOCK - 1) / BLOCK * BLOCK;
    const int64_t params = product({rows, w.width / w.group, 2});
    if (!holds(w.codes, w.codes_nbytes, product({rows, w.width / 8, w.bits}), 1))
        return "codes: fewer than outputs";
    if (!holds(w.scale, w.scale_nbytes, params, 2)) return "scale: too small, or not aligned";
    if (w.bias && !holds(w.bias, w.bias_nbytes, params, 2))
        return "bias of the weight: too small, or not aligned";
    return nullptr;
}

// Check a side by itself.
const char *check(const kvant_side &side) {
    if (!is_dtype(side.dtype)) return "dtype: unknown";
    if (!is_dim(side.dim)) return "dim: not a multiple of 16 from 16 to 256";
    if (side.format != KVANT_RAW && !is_format(side.format, side.bits, side.group, side.dim))
        return "format: unsupported bits and group for this dim";
    if (side.format != KVANT_AFFINE && side.bias.data)
        return "bias: only affine codes have one";
    if (side.arrangement < KVANT_ROWS || side.arrangement > KVANT_VALUES)
        return "arrangement: unknown";
    if (side.format != KVANT_CODEBOOK) return nullptr;
    const int64_t size = sizeof(float), levels = size << side.bits;
    if (!holds(side.levels, side.levels_nbytes, levels, size))
        return "levels: fewer than codes";
    if (!holds(side.boundaries, side.boundaries_nbytes, levels - size, size))
        return "boundaries: fewer than between the levels";
    return nullptr;
}

// The largest slot of pages [first, stop); larger than any slot if the table is too narrow.
uint64_t last_slot(const kvant_table &table, int64_t sequence, int64_t first, int64_t stop) {
    if (first >= stop) return 0;
    if (stop > table.width) return ~(uint64_t)0;
    const int64_t *entries = table.data + sequence * table.stride;
    uint64_t last = 0;
    for (int64_t i = first; i < stop; i++) last = std::max(last, (uint64_t)entries[i]);
    return last;
}

bool is_table(const kvant_table &table, int64_t batch) {
    const int64_t need = reach({{batch, times(table.stride, 8)}, {table.width, 8}}, 8);
    return table.width >= 0 && are_strides({table.stride}, 1) &&
           holds(table.data, table.nbytes, need, 8);
}

const char *check(const kvant_extent &e) {
    if (!none_negative({e.batch, e.dense_until, e.sinks}) || e.tail < -1) return "a count: below zero";
    if (e.page < 1 || e.page > MAX_COUNT || e.sinks > MAX_COUNT)
        return "page: it or sinks out of range";
    if (!holds(e.numbers, e.numbers_nbytes, product({e.batch, KVANT_NUMBERS, 8}), 8))
        return "numbers: fewer than sequences";
    if (!is_table(e.sealed, e.batch)) return "sealed: table beyond its memory";
    if (!is_table(e.open, e.batch)) return "open: table beyond its memory";
    for (int64_t b = 0; b < e.batch; b++) {
        const int64_t *n = e.numbers + b * KVANT_NUMBERS;
        if (n[KVANT_LENGTH] < -MAX_COUNT || n[KVANT_LENGTH] > MAX_COUNT ||
            n[KVANT_BEGINS] > MAX_COUNT ||
            !none_negative({n[KVANT_FIRST_SEALED], n[KVANT_STOP_SEALED], n[KVANT_FIRST_OPEN],
                            n[KVANT_BEGINS]}))
            return "numbers: positions out of range";
        for (int at : {KVANT_FIRST_SEALED, KVANT_STOP_SEALED, KVANT_FIRST_OPEN})
            if (times(n[at], e.page) > MAX_COUNT) return "numbers: pages out of range";
    }
    return nullptr;
}

// Check that selected pages exist and ascend, and that all heads have the same count.
const char *check_selection(const kvant_request &r) {
    const kvant_extent &e = *r.extent;
    if (r.num_chosen < 0) return "chosen: a count below zero";
    if (!holds(r.chosen, r.chosen_nbytes,
               product({e.batch, r.heads, r.queries, r.num_chosen, 8}), 8))
        return "chosen: beyond its memory";
    for (int64_t b = 0; b < e.batch; b++) {
        const Reads reads(r, b);
        const int64_t first = reads.sealed_first / e.page;
        const int64_t stop = (std::max<int64_t>(0, reads.sealed_stop) + e.page - 1) / e.page;
        for (int64_t t = 0; t < r.queries; t++) {
            int64_t head_count = -1;
            for (int64_t h = 0; h < r.heads; h++) {
                const int64_t *at = r.chosen + ((b * r.heads + h) * r.queries + t) * r.num_chosen;
                int64_t count = 0;
                for (; count < r.num_chosen && at[count] >= 0; count++)
                    if (at[count] < first || at[count] >= stop || (count && at[count] <= at[count - 1]))
                        return "chosen: pages out of range, or not ascending";
                if (head_count >= 0 && head_count != count)
                    return "chosen: different counts for heads of one query";
                head_count = count;
            }
        }
    }
    return nullptr;
}

// Check that the slots of all pages that may be read exist.
const char *check_pages(const kvant_request &r) {
    const kvant_extent &e = *r.extent;
    uint64_t sealed = 0, open = 0;
    bool any_sealed = false, any_open = false;
    const auto pages = [&](int64_t rows) { return (rows + e.page - 1) / e.page; };
    for (int64_t b = 0; b < e.batch; b++) {
        const Reads reads(r, b);
        if (reads.sealed_first < reads.sealed_stop) {
            any_sealed = true;
            sealed = std::max(sealed, last_slot(e.sealed, b, reads.sealed_first / e.page,
                                                pages(reads.sealed_stop)));
        }
        if (reads.open_first < reads.own) {
            any_open = true;
            open = std::max(open, last_slot(e.open, b, reads.open_first / e.page, pages(reads.own)));
        }
        if (reads.sinks_stop > 0) {
            any_open = true;
            open = std::max(open, last_slot(e.open, b, 0, pages(reads.sinks_stop)));
        }
    }
    if (!any_sealed && !any_open) return nullptr;
    if (e.page % BLOCK) return "page: not a multiple of 64 rows";
    const kvant_side &keys = *r.keys, &values = *r.values;
    if (any_sealed && sealed >= (uint64_t)std::min(sealed_slots(keys, r.heads, e.page),
                                                   sealed_slots(values, r.heads, e.page)))
        return "sealed: slots that the codes, scales and biases do not have";
    if (any_open && open >= (uint64_t)std::min(open_slots(keys, r.heads, e.page),
                                               open_slots(values, r.heads, e.page)))
        return "open: slots that the open pages do not have";
    return nullptr;
}

// Check the request's own (new) rows.
const char *check_new_rows(const kvant_request &r) {
    const int64_t batch = r.extent->batch;
    if (r.num_own > MAX_COUNT || r.num_dense > MAX_COUNT || r.queries > MAX_COUNT)
        return "columns: out of range";
    if (!is_inside(r.own_keys, {batch, r.heads, r.num_own, r.keys->dim, r.keys->dtype}))
        return "own_keys: rows beyond their memory";
    if (!is_inside(r.own_values, {batch, r.heads, r.num_own, r.values->dim, r.values->dtype}))
        return "own_values: rows beyond their memory";
    return nullptr;
}

// Check the queries and the outputs of a request for attention.
const char *check_queries(const kvant_request &r) {
    const int64_t heads = times(r.heads, r.group), rows = product({r.extent->batch, heads, r.queries});
    if (!is_dtype(r.q_dtype) || !is_dtype(r.out_dtype)) return "q_dtype: it or out_dtype is unknown";
    if (!is_inside(r.q, {r.extent->batch, heads, r.queries, r.keys->dim, r.q_dtype}))
        return "q: queries beyond their memory";
    const int64_t size = size_of(r.out_dtype);
    if (!holds(r.out, r.out_nbytes, product({rows, r.values->dim, size}), size))
        return "out: too small for the outputs";
    if (r.lse && !holds(r.lse, r.lse_nbytes, times(rows, sizeof(float)), sizeof(float)))
        return "lse: too small for the queries";
    if (r.sink_logits &&
        !holds(r.sink_logits, r.sink_logits_nbytes, times(heads, sizeof(float)), sizeof(float)))
        return "sink_logits: fewer than heads";
    return nullptr;
}

bool are_disjoint(const void *a, int64_t a_nbytes, const void *b, int64_t b_nbytes) {
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return x + (uintptr_t)a_nbytes <= y || y + (uintptr_t)b_nbytes <= x;
}

// Whether memory to write overlaps structs or tables that kernels read after the checks.
bool overlaps_inputs(const void *data, int64_t nbytes, const kvant_request &r) {
    const kvant_extent &e = *r.extent;
    return data && !(are_disjoint(data, nbytes, r.keys, r.keys_nbytes) &&
                     are_disjoint(data, nbytes, r.values, r.values_nbytes) &&
                     are_disjoint(data, nbytes, r.extent, r.extent_nbytes) &&
                     are_disjoint(data, nbytes, e.numbers, e.numbers_nbytes) &&
                     are_disjoint(data, nbytes, e.sealed.data, e.sealed.nbytes) &&
                     are_disjoint(data, nbytes, e.open.data, e.open.nbytes) &&
                     (!r.chosen || are_disjoint(data, nbytes, r.chosen, r.chosen_nbytes)));
}

bool overlaps_inputs(const void *data, int64_t nbytes, const kvant_store_request &r) {
    const kvant_steps &steps = *r.steps;
    bool intact = are_disjoint(data, nbytes, r.steps, r.steps_nbytes) &&
                are_disjoint(data, nbytes, steps.copies, steps.copies_nbytes) &&
                are_disjoint(data, nbytes, steps.writes, steps.writes_nbytes) &&
                are_disjoint(data, nbytes, steps.seals, steps.seals_nbytes);
    for (int64_t i = 0; i < r.sides; i++)
        intact = intact && are_disjoint(data, nbytes, r.side[i].stored, r.side[i].stored_nbytes);
    return data && !intact;
}

bool overlaps_inputs(const kvant_side &side, const kvant_store_request &r) {
    const kvant_pages *const fields[] = {&side.codes, &side.scale, &side.bias};
    return overlaps_inputs(side.open.data, side.open.nbytes, r) ||
           std::any_of(fields, fields + 3, [&](const kvant_pages *field) {
               return overlaps_inputs(field->data, field->nbytes, r);
           });
}

// Check a side that rows are to be stored in.
const char *check(const kvant_store_side &side, const kvant_store_request &r) {
    if (!is_inside(side.stored, side.stored_nbytes)) return "stored: smaller than a side";
    const kvant_side &stored = *side.stored;
    if (const char *refusal = check(stored)) return refusal;
    if (!is_inside(side.rows, {r.batch, r.heads, r.count, stored.dim, stored.dtype}))
        return "rows: beyond their memory";
    if (r.steps->num_seals && stored.format != KVANT_RAW && r.page % 16)
        return "page: not a multiple of 16 rows";
    if (overlaps_inputs(stored, r)) return "stored: overlaps structs or tables of the request";
    return nullptr;
}

bool is_below(int64_t number, int64_t stop) { return number >= 0 && number < stop; }

// Whether [first, first + count) lies inside [0, all).
bool are_within(int64_t first, int64_t count, int64_t all) {
    return first >= 0 && count >= 0 && count <= all && first <= all - count;
}

// Check that all copies, writes and seals stay inside the pages and the new rows.
const char *check_steps(const kvant_store_request &r, int64_t open, int64_t sealed) {
    const kvant_steps &steps = *r.steps;
    for (int64_t i = 0; i < steps.num_copies; i++)
        if (!is_below(steps.copies[2 * i], open) || !is_below(steps.copies[2 * i + 1], open))
            return "copies: slots that the open pages do not have";
    for (int64_t i = 0; i < steps.num_writes; i++) {
        const int64_t *write = steps.writes + WRITE_WIDTH * i;
        if (!is_below(write[WRITE_SEQUENCE], r.batch)) return "writes: sequence out of range";
        if (!is_below(write[WRITE_SLOT], open))
            return "writes: slots that the open pages do not have";
        if (!are_within(write[WRITE_ROW], write[WRITE_ROWS], r.page))
            return "writes: rows beyond a page";
        if (!are_within(write[WRITE_COLUMN], write[WRITE_ROWS], r.count))
            return "writes: columns beyond the new rows";
    }
    for (int64_t i = 0; i < steps.num_seals; i++) {
        const int64_t *seal = steps.seals + SEAL_WIDTH * i;
        if (!is_below(seal[SEAL_SEQUENCE], r.batch)) return "seals: sequence out of range";
        if (!is_below(seal[SEAL_SLOT], sealed))
            return "seals: slots that the codes, scales and biases do not have";
        const int64_t source = seal[SEAL_SOURCE];
        if (source < -1 || source >= open) return "seals: slots that the open pages do not have";
        if (source < 0 && !are_within(seal[SEAL_COLUMN], r.page, r.count))
            return "seals: columns beyond the new rows";
    }
    return nullptr;
}

}  // namespace

const char *check(const kvant_request &r) {
    if (!is_inside(r.keys, r.keys_nbytes)) return "keys: smaller than a side";
    if (!is_inside(r.values, r.values_nbytes)) return "values: smaller than a side";
    if (!is_inside(r.extent, r.extent_nbytes)) return "extent: smaller than the struct";
    if (!none_negative({r.heads, r.queries, r.num_own, r.num_dense, r.window, r.mask_sinks, r.chunk}))
        return "a count: below zero";
    if (r.group < 1 || r.group > MAX_GROUP) return "group: not from 1 to 16";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (const char *refusal = check(*r.keys)) return refusal;
    if (const char *refusal = check(*r.values)) return refusal;
    if (r.keys->format != KVANT_RAW && r.keys->arrangement != KVANT_KEYS)
        return "arrangement: keys not in tiles of keys";
    if (r.values->format != KVANT_RAW && r.values->arrangement != KVANT_VALUES)
        return "arrangement: values not in tiles of values";
    if (const char *refusal = check(*r.extent)) return refusal;
    if (const char *refusal = check_queries(r)) return refusal;
    if (const char *refusal = check_new_rows(r)) return refusal;
    if (const char *refusal = check_pages(r)) return refusal;
    if (r.chosen)
        if (const char *refusal = check_selection(r)) return refusal;
    if (overlaps_inputs(r.out, r.out_nbytes, r) || overlaps_inputs(r.lse, r.lse_nbytes, r))
        return "out: overlaps structs or tables of the request";
    return nullptr;
}

const char *check(const kvant_store_request &r) {
    if (r.sides < 0 || r.sides > 2) return "sides: not from 0 to 2";
    if (!is_inside(r.steps, r.steps_nbytes)) return "steps: smaller than the struct";
    const kvant_steps &steps = *r.steps;
    if (!none_negative({r.batch, r.heads, r.count, steps.num_copies, steps.num_writes,
                        steps.num_seals}))
        return "a count: below zero";
    if (r.page < 1 || r.page > MAX_COUNT) return "page: out of range";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (!holds(steps.copies, steps.copies_nbytes, product({steps.num_copies, 2, 8}), 8))
        return "copies: beyond their memory";
    if (!holds(steps.writes, steps.writes_nbytes, product({steps.num_writes, WRITE_WIDTH, 8}), 8))
        return "writes: beyond their memory";
    if (!holds(steps.seals, steps.seals_nbytes, product({steps.num_seals, SEAL_WIDTH, 8}), 8))
        return "seals: beyond their memory";
    int64_t open = ENDLESS, sealed = ENDLESS;
    for (int64_t i = 0; i < r.sides; i++) {
        if (const char *refusal = check(r.side[i], r)) return refusal;
        open = std::min(open, open_slots(*r.side[i].stored, r.heads, r.page));
        sealed = std::min(sealed, sealed_slots(*r.side[i].stored, r.heads, r.page));
    }
    return check_steps(r, open, sealed);
}

const char *check(const kvant_rotate_request &r) {
    if (!none_negative({r.batch, r.heads, r.count})) return "a count: below zero";
    if (!is_dtype(r.dtype)) return "dtype: unknown";
    if (!is_dim(r.dim)) return "dim: not a multiple of 16 from 16 to 256";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (!holds(r.signs, r.signs_nbytes, times(r.dim, sizeof(float)), sizeof(float)))
        return "signs: fewer than channels";
    if (!is_inside(r.rows, {r.batch, r.heads, r.count, r.dim, r.dtype}))
        return "rows: beyond their memory";
    const int64_t size = size_of(r.dtype);
    if (!holds(r.out, r.out_nbytes, product({r.batch, r.heads, r.count, r.dim, size}), size))
        return "out: too small for the rows";
    return nullptr;
}

const char *check(const kvant_norm_request &r) {
    if (r.count < 0) return "count: below zero";
    if (!is_dtype(r.dtype)) return "dtype: unknown";
    if (r.dim < NORM_UNIT || r.dim > MAX_NORM || r.dim % NORM_UNIT)
        return "dim: not a multiple of 32 from 32 to 32768";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    const int64_t size = size_of(r.dtype), need = product({r.count, r.dim, size});
    if (!holds(r.weight, r.weight_nbytes, r.dim * size, size)) return "weight: fewer than channels";
    if (!holds(r.rows, r.rows_nbytes, need, size)) return "rows: beyond their memory";
    if (!holds(r.out, r.out_nbytes, need, size)) return "out: too small for the rows";
    return nullptr;
}

const char *check(const kvant_choose_request &r) {
    if (!is_inside(r.extent, r.extent_nbytes)) return "extent: smaller than the struct";
    if (!none_negative({r.heads, r.queries, r.num_chosen})) return "a count: below zero";
    if (r.group < 1 || r.group > MAX_GROUP) return "group: not from 1 to 16";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (!is_dtype(r.dtype) || !is_dtype(r.q_dtype)) return "dtype: unknown";
    if (!is_dim(r.dim)) return "dim: not a multiple of 16 from 16 to 256";
    if (const char *refusal = check(*r.extent)) return refusal;
    const kvant_extent &e = *r.extent;
    if (!is_inside(r.q, {e.batch, times(r.heads, r.group), r.queries, r.dim, r.q_dtype}))
        return "q: queries beyond their memory";
    if (!holds(r.ranges, r.ranges_nbytes, product({e.batch, r.queries, KVANT_RANGES, 8}), 8))
        return "ranges: fewer than queries";
    if (!holds(r.chosen, r.chosen_nbytes,
               product({e.batch, r.heads, r.queries, r.num_chosen, 8}), 8))
        return "chosen: too small for the pages";
    const int64_t size = size_of(r.dtype);
    const uint64_t slots = slots_of(r.bounds, r.heads, 2 * r.dim * size, size);
    for (int64_t b = 0; b < e.batch; b++)
        for (int64_t t = 0; t < r.queries; t++) {
            const int64_t *n = r.ranges + (b * r.queries + t) * KVANT_RANGES;
            const int64_t low = n[KVANT_LOW], first = n[KVANT_FIRST], stop = n[KVANT_STOP];
            const int64_t high = n[KVANT_HIGH], count = n[KVANT_COUNT];
            if (low < 0 || low > first || first > stop || stop > high || high > MAX_COUNT)
                return "ranges: not in order";
            if (count < 0 || count > stop - first) return "ranges: count beyond the candidates";
            if (first - low + high - stop + count > r.num_chosen)
                return "ranges: more pages than num_chosen";
            if (first < stop && last_slot(e.sealed, b, first, stop) >= slots)
                return "bounds: fewer than slots";
        }
    const bool intact = are_disjoint(r.chosen, r.chosen_nbytes, r.extent, r.extent_nbytes) &&
                      are_disjoint(r.chosen, r.chosen_nbytes, r.ranges, r.ranges_nbytes) &&
                      are_disjoint(r.chosen, r.chosen_nbytes, e.numbers, e.numbers_nbytes) &&
                      are_disjoint(r.chosen, r.chosen_nbytes, e.sealed.data, e.sealed.nbytes);
    return r.chosen && !intact ? "chosen: overlaps structs or tables of the request" : nullptr;
}

const char *check(const kvant_multiply_request &r) {
    if (r.count < 0 || r.count > MAX_COUNT) return "count: out of range";
    if (!is_inside(r.weight, r.weight_nbytes)) return "weight: not a whole struct";
    if (const char *reason = check(*r.weight)) return reason;
    if (!is_dtype(r.dtype) || (r.bias && !is_dtype(r.bias_dtype))) return "dtype: unknown";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    const kvant_weight &w = *r.weight;
    const int64_t size = size_of(r.dtype), bias_size = size_of(r.bias_dtype);
    if (r.bias && !holds(r.bias, r.bias_nbytes, times(w.outs, bias_size), bias_size))
        return "bias: fewer than outputs";
    if (!holds(r.rows, r.rows_nbytes, product({r.count, w.width, size}), size))
        return "rows: beyond their memory";
    if (!holds(r.out, r.out_nbytes, product({r.count, w.outs, size}), size))
        return "out: too small for the products";
    return are_disjoint(r.out, r.out_nbytes, r.weight, r.weight_nbytes)
               ? nullptr
               : "out: overlaps structs of the request";
}

const char *check(const kvant_map_request &r) {
    const kvant_four &n = r.shape;
    const int64_t size = size_of(r.dtype);
    if (!none_negative({n.first, n.second, n.third, n.last})) return "shape: below zero";
    if (product({n.first, n.second, n.third, n.last}) > MAX_COUNT)
        return "shape: out of range";
    if (r.operation < KVANT_MAP_COPY || r.operation > KVANT_MAP_LOOK_UP)
        return "operation: unknown";
    if (!is_dtype(r.dtype)) return "dtype: unknown";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (!is_inside(r.a, n, size)) return "a: beyond its memory";
    if (r.operation == KVANT_MAP_LOOK_UP) {
        if (size != 2) return "dtype: only 16-bit values are looked up";
        if (!holds(r.b.data, r.b.nbytes, TABLE * size, size)) return "b: fewer than 65,536 results";
    }
    const bool two = r.operation == KVANT_MAP_ADD || r.operation == KVANT_MAP_MULTIPLY;
    if (two && !is_inside(r.b, n, size)) return "b: beyond its memory";
    const kvant_four &by = r.out.stride;
    if ((n.first > 1 && !by.first) || (n.second > 1 && !by.second) ||
        (n.third > 1 && !by.third) || (n.last > 1 && !by.last))
        return "out: overlapping elements";
    return is_inside(r.out, n, size) ? nullptr : "out: too small for the elements";
}

const char *check(const kvant_run_request &r) {
    if (r.num_steps < 0) return "num_steps: below zero";
    const int64_t need = times(r.num_steps, sizeof(kvant_step));
    return holds(r.steps, r.steps_nbytes, need, 8) ? nullptr : "steps: beyond their memory";
}

bool is_empty(const kvant_request &r) { return !r.extent->batch || !r.heads || !r.queries; }
bool is_empty(const kvant_store_request &r) { return !r.sides || !r.batch || !r.heads; }
bool is_empty(const kvant_rotate_request &r) { return !r.batch || !r.heads || !r.count; }
bool is_empty(const kvant_norm_request &r) { return !r.count; }
bool is_empty(const kvant_choose_request &r) {
    return !r.extent->batch || !r.heads || !r.queries || !r.num_chosen;
}
bool is_empty(const kvant_multiply_request &r) { return !r.count || !r.weight->outs; }
bool is_empty(const kvant_map_request &r) {
    return !r.shape.first || !r.shape.second || !r.shape.third || !r.shape.last;
}

}  // namespace kvant
