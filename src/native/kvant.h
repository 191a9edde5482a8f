/* The C interface of kvant's CPU kernels: plain structs of pointers and integers, no Python.
 *
 * Each call takes one request: compute attention over pages, store rows, rotate rows, normalize
 * rows, select pages, multiply rows by a weight, or map elements; or run a list of such requests.
 * Structs that many calls share (a side of a layer's storage, the page table of its sequences) are
 * built once and pointed to. The caller keeps all memory alive and unchanged during the call. The
 * library has no state between calls except its threads. Concurrent calls are allowed.
 *
 * Each pointer is followed by `nbytes`, the size of the memory from it on; nothing else is
 * accessed. All counts, strides, tables and enumerations of a request are checked before anything
 * is written (checks.hpp). Functions return null, or the reason of a refusal; then nothing was
 * written. The caller must ensure that `nbytes` are true, and that outputs do not overlap inputs.
 *
 * Strides are in bytes unless noted, from 0 to 2^40. Numbers are aligned to their size. Any count
 * may be zero: then the call does nothing.
 */
#ifndef KVANT_H
#define KVANT_H

#include <stdint.h>

#define KVANT_ABI 18

#ifdef _WIN32
#define KVANT_EXPORT __declspec(dllexport)
#else
#define KVANT_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum kvant_format { KVANT_RAW = 0, KVANT_AFFINE = 1, KVANT_CODEBOOK = 2, KVANT_FP8 = 3 };
enum kvant_dtype { KVANT_F32 = 0, KVANT_BF16 = 1, KVANT_F16 = 2 };

/* Dense rows [batch, head, row, dim], the last dimension contiguous. */
typedef struct {
    const void *data;
    int64_t nbytes;
    int64_t batch, head, row;
} kvant_rows;

/* Open pages of dense rows [slot, head, row, dim], the last dimension contiguous. */
typedef struct {
    void *data;
    int64_t nbytes;
    int64_t slot, head, row;
} kvant_open;

/* One field of the sealed pages: [slot, head, bytes]. */
typedef struct {
    void *data;
    int64_t nbytes;
    int64_t slot, head;
} kvant_pages;

enum kvant_arrangement { KVANT_ROWS = 0, KVANT_KEYS = 1, KVANT_VALUES = 2 };

/* The storage of the keys or the values of a layer; constant until the storage grows.
 *
 *   format     bits                group                  fields
 *   raw        of the dtype        -                      codes: the rows
 *   affine     2, 3, 4, 5, 6, 8    16, 32, 64, 128        codes, scale, bias
 *   codebook   2, 3, 4             the row                codes, scale, levels, boundaries
 *   fp8        8                   the row                codes, scale
 *
 * Rows of 3 or 5 bits have a multiple of 32 channels. Arranged as KVANT_ROWS, a field has one row
 * after another. As KVANT_KEYS or KVANT_VALUES it is arranged in tiles:
 *
 *   codes of keys     [page / 16][bytes of a row / 4][16 rows][4]
 *   codes of values   [page / 4][bytes of a row][4 rows]
 *   scale and bias    [page / 16][groups][16 rows], 16-bit floats
 *   raw rows          [page][dim], in any arrangement */
typedef struct {
    int64_t format, bits, group, dtype, dim; /* dim: a multiple of 16, at most 256 */
    int64_t corrected, arrangement;          /* corrected: affine and codebook only */
    kvant_open open;
    kvant_pages codes, scale, bias;
    const float *levels; /* [1 << bits] */
    int64_t levels_nbytes;
    const float *boundaries; /* [(1 << bits) - 1] */
    int64_t boundaries_nbytes;
} kvant_side;

/* The slots of the pages of each sequence, [batch, width], by page number. Entries of unreadable
 * pages are undefined. */
typedef struct {
    const int64_t *data;
    int64_t nbytes;
    int64_t stride, width; /* stride: in elements */
} kvant_table;

/* The numbers of a sequence:
 *
 *   0 LENGTH         positions so far; negative: columns of padding to come
 *   1 PADDING        columns of padding (not read)
 *   2 FIRST_SEALED   sealed pages are [FIRST_SEALED, STOP_SEALED)
 *   3 STOP_SEALED
 *   4 FIRST_OPEN     open pages are from here to the page of the last position
 *   5 BEGINS         the first position that has a row, except sinks
 *   6 PRUNED         the length at which rows were pruned (not read) */
enum kvant_number {
    KVANT_LENGTH, KVANT_PADDING, KVANT_FIRST_SEALED, KVANT_STOP_SEALED, KVANT_FIRST_OPEN,
    KVANT_BEGINS, KVANT_PRUNED, KVANT_NUMBERS
};

/* The page table of sequences, shared by many layers. A query reads a page sealed once `tail` rows
 * follow it (-1: never), but no page sealed before it is the `dense_until`th row. It reads
 * positions below `sinks` from open pages only. Pages that are read have a multiple of 64 rows. */
typedef struct {
    int64_t batch, page, tail, dense_until, sinks;
    const int64_t *numbers; /* [batch, KVANT_NUMBERS] */
    int64_t numbers_nbytes;
    kvant_table sealed, open;
} kvant_extent;

/* Attention of the last `queries` columns: query t is at position length - queries + t; negative:
 * padding. Each key head has `group` query heads, at most 16. */
typedef struct {
    const kvant_side *keys;
    int64_t keys_nbytes;
    const kvant_side *values;
    int64_t values_nbytes;
    const kvant_extent *extent;
    int64_t extent_nbytes;
    int64_t heads, group, queries;
    /* The new rows of the forward, if they are not read from pages: the last `num_own` columns. All
     * queries read the newest `num_dense` columns dense, even if their pages are due. */
    kvant_rows own_keys, own_values;
    int64_t num_own, num_dense;
    int64_t causal, window, mask_sinks, chunk; /* window, chunk: 0 is none */
    double scale, softcap;                     /* softcap: 0 is none */
    const float *sink_logits;                  /* [heads * group], or null */
    int64_t sink_logits_nbytes;
    kvant_rows q;
    int64_t q_dtype;
    void *out; /* [batch, heads * group, queries, dim of values] */
    int64_t out_nbytes;
    int64_t out_dtype;
    float *lse; /* [batch, heads * group, queries], or null */
    int64_t lse_nbytes;
    /* The sealed pages to read: numbers [batch, heads, queries, num_chosen], ascending, then -1; the
     * same count for each head. Null: read all. */
    const int64_t *chosen;
    int64_t chosen_nbytes, num_chosen;
    int64_t threads; /* 1 to 4096 */
} kvant_request;

typedef struct {
    const kvant_side *stored;
    int64_t stored_nbytes;
    kvant_rows rows; /* [batch, head, column, dim]: the new rows */
} kvant_store_side;

/* The append plan of a forward, shared by many layers. Open pages are copied first, then new rows
 * are written to open pages, then pages are sealed: from an open page, or from the new rows. */
typedef struct {
    const int64_t *copies; /* [num_copies, 2]: open slots, source and target */
    int64_t copies_nbytes, num_copies;
    const int64_t *writes; /* [num_writes, 5]: sequence, open slot, row, rows, column */
    int64_t writes_nbytes, num_writes;
    const int64_t *seals; /* [num_seals, 4]: sequence, slot, open slot or -1, first column if -1 */
    int64_t seals_nbytes, num_seals;
} kvant_steps;

/* Store new rows of `count` columns, of one side or of keys and values together. Pages to seal have
 * a multiple of 16 rows, unless they are raw. */
typedef struct {
    int64_t sides, batch, heads, page, count;
    const kvant_steps *steps;
    int64_t steps_nbytes;
    int64_t threads;
    kvant_store_side side[2];
} kvant_store_request;

/* Rotate rows by a Hadamard transform in blocks of powers of two, the largest first; computed in
 * single precision and rounded once. */
typedef struct {
    kvant_rows rows;
    int64_t dtype, batch, heads, count, dim;
    const float *signs; /* [dim]: +-1 / sqrt(channels of the block) */
    int64_t signs_nbytes;
    int64_t last; /* multiply by the signs after the transform, not before it */
    void *out;    /* [batch, heads, count, dim], contiguous */
    int64_t out_nbytes;
    int64_t threads;
} kvant_rotate_request;

/* RMSNorm of rows: x / sqrt(mean(x^2) + eps) * weight, in single precision, rounded to the dtype
 * before the product with the weight and after it. */
typedef struct {
    const void *rows; /* [count, dim], contiguous */
    int64_t rows_nbytes;
    const void *weight; /* [dim] */
    int64_t weight_nbytes;
    int64_t dtype, count, dim; /* dim: a multiple of 32, at most 32,768 */
    double eps;
    void *out; /* [count, dim], contiguous */
    int64_t out_nbytes;
    int64_t threads;
} kvant_norm_request;

/* The pages of a query: all of [low, high) are read, except that of [first, stop) only the best
 * `count` are. */
enum kvant_range { KVANT_LOW, KVANT_FIRST, KVANT_STOP, KVANT_HIGH, KVANT_COUNT, KVANT_RANGES };

/* Select the sealed pages that the last `queries` columns read: those with the largest upper bound
 * on scores, summed over the query heads of a key head. */
typedef struct {
    const kvant_extent *extent;
    int64_t extent_nbytes;
    int64_t heads, group, queries, dim;
    kvant_rows q;
    int64_t q_dtype;
    kvant_pages bounds; /* [slot, head, 2, dim] of keys: upper, then lower */
    int64_t dtype;
    const int64_t *ranges; /* [batch, queries, KVANT_RANGES] */
    int64_t ranges_nbytes;
    int64_t *chosen; /* as in kvant_request */
    int64_t chosen_nbytes, num_chosen;
    int64_t threads;
} kvant_choose_request;

/* The weight of a linear layer.
 *
 *   format   bits             group             codes
 *   raw      16               -                 the weight [outs, width], contiguous
 *   affine   2 to 6, 8        16, 32, 64, 128   [block][part], arranged as KVANT_KEYS
 *
 * A block has 64 outputs, and a part of it `part` columns: a page of 64 rows of `part` channels. The
 * last block is filled up with any values. Scale and bias are in the same order. Without a
 * bias, the code c stands for (c - 2^(bits - 1)) * scale. */
typedef struct {
    int64_t format, bits, group, dtype; /* dtype: bfloat16 or float16, of a raw weight */
    int64_t outs, width, part; /* coded: part is a multiple of 32 and of group, at most 256, and
                                  divides width; raw: width is a multiple of 32 */
    const void *codes;
    int64_t codes_nbytes;
    const void *scale; /* float16, as the bias */
    int64_t scale_nbytes;
    const void *bias; /* or null */
    int64_t bias_nbytes;
} kvant_weight;

/* Multiply rows by the transposed weight of a linear layer and add a bias: summed in single
 * precision, rounded once to the dtype of the rows. Rows are multiplied by codes as fixed-point
 * numbers of 15 bits; with AVX-512, if more than 32 rows are given, by decoded codes, which are
 * rounded to bfloat16 for rows of bfloat16. A row has the same result with any other rows, if at most
 * 32 are given. The outputs of a row that is not finite are undefined. */
typedef struct {
    const void *rows; /* [count, width], contiguous */
    int64_t rows_nbytes;
    int64_t count, dtype;
    const kvant_weight *weight;
    int64_t weight_nbytes;
    const void *bias; /* [outs], or null */
    int64_t bias_nbytes, bias_dtype;
    void *out; /* [count, outs], contiguous */
    int64_t out_nbytes;
    int64_t threads;
} kvant_multiply_request;

/* A number for each of four dimensions. */
typedef struct {
    int64_t first, second, third, last;
} kvant_four;

/* A tensor of four dimensions; a stride of zero broadcasts. */
typedef struct {
    void *data;
    int64_t nbytes;
    kvant_four stride;
} kvant_numbers;

enum kvant_operation {
    KVANT_MAP_COPY, KVANT_MAP_NEGATE, KVANT_MAP_ADD, KVANT_MAP_MULTIPLY, KVANT_MAP_LOOK_UP
};

/* Apply an elementwise operation, in single precision, rounded once. Elements of `out` do not
 * overlap. */
typedef struct {
    int64_t operation, dtype;
    kvant_four shape;
    kvant_numbers a, b; /* b: second operand; for LOOK_UP, 65,536 results by the bits of a */
    kvant_numbers out;
    int64_t threads;
} kvant_map_request;

enum kvant_function {
    KVANT_ATTEND, KVANT_STORE, KVANT_ROTATE, KVANT_NORM, KVANT_CHOOSE, KVANT_MULTIPLY, KVANT_MAP
};

/* One of the requests above, and the function that takes it. */
typedef struct {
    int64_t function;
    const void *request;
    int64_t request_nbytes;
} kvant_step;

/* Run steps in order. If one is refused, the steps before it were run. */
typedef struct {
    const kvant_step *steps;
    int64_t steps_nbytes, num_steps;
} kvant_run_request;

KVANT_EXPORT int kvant_abi(void);

/* Return the instruction set in use: "amx", "avx512", "avxvnni" or "avx2"; "neon+dotprod+i8mm",
 * "neon+dotprod" or "neon"; or "plain". It is the best of this processor, or the one that KVANT_ISA
 * names (null if this processor does not have it). */
KVANT_EXPORT const char *kvant_isa(void);

/* Run parallel work on the OpenMP threads of the process, given its GOMP_parallel, so that two teams
 * never compete for the cores. Null: on threads of the library. */
KVANT_EXPORT void kvant_share_team(void *gomp_parallel);

/* Run dependent additions for about `cycles` cycles. The time that this takes gives the clock rate of
 * the processor. */
KVANT_EXPORT void kvant_spin(int64_t cycles);

KVANT_EXPORT const char *kvant_attend(const kvant_request *request);
KVANT_EXPORT const char *kvant_store(const kvant_store_request *request);
KVANT_EXPORT const char *kvant_rotate(const kvant_rotate_request *request);
KVANT_EXPORT const char *kvant_norm(const kvant_norm_request *request);
KVANT_EXPORT const char *kvant_choose(const kvant_choose_request *request);
KVANT_EXPORT const char *kvant_multiply(const kvant_multiply_request *request);
KVANT_EXPORT const char *kvant_map(const kvant_map_request *request);
KVANT_EXPORT const char *kvant_run(const kvant_run_request *request);

#ifdef __cplusplus
}
#endif
#endif
