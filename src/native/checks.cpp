#include "checks.hpp"

#include <algorithm>

#include "limits.hpp"
#include "reach.hpp"
#include "reads.hpp"

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

// Are numbers of this shape there?
bool there(const kvant_numbers &x, const kvant_four &n, int64_t size) {
    const kvant_four &by = x.stride;
    const int64_t need = reach({{n.first, by.first}, {n.second, by.second}, {n.third, by.third},
                                {n.last, by.last}}, size);
    return need == 0 || (are_strides({by.first, by.second, by.third, by.last}, size) &&
                         holds(x.data, x.nbytes, need, size));
}

// Is one struct there?
template <class Struct> bool there(const Struct *data, int64_t nbytes) {
    return holds(data, nbytes, sizeof(Struct), alignof(Struct));
}

// How many of the pages, `slot` bytes apart and each of `need` bytes, fit into so many bytes.
int64_t slots_in(int64_t nbytes, int64_t need, int64_t slot) {
    return slot > 0 ? std::max<int64_t>(0, nbytes - need) / slot + 1 : 1;
}

int64_t slots_of(const kvant_pages &pages, int64_t heads, int64_t page, int64_t unit) {
    const int64_t need = reach({{heads, pages.head}}, page);
    if (!holds(pages.data, pages.nbytes, need, unit)) return 0;
    if (!are_strides({pages.slot, pages.head}, unit)) return 0;
    return slots_in(pages.nbytes, need, pages.slot);
}

// The slots that all fields of a side have.
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

// What is wrong with a side as such.
const char *refused(const kvant_side &side) {
    if (!is_dtype(side.dtype)) return "dtype: rows of no type that is known";
    if (!is_dim(side.dim)) return "dim: not a multiple of 16 from 16 to 256";
    if (side.format != KVANT_RAW && !is_format(side.format, side.bits, side.group, side.dim))
        return "format: no codes of such bits and groups in rows so wide";
    if (side.format != KVANT_AFFINE && side.bias.data)
        return "bias: only affine codes have one";
    if (side.arrangement < KVANT_ROWS || side.arrangement > KVANT_VALUES)
        return "arrangement: none that is known";
    if (side.format != KVANT_CODEBOOK) return nullptr;
    const int64_t size = sizeof(float), levels = size << side.bits;
    if (!holds(side.levels, side.levels_nbytes, levels, size))
        return "levels: fewer than the codes tell apart";
    if (!holds(side.boundaries, side.boundaries_nbytes, levels - size, size))
        return "boundaries: fewer than there are between the levels";
    return nullptr;
}

// The largest entry of a table over some pages; of those that there are not, more than any slot.
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

const char *refused(const kvant_extent &e) {
    if (!none_negative({e.batch, e.dense_until, e.sinks}) || e.tail < -1) return "a count: below zero";
    if (e.page < 1 || e.page > MOST || e.sinks > MOST)
        return "page: pages of no rows, or more of them than can be counted";
    if (!holds(e.numbers, e.numbers_nbytes, product({e.batch, KVANT_NUMBERS, 8}), 8))
        return "numbers: fewer than sequences";
    if (!is_table(e.sealed, e.batch)) return "sealed: entries that are not there";
    if (!is_table(e.open, e.batch)) return "open: entries that are not there";
    for (int64_t b = 0; b < e.batch; b++) {
        const int64_t *n = e.numbers + b * KVANT_NUMBERS;
        if (n[KVANT_LENGTH] < -MOST || n[KVANT_LENGTH] > MOST || n[KVANT_BEGINS] > MOST ||
            !none_negative({n[KVANT_FIRST_SEALED], n[KVANT_STOP_SEALED], n[KVANT_FIRST_OPEN],
                            n[KVANT_BEGINS]}))
            return "numbers: positions that cannot be counted";
        for (int at : {KVANT_FIRST_SEALED, KVANT_STOP_SEALED, KVANT_FIRST_OPEN})
            if (times(n[at], e.page) > MOST) return "numbers: pages that cannot be counted";
    }
    return nullptr;
}

// Are the pages that were chosen among those that there are, and as many for each head?
const char *refused_choice(const kvant_request &r) {
    const kvant_extent &e = *r.extent;
    if (r.num_chosen < 0) return "chosen: a count below zero";
    if (!holds(r.chosen, r.chosen_nbytes,
               product({e.batch, r.heads, r.queries, r.num_chosen, 8}), 8))
        return "chosen: fewer than there are";
    for (int64_t b = 0; b < e.batch; b++) {
        const Reads there(r, b);
        const int64_t first = there.sealed_first / e.page;
        const int64_t stop = (std::max<int64_t>(0, there.sealed_stop) + e.page - 1) / e.page;
        for (int64_t t = 0; t < r.queries; t++) {
            int64_t many = -1;
            for (int64_t h = 0; h < r.heads; h++) {
                const int64_t *at = r.chosen + ((b * r.heads + h) * r.queries + t) * r.num_chosen;
                int64_t count = 0;
                for (; count < r.num_chosen && at[count] >= 0; count++)
                    if (at[count] < first || at[count] >= stop || (count && at[count] <= at[count - 1]))
                        return "chosen: pages that are not there, or out of order";
                if (many >= 0 && many != count) return "chosen: more for one head than another";
                many = count;
            }
        }
    }
    return nullptr;
}

// Do the tables name slots that there are, for all pages that may be read?
const char *refused_pages(const kvant_request &r) {
    const kvant_extent &e = *r.extent;
    uint64_t sealed = 0, open = 0;
    bool any_sealed = false, any_open = false;
    const auto pages = [&](int64_t rows) { return (rows + e.page - 1) / e.page; };
    for (int64_t b = 0; b < e.batch; b++) {
        const Reads there(r, b);
        if (there.sealed_first < there.sealed_stop) {
            any_sealed = true;
            sealed = std::max(sealed, last_slot(e.sealed, b, there.sealed_first / e.page,
                                                pages(there.sealed_stop)));
        }
        if (there.open_first < there.own) {
            any_open = true;
            open = std::max(open, last_slot(e.open, b, there.open_first / e.page, pages(there.own)));
        }
        if (there.sinks_stop > 0) {
            any_open = true;
            open = std::max(open, last_slot(e.open, b, 0, pages(there.sinks_stop)));
        }
    }
    if (!any_sealed && !any_open) return nullptr;
    if (e.page % BLOCK) return "page: pages of no multiple of 64 rows";
    const kvant_side &keys = *r.keys, &values = *r.values;
    if (any_sealed && sealed >= (uint64_t)std::min(sealed_slots(keys, r.heads, e.page),
                                                   sealed_slots(values, r.heads, e.page)))
        return "sealed: slots that the codes, scales and biases do not have";
    if (any_open && open >= (uint64_t)std::min(open_slots(keys, r.heads, e.page),
                                               open_slots(values, r.heads, e.page)))
        return "open: slots that the open pages do not have";
    return nullptr;
}

// The rows that came with the request.
const char *refused_own(const kvant_request &r) {
    const int64_t batch = r.extent->batch;
    if (r.num_own > MOST || r.num_dense > MOST || r.queries > MOST)
        return "columns: more than can be counted";
    if (!there(r.own_keys, {batch, r.heads, r.num_own, r.keys->dim, r.keys->dtype}))
        return "own_keys: rows that are not there";
    if (!there(r.own_values, {batch, r.heads, r.num_own, r.values->dim, r.values->dtype}))
        return "own_values: rows that are not there";
    return nullptr;
}

// What comes in with a request for attention, and what is to leave.
const char *refused_queries(const kvant_request &r) {
    const int64_t heads = times(r.heads, r.group), rows = product({r.extent->batch, heads, r.queries});
    if (!is_dtype(r.q_dtype) || !is_dtype(r.out_dtype)) return "q_dtype: no type that is known";
    if (!there(r.q, {r.extent->batch, heads, r.queries, r.keys->dim, r.q_dtype}))
        return "q: queries that are not there";
    const int64_t size = size_of(r.out_dtype);
    if (!holds(r.out, r.out_nbytes, product({rows, r.values->dim, size}), size))
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

// Kernels go by these while others write: they must stay what was checked.
bool overwritten(const void *data, int64_t nbytes, const kvant_request &r) {
    const kvant_extent &e = *r.extent;
    return data && !(apart(data, nbytes, r.keys, r.keys_nbytes) &&
                     apart(data, nbytes, r.values, r.values_nbytes) &&
                     apart(data, nbytes, r.extent, r.extent_nbytes) &&
                     apart(data, nbytes, e.numbers, e.numbers_nbytes) &&
                     apart(data, nbytes, e.sealed.data, e.sealed.nbytes) &&
                     apart(data, nbytes, e.open.data, e.open.nbytes) &&
                     (!r.chosen || apart(data, nbytes, r.chosen, r.chosen_nbytes)));
}

bool overwritten(const void *data, int64_t nbytes, const kvant_store_request &r) {
    const kvant_steps &steps = *r.steps;
    bool kept = apart(data, nbytes, r.steps, r.steps_nbytes) &&
                apart(data, nbytes, steps.copies, steps.copies_nbytes) &&
                apart(data, nbytes, steps.writes, steps.writes_nbytes) &&
                apart(data, nbytes, steps.seals, steps.seals_nbytes);
    for (int64_t i = 0; i < r.sides; i++)
        kept = kept && apart(data, nbytes, r.side[i].stored, r.side[i].stored_nbytes);
    return data && !kept;
}

bool overwritten(const kvant_side &side, const kvant_store_request &r) {
    const kvant_pages *const fields[] = {&side.codes, &side.scale, &side.bias};
    return overwritten(side.open.data, side.open.nbytes, r) ||
           std::any_of(fields, fields + 3, [&](const kvant_pages *field) {
               return overwritten(field->data, field->nbytes, r);
           });
}

// What is wrong with a side that rows are to be stored in.
const char *refused(const kvant_store_side &side, const kvant_store_request &r) {
    if (!there(side.stored, side.stored_nbytes)) return "stored: less than a side";
    const kvant_side &own = *side.stored;
    if (const char *why = refused(own)) return why;
    if (!there(side.rows, {r.batch, r.heads, r.count, own.dim, own.dtype}))
        return "rows: more than there are";
    if (r.steps->num_seals && own.format != KVANT_RAW && r.page % 16)
        return "page: no multiple of 16 rows";
    if (overwritten(own, r)) return "stored: memory that says where rows go";
    return nullptr;
}

bool is_below(int64_t number, int64_t stop) { return number >= 0 && number < stop; }

// Rows [first, first + count) of so many.
bool are_within(int64_t first, int64_t count, int64_t all) {
    return first >= 0 && count >= 0 && count <= all && first <= all - count;
}

// Do all that is to be done begin and end where there is something?
const char *refused_steps(const kvant_store_request &r, int64_t open, int64_t sealed) {
    const kvant_steps &steps = *r.steps;
    for (int64_t i = 0; i < steps.num_copies; i++)
        if (!is_below(steps.copies[2 * i], open) || !is_below(steps.copies[2 * i + 1], open))
            return "copies: slots that the open pages do not have";
    for (int64_t i = 0; i < steps.num_writes; i++) {
        const int64_t *to = steps.writes + 5 * i;
        if (!is_below(to[0], r.batch)) return "writes: no sequence";
        if (!is_below(to[1], open)) return "writes: slots that the open pages do not have";
        if (!are_within(to[2], to[3], r.page)) return "writes: rows beyond a page";
        if (!are_within(to[4], to[3], r.count)) return "writes: more than came";
    }
    for (int64_t i = 0; i < steps.num_seals; i++) {
        const int64_t *to = steps.seals + 4 * i;
        if (!is_below(to[0], r.batch)) return "seals: no sequence";
        if (!is_below(to[1], sealed))
            return "seals: slots that the codes, scales and biases do not have";
        if (to[2] < -1 || to[2] >= open) return "seals: slots that the open pages do not have";
        if (to[2] < 0 && !are_within(to[3], r.page, r.count)) return "seals: more than came";
    }
    return nullptr;
}

}  // namespace

const char *refused(const kvant_request &r) {
    if (!there(r.keys, r.keys_nbytes)) return "keys: less than a side";
    if (!there(r.values, r.values_nbytes)) return "values: less than a side";
    if (!there(r.extent, r.extent_nbytes)) return "extent: less than one";
    if (!none_negative({r.heads, r.queries, r.num_own, r.num_dense, r.window, r.mask_sinks, r.chunk}))
        return "a count: below zero";
    if (r.group < 1 || r.group > MAX_GROUP) return "group: not from 1 to 16";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (const char *why = refused(*r.keys)) return why;
    if (const char *why = refused(*r.values)) return why;
    if (r.keys->format != KVANT_RAW && r.keys->arrangement != KVANT_KEYS)
        return "arrangement: codes of keys that lie otherwise";
    if (r.values->format != KVANT_RAW && r.values->arrangement != KVANT_VALUES)
        return "arrangement: codes of values that lie otherwise";
    if (const char *why = refused(*r.extent)) return why;
    if (const char *why = refused_queries(r)) return why;
    if (const char *why = refused_own(r)) return why;
    if (const char *why = refused_pages(r)) return why;
    if (r.chosen)
        if (const char *why = refused_choice(r)) return why;
    if (overwritten(r.out, r.out_nbytes, r) || overwritten(r.lse, r.lse_nbytes, r))
        return "out: memory that says where rows lie";
    return nullptr;
}

const char *refused(const kvant_store_request &r) {
    if (r.sides < 0 || r.sides > 2) return "sides: not from 0 to 2";
    if (!there(r.steps, r.steps_nbytes)) return "steps: less than they are";
    const kvant_steps &steps = *r.steps;
    if (!none_negative({r.batch, r.heads, r.count, steps.num_copies, steps.num_writes,
                        steps.num_seals}))
        return "a count: below zero";
    if (r.page < 1 || r.page > MOST) return "page: no rows, or more than can be counted";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (!holds(steps.copies, steps.copies_nbytes, product({steps.num_copies, 2, 8}), 8))
        return "copies: fewer than there are";
    if (!holds(steps.writes, steps.writes_nbytes, product({steps.num_writes, 5, 8}), 8))
        return "writes: fewer than there are";
    if (!holds(steps.seals, steps.seals_nbytes, product({steps.num_seals, 4, 8}), 8))
        return "seals: fewer than there are";
    int64_t open = ENDLESS, sealed = ENDLESS;
    for (int64_t i = 0; i < r.sides; i++) {
        if (const char *why = refused(r.side[i], r)) return why;
        open = std::min(open, open_slots(*r.side[i].stored, r.heads, r.page));
        sealed = std::min(sealed, sealed_slots(*r.side[i].stored, r.heads, r.page));
    }
    return refused_steps(r, open, sealed);
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

const char *refused(const kvant_norm_request &r) {
    if (r.count < 0) return "count: below zero";
    if (!is_dtype(r.dtype)) return "dtype: rows of no type that is known";
    if (r.dim < NORM_UNIT || r.dim > MAX_NORM || r.dim % NORM_UNIT)
        return "dim: not a multiple of 32 from 32 to 32768";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    const int64_t size = size_of(r.dtype), need = product({r.count, r.dim, size});
    if (!holds(r.weight, r.weight_nbytes, r.dim * size, size)) return "weight: fewer than channels";
    if (!holds(r.rows, r.rows_nbytes, need, size)) return "rows: more than there are";
    if (!holds(r.out, r.out_nbytes, need, size)) return "out: less room than the rows take";
    return nullptr;
}

const char *refused(const kvant_choose_request &r) {
    if (!there(r.extent, r.extent_nbytes)) return "extent: less than one";
    if (!none_negative({r.heads, r.queries, r.num_chosen})) return "a count: below zero";
    if (r.group < 1 || r.group > MAX_GROUP) return "group: not from 1 to 16";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (!is_dtype(r.dtype) || !is_dtype(r.q_dtype)) return "dtype: rows of no type that is known";
    if (!is_dim(r.dim)) return "dim: not a multiple of 16 from 16 to 256";
    if (const char *why = refused(*r.extent)) return why;
    const kvant_extent &e = *r.extent;
    if (!there(r.q, {e.batch, times(r.heads, r.group), r.queries, r.dim, r.q_dtype}))
        return "q: more queries than there are";
    if (!holds(r.ranges, r.ranges_nbytes, product({e.batch, r.queries, KVANT_RANGES, 8}), 8))
        return "ranges: fewer than queries";
    if (!holds(r.chosen, r.chosen_nbytes,
               product({e.batch, r.heads, r.queries, r.num_chosen, 8}), 8))
        return "chosen: less room than there are";
    const int64_t size = size_of(r.dtype);
    const uint64_t slots = slots_of(r.bounds, r.heads, 2 * r.dim * size, size);
    for (int64_t b = 0; b < e.batch; b++)
        for (int64_t t = 0; t < r.queries; t++) {
            const int64_t *n = r.ranges + (b * r.queries + t) * KVANT_RANGES;
            const int64_t low = n[KVANT_LOW], first = n[KVANT_FIRST], stop = n[KVANT_STOP];
            const int64_t high = n[KVANT_HIGH], count = n[KVANT_COUNT];
            if (low < 0 || low > first || first > stop || stop > high || high > MOST)
                return "ranges: not in order";
            if (count < 0 || count > stop - first) return "ranges: more chosen than there are";
            if (first - low + high - stop + count > r.num_chosen)
                return "ranges: more chosen than there is room for";
            if (first < stop && last_slot(e.sealed, b, first, stop) >= slots)
                return "bounds: fewer than slots";
        }
    const bool kept = apart(r.chosen, r.chosen_nbytes, r.extent, r.extent_nbytes) &&
                      apart(r.chosen, r.chosen_nbytes, r.ranges, r.ranges_nbytes) &&
                      apart(r.chosen, r.chosen_nbytes, e.numbers, e.numbers_nbytes) &&
                      apart(r.chosen, r.chosen_nbytes, e.sealed.data, e.sealed.nbytes);
    return r.chosen && !kept ? "chosen: memory that says where pages lie" : nullptr;
}

const char *refused(const kvant_multiply_request &r) {
    if (!none_negative({r.count, r.outs})) return "a count: below zero";
    if (r.width < PACKED_WIDTH || r.width > MOST || r.width % PACKED_WIDTH)
        return "width: not a multiple of 16 from 16 on";
    if (r.part < 2 || r.part > MOST || r.part % 2) return "part: not a multiple of 2 from 2 on";
    if (r.outs > MOST) return "outs: more than there can be";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    const int64_t packed = (r.outs + PACKED_OUTS - 1) / PACKED_OUTS * PACKED_OUTS;
    if (!holds(r.weight, r.weight_nbytes, product({packed, r.width, 2}), 2))
        return "weight: fewer than outputs";
    if (r.bias && !holds(r.bias, r.bias_nbytes, times(r.outs, 2), 2))
        return "bias: fewer than outputs";
    if (!holds(r.rows, r.rows_nbytes, product({r.count, r.width, 2}), 2))
        return "rows: more than there are";
    if (!holds(r.out, r.out_nbytes, product({r.count, r.outs, 2}), 2))
        return "out: less room than the products take";
    return nullptr;
}

const char *refused(const kvant_map_request &r) {
    const kvant_four &n = r.shape;
    const int64_t size = size_of(r.dtype);
    if (!none_negative({n.first, n.second, n.third, n.last})) return "shape: below zero";
    if (product({n.first, n.second, n.third, n.last}) > MOST)
        return "shape: more than there can be";
    if (r.operation < KVANT_MAP_COPY || r.operation > KVANT_MAP_LOOK_UP)
        return "operation: none that is known";
    if (!is_dtype(r.dtype)) return "dtype: numbers of no type that is known";
    if (!is_number_of_threads(r.threads)) return "threads: not from 1 to 4096";
    if (!there(r.a, n, size)) return "a: more than there are";
    if (r.operation == KVANT_MAP_LOOK_UP) {
        if (size != 2) return "dtype: numbers of 16 bits are looked up";
        if (!holds(r.b.data, r.b.nbytes, TABLE * size, size)) return "b: fewer than results";
    }
    const bool two = r.operation == KVANT_MAP_ADD || r.operation == KVANT_MAP_MULTIPLY;
    if (two && !there(r.b, n, size)) return "b: more than there are";
    const kvant_four &by = r.out.stride;
    if ((n.first > 1 && !by.first) || (n.second > 1 && !by.second) ||
        (n.third > 1 && !by.third) || (n.last > 1 && !by.last))
        return "out: numbers at one place";
    return there(r.out, n, size) ? nullptr : "out: less room than there are numbers";
}

const char *refused(const kvant_run_request &r) {
    if (r.num_steps < 0) return "num_steps: below zero";
    const int64_t need = times(r.num_steps, sizeof(kvant_step));
    return holds(r.steps, r.steps_nbytes, need, 8) ? nullptr : "steps: fewer than there are";
}

bool is_empty(const kvant_request &r) { return !r.extent->batch || !r.heads || !r.queries; }
bool is_empty(const kvant_store_request &r) { return !r.sides || !r.batch || !r.heads; }
bool is_empty(const kvant_rotate_request &r) { return !r.batch || !r.heads || !r.count; }
bool is_empty(const kvant_norm_request &r) { return !r.count; }
bool is_empty(const kvant_choose_request &r) {
    return !r.extent->batch || !r.heads || !r.queries || !r.num_chosen;
}
bool is_empty(const kvant_multiply_request &r) { return !r.count || !r.outs; }
bool is_empty(const kvant_map_request &r) {
    return !r.shape.first || !r.shape.second || !r.shape.third || !r.shape.last;
}

}  // namespace kvant
