/* The C interface of kvant's CPU kernels: plain structs of pointers and numbers, no Python.
 *
 * Each call takes one request: attention over pages, rows to store, rows to rotate or to
 * norm, pages to choose, rows to multiply with a weight, numbers to compute one by one; or a list of
 * such requests.
 * What many calls share (a side of the storage of a layer, how far sequences are and where their
 * pages lie) is made once and pointed to. The caller keeps all memory alive and as it is during the
 * call. Nothing is kept between calls but the threads. Calls from several threads at a time are
 * allowed.
 *
 * Each pointer is followed by `nbytes`: so many bytes are there from it on, and nothing else is
 * touched. All that a request's counts, strides, tables and enumerations lead to is checked before
 * anything is written (checks.hpp). Functions give null, or in words what they refuse; then nothing
 * was written. What only the caller can know is its duty: that the bytes it states are there, and
 * that what is written lies apart from what is read.
 *
 * Strides are in bytes unless said otherwise, from 0 to 2^40, and numbers lie at multiples of
 * their size. Any count may be zero: then there is nothing to do.
 */
#ifndef KVANT_H
#define KVANT_H

#include <stdint.h>

#define KVANT_ABI 16

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

/* Where the keys, or the values, of a layer are stored; the same until the storage grows. Affine
 * codes have 2, 3, 4, 5, 6 or 8 bits in groups of 16, 32, 64 or 128 channels; codebooks 2, 3 or 4
 * and floats 8, and one group, the row. Rows of 3 or 5 bits have multiples of 32 channels. `scale`
 * is there unless the format is raw, `bias` where it is affine, `levels` and `boundaries` where it is a
 * codebook. `codes` holds the rows where the format is raw. They lie
 * one row after another, or as keys or values are read:
 *   codes of keys     [page / 16][bytes of a row / 4][16 rows][4]
 *   codes of values   [page / 4][bytes of a row][4 rows]
 *   scale and bias    [page / 16][groups][16 rows], 16-bit floats
 *   raw rows          [page][dim], however the others lie */
typedef struct {
    int64_t format, bits, group, dtype, dim; /* dim: a multiple of 16, at most 256 */
    int64_t corrected, arrangement;          /* corrected: of affine codes and codebooks */
    kvant_open open;
    kvant_pages codes, scale, bias;
    const float *levels; /* [1 << bits] */
    int64_t levels_nbytes;
    const float *boundaries; /* [(1 << bits) - 1] */
    int64_t boundaries_nbytes;
} kvant_side;

/* The slots of the pages of each sequence, [batch, width], by page number. Entries of pages that
 * nobody may read may be anything. */
typedef struct {
    const int64_t *data;
    int64_t nbytes;
    int64_t stride, width; /* stride: in elements */
} kvant_table;

/* The numbers of a sequence: its positions so far (below zero: columns of padding to come), columns
 * of padding (not read), the pages that are sealed, the first that is open (the last is that of its
 * last position), the position before which there are no rows, sinks aside, and the length at which
 * rows were pruned (not read). */
enum kvant_number {
    KVANT_LENGTH, KVANT_PADDING, KVANT_FIRST_SEALED, KVANT_STOP_SEALED, KVANT_FIRST_OPEN,
    KVANT_BEGINS, KVANT_PRUNED, KVANT_NUMBERS
};

/* How far sequences are and where their pages lie; the same for many layers. A query reads pages
 * sealed once `tail` rows behind them were seen (-1: never), nothing sealed before it is the
 * `dense_until`th row, and positions below `sinks` from open pages and nowhere else. A page that is
 * read has a multiple of 64 rows. */
typedef struct {
    int64_t batch, page, tail, dense_until, sinks;
    const int64_t *numbers; /* [batch, KVANT_NUMBERS] */
    int64_t numbers_nbytes;
    kvant_table sealed, open;
} kvant_extent;

/* Attention of the last `queries` columns: query t is at position length - queries + t, and padding
 * where that is below zero. Key heads have `group` query heads each, 16 at most. */
typedef struct {
    const kvant_side *keys;
    int64_t keys_nbytes;
    const kvant_side *values;
    int64_t values_nbytes;
    const kvant_extent *extent;
    int64_t extent_nbytes;
    int64_t heads, group, queries;
    /* The newest rows, where these lie apart: the last `num_own` columns, read from nowhere else. To
     * no query the newest `num_dense` columns are sealed, whatever falls due. */
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
    /* Of sealed pages, read these only: numbers [batch, heads, queries, num_chosen] in order, then
     * -1, as many for each head. Null: read all. */
    const int64_t *chosen;
    int64_t chosen_nbytes, num_chosen;
    int64_t threads; /* 1 to 4096 */
} kvant_request;

typedef struct {
    const kvant_side *stored;
    int64_t stored_nbytes;
    kvant_rows rows; /* [batch, head, column, dim]: what came */
} kvant_store_side;

/* What becomes of pages with a forward; the same for many layers. First open pages are copied, then
 * rows are written to open pages, then pages are sealed: from an open page, or from rows that came. */
typedef struct {
    const int64_t *copies; /* [num_copies, 2]: open slots, from and to */
    int64_t copies_nbytes, num_copies;
    const int64_t *writes; /* [num_writes, 5]: sequence, open slot, row, rows, column */
    int64_t writes_nbytes, num_writes;
    const int64_t *seals; /* [num_seals, 4]: sequence, slot, open slot or -1, then its first column */
    int64_t seals_nbytes, num_seals;
} kvant_steps;

/* Rows of `count` columns to where they stay, keys and values together (one side, or two). Pages
 * that are sealed have a multiple of 16 rows, unless they are raw. */
typedef struct {
    int64_t sides, batch, heads, page, count;
    const kvant_steps *steps;
    int64_t steps_nbytes;
    int64_t threads;
    kvant_store_side side[2];
} kvant_store_request;

/* Rows to be turned by a Hadamard transform in blocks of powers of two, the largest first; computed
 * in single precision and rounded once. */
typedef struct {
    kvant_rows rows;
    int64_t dtype, batch, heads, count, dim;
    const float *signs; /* [dim], over the square root of their block */
    int64_t signs_nbytes;
    int64_t last; /* signs after the transform, not before it */
    void *out;    /* [batch, heads, count, dim] without gaps */
    int64_t out_nbytes;
    int64_t threads;
} kvant_rotate_request;

/* Rows over the root of `eps` plus the mean of their squares, times a weight: in single precision,
 * rounded to the dtype before the weight and after it. */
typedef struct {
    const void *rows; /* [count, dim] without gaps */
    int64_t rows_nbytes;
    const void *weight; /* [dim] */
    int64_t weight_nbytes;
    int64_t dtype, count, dim; /* dim: a multiple of 32, at most 32,768 */
    double eps;
    void *out; /* [count, dim] without gaps */
    int64_t out_nbytes;
    int64_t threads;
} kvant_norm_request;

/* Of pages [first, stop) of a query, `count` are to be chosen; the others of [low, high) are read. */
enum kvant_range { KVANT_LOW, KVANT_FIRST, KVANT_STOP, KVANT_HIGH, KVANT_COUNT, KVANT_RANGES };

/* The sealed pages to be read by the last `queries` columns: those whose keys can score most in sum
 * over the query heads of a key head, by two bounds of each channel. */
typedef struct {
    const kvant_extent *extent;
    int64_t extent_nbytes;
    int64_t heads, group, queries, dim;
    kvant_rows q;
    int64_t q_dtype;
    kvant_pages bounds; /* [slot, head, 2, dim]: the upper ones, then the lower ones */
    int64_t dtype;
    const int64_t *ranges; /* [batch, queries, KVANT_RANGES] */
    int64_t ranges_nbytes;
    int64_t *chosen; /* as a request to attend has it */
    int64_t chosen_nbytes, num_chosen;
    int64_t threads;
} kvant_choose_request;

/* Rows times the transposed weight of a linear layer, plus a bias, all of them 16-bit brain floats:
 * summed in single precision, rounded once. The sums of each `part` columns are added to those of
 * the parts before. */
typedef struct {
    const void *rows; /* [count, width] without gaps */
    int64_t rows_nbytes;
    const void *weight; /* [outs / 64, rounded up][width / 2][64][2] */
    int64_t weight_nbytes;
    const void *bias; /* [outs], or null */
    int64_t bias_nbytes;
    int64_t count, width, outs, part; /* width: a multiple of 16; part: of 2 */
    void *out;                        /* [count, outs] without gaps */
    int64_t out_nbytes;
    int64_t threads;
} kvant_multiply_request;

/* Of each of four dimensions. */
typedef struct {
    int64_t first, second, third, last;
} kvant_four;

/* Numbers of four dimensions; a stride of zero repeats what is there. */
typedef struct {
    void *data;
    int64_t nbytes;
    kvant_four stride;
} kvant_numbers;

enum kvant_operation {
    KVANT_MAP_COPY, KVANT_MAP_NEGATE, KVANT_MAP_ADD, KVANT_MAP_MULTIPLY, KVANT_MAP_LOOK_UP
};

/* Numbers one by one, in single precision, rounded once. No two of `out` lie at one place. */
typedef struct {
    int64_t operation, dtype;
    kvant_four shape;
    kvant_numbers a, b; /* b: of two; to look up, of 16 bits: 65,536 results in the order of their bits */
    kvant_numbers out;
    int64_t threads;
} kvant_map_request;

enum kvant_function {
    KVANT_ATTEND, KVANT_STORE, KVANT_ROTATE, KVANT_NORM, KVANT_CHOOSE, KVANT_MULTIPLY, KVANT_MAP
};

/* One of the requests above, by the function that takes it. */
typedef struct {
    int64_t function;
    const void *request;
    int64_t request_nbytes;
} kvant_step;

/* Steps, one after the other. Where one is refused, those before it were done. */
typedef struct {
    const kvant_step *steps;
    int64_t steps_nbytes, num_steps;
} kvant_run_request;

KVANT_EXPORT int kvant_abi(void);

/* "amx", "avx512", "avx2" or "plain": the best that this processor has, or what KVANT_ISA names
 * (null where it names none that this processor has). */
KVANT_EXPORT const char *kvant_isa(void);

/* Run parallel parts on the threads of a host's OpenMP, given its GOMP_parallel, instead of on
 * threads of our own: so there never are two teams that compete for the cores. Null: on our own. */
KVANT_EXPORT void kvant_share_team(void *gomp_parallel);

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
