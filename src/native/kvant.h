/* The C interface of kvant's CPU kernels: plain structs of pointers and numbers, no Python.
 *
 * Each call takes one request: attention over a view, pages to seal, rows to rotate, rows to put.
 * The caller keeps all memory alive and as it is during the call. Nothing is kept between calls but
 * the threads. Calls from several threads at a time are allowed.
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

#define KVANT_ABI 8

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

/* One field of the sealed pages: [slot, head, bytes]. */
typedef struct {
    const void *data;
    int64_t nbytes;
    int64_t slot, head;
} kvant_pages;

/* The keys, or the values. Affine codes have 2, 3, 4, 5, 6 or 8 bits in groups of 16, 32, 64 or 128
 * channels; codebooks 2, 3 or 4 and floats 8, and one group, the row. Rows of 3 or 5 bits have
 * multiples of 32 channels. `scale` is there unless the format is raw, `bias` where it is affine,
 * `levels` where it is a codebook. `codes` holds the rows where the format is raw. In memory:
 *   codes of keys     [page / 16][bytes of a row / 4][16 rows][4]
 *   codes of values   [page / 4][bytes of a row][4 rows]
 *   scale and bias    [page / 16][groups][16 rows], 16-bit floats
 *   raw rows          [page][dim] */
typedef struct {
    int64_t format, bits, group, dtype, dim; /* dim: a multiple of 16, at most 256 */
    kvant_rows dense, sinks;
    kvant_pages codes, scale, bias;
    const float *levels; /* [1 << bits] */
    int64_t levels_nbytes;
} kvant_side;

typedef struct {
    kvant_side keys, values;
    /* Heads of keys; query heads are heads * group, and the group is 16 at most. A page is a multiple
     * of 64 rows where there are pages; each entry of the table is a slot that all their fields have.
     * A start is no column before the first. */
    int64_t batch, heads, group, queries;
    int64_t page, first_page, num_pages, dense_from, num_dense, num_sinks, columns;
    const int64_t *page_table; /* [batch, num_pages] */
    int64_t page_table_nbytes;
    int64_t table_stride; /* in elements */
    const int64_t *start; /* [batch] */
    int64_t start_nbytes;
    /* A query reads pages sealed once `tail` rows behind them were seen (-1: never), nothing sealed
     * before it is the `dense_until`th row, and dense from column `own_from` on. */
    int64_t tail, dense_until, own_from;
    int64_t causal, window, mask_sinks, chunk; /* window, chunk: 0 is none */
    double scale, softcap;                     /* softcap: 0 is none */
    const float *sink_logits;                  /* [heads * group], or null */
    int64_t sink_logits_nbytes;
    kvant_rows q; /* the last `queries` columns */
    int64_t q_dtype;
    void *out; /* [batch, heads * group, queries, dim of values] */
    int64_t out_nbytes;
    int64_t out_dtype;
    float *lse; /* [batch, heads * group, queries], or null */
    int64_t lse_nbytes;
    int64_t threads; /* 1 to 4096 */
} kvant_request;

enum kvant_arrangement { KVANT_ROWS = 0, KVANT_KEYS = 1, KVANT_VALUES = 2 };

/* Pages to be sealed, `pages` of `page` rows (a multiple of 16) each that follow one another, into memory without
 * gaps: codes [batch, pages, heads, page, bytes], scale and bias [batch, pages, heads, page, groups],
 * arranged as one row after another, or as keys or values are read. What a side may be they may be,
 * but raw. */
typedef struct {
    kvant_rows rows;
    int64_t dtype, batch, pages, heads, page, dim;
    int64_t format, bits, group, corrected; /* corrected: 0 for fp8 */
    const float *levels; /* of a codebook: [1 << bits] */
    int64_t levels_nbytes;
    const float *boundaries; /* of a codebook: [(1 << bits) - 1] */
    int64_t boundaries_nbytes;
    int64_t arrangement;
    uint8_t *codes;
    int64_t codes_nbytes;
    uint16_t *scale;
    int64_t scale_nbytes;
    uint16_t *bias; /* of affine codes, else null */
    int64_t bias_nbytes;
    int64_t threads;
} kvant_seal_request;

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

/* A few rows, keys and values together (one side, or two), to be copied to where they stay: slots
 * [slot, slot + count) of a room that has `slots` of them for each head, one behind the other. */
typedef struct {
    kvant_rows rows;
    void *room; /* [batch, head, slots, bytes] */
    int64_t room_nbytes;
    int64_t batch, head, slots, bytes; /* strides of the room; bytes of a row, here and there */
} kvant_put_side;

typedef struct {
    int64_t sides, batch, heads, slot, count;
    kvant_put_side side[2];
} kvant_put_request;

KVANT_EXPORT int kvant_abi(void);

/* "avx512", "avx2" or "plain": the best that this processor has, or what KVANT_ISA names (null
 * where it names none that this processor has). */
KVANT_EXPORT const char *kvant_isa(void);

/* Run parallel parts on the threads of a host's OpenMP, given its GOMP_parallel, instead of on
 * threads of our own: so there never are two teams that compete for the cores. Null: on our own. */
KVANT_EXPORT void kvant_share_team(void *gomp_parallel);

KVANT_EXPORT const char *kvant_attend(const kvant_request *request);
KVANT_EXPORT const char *kvant_seal(const kvant_seal_request *request);
KVANT_EXPORT const char *kvant_rotate(const kvant_rotate_request *request);
KVANT_EXPORT const char *kvant_put(const kvant_put_request *request);

#ifdef __cplusplus
}
#endif
#endif
