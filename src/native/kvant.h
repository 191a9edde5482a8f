/* The C interface of kvant's CPU kernels: plain structs of pointers and numbers, no Python.
 *
 * Strides are in bytes unless said otherwise. Each call takes one request: attention over a view,
 * pages to seal, rows to rotate, rows to put. The caller keeps all memory alive during the call. Nothing is kept between calls but the threads.
 * Calls from several threads at a time are allowed. Functions give 0, or -1 for what they do not
 * serve (the caller is to ask first: src/kvant/native and src/kvant/attention/native know).
 */
#ifndef KVANT_H
#define KVANT_H

#include <stdint.h>

#define KVANT_ABI 7

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
    int64_t batch, head, row;
} kvant_rows;

/* One field of the sealed pages: [slot, head, bytes]. */
typedef struct {
    const void *data;
    int64_t slot, head;
} kvant_pages;

/* The keys, or the values. `codes` holds the rows where the format is raw. In memory:
 *   codes of keys     [page / 16][bytes of a row / 4][16 rows][4]
 *   codes of values   [page / 4][bytes of a row][4 rows]
 *   scale and bias    [page / 16][groups][16 rows], 16-bit floats
 *   raw rows          [page][dim] */
typedef struct {
    int64_t format, bits, group, dtype, dim;
    kvant_rows dense, sinks;
    kvant_pages codes, scale, bias;
    const float *levels; /* of a codebook: 1 << bits of them */
} kvant_side;

typedef struct {
    kvant_side keys, values;
    int64_t batch, heads, group, queries; /* heads of keys; query heads are heads * group */
    int64_t page, first_page, num_pages, dense_from, num_dense, num_sinks, columns;
    const int64_t *page_table; /* [batch, num_pages] */
    int64_t table_stride;      /* in elements */
    const int64_t *start;      /* [batch] */
    /* A query reads pages sealed once `tail` rows behind them were seen (-1: never), nothing sealed
     * before it is the `dense_until`th row, and dense from column `own_from` on. */
    int64_t tail, dense_until, own_from;
    int64_t causal, window, mask_sinks, chunk; /* window, chunk: 0 is none */
    double scale, softcap;                     /* softcap: 0 is none */
    const float *sink_logits;                  /* [heads * group], or null */
    const void *q;                             /* the last `queries` columns */
    int64_t q_dtype, q_batch, q_head, q_row;   /* strides in elements */
    void *out;                                 /* [batch, heads * group, queries, dim of values] */
    int64_t out_dtype;
    float *lse;                                /* [batch, heads * group, queries], or null */
    int64_t threads;
} kvant_request;

enum kvant_arrangement { KVANT_ROWS = 0, KVANT_KEYS = 1, KVANT_VALUES = 2 };

/* Pages to be sealed, `pages` of `page` rows (a multiple of 16) each that follow one another, into memory without
 * gaps: codes [batch, pages, heads, page, bytes], scale and bias [batch, pages, heads, page, groups],
 * arranged as one row after another, or as keys or values are read. */
typedef struct {
    kvant_rows rows;
    int64_t dtype, batch, pages, heads, page, dim; /* dim: a multiple of 16, at most 256 */
    int64_t format, bits, group, corrected; /* corrected: 0 for fp8 */
    const float *levels, *boundaries; /* of a codebook */
    int64_t arrangement;
    uint8_t *codes;
    uint16_t *scale, *bias; /* bias: null but of affine codes */
    int64_t threads;
} kvant_seal_request;

/* Rows to be turned by a Hadamard transform in blocks of powers of two, the largest first; computed
 * in single precision and rounded once. */
typedef struct {
    kvant_rows rows;
    int64_t dtype, batch, heads, count, dim; /* dim: a multiple of 16, at most 256 */
    const float *signs;                      /* [dim], over the square root of their block */
    int64_t last;                            /* signs after the transform, not before it */
    void *out;                               /* [batch, heads, count, dim] without gaps */
    int64_t threads;
} kvant_rotate_request;

/* A few rows, keys and values together, to be copied to where they stay; the rows of a head follow
 * one another there. */
typedef struct {
    kvant_rows rows;
    void *to;
    int64_t batch, head, bytes; /* strides of `to`; bytes of a row */
} kvant_put_side;

typedef struct {
    int64_t sides, batch, heads, count;
    kvant_put_side side[2];
} kvant_put_request;

KVANT_EXPORT int kvant_abi(void);

/* "avx512", "avx2" or "plain": the best that this processor has, or what KVANT_ISA names (null
 * where it names none that this processor has). */
KVANT_EXPORT const char *kvant_isa(void);

/* Run parallel parts on the threads of a host's OpenMP, given its GOMP_parallel, instead of on
 * threads of our own: so there never are two teams that compete for the cores. Null: on our own. */
KVANT_EXPORT void kvant_share_team(void *gomp_parallel);

KVANT_EXPORT int kvant_attend(const kvant_request *request);
KVANT_EXPORT int kvant_seal(const kvant_seal_request *request);
KVANT_EXPORT int kvant_rotate(const kvant_rotate_request *request);
KVANT_EXPORT int kvant_put(const kvant_put_request *request);

#ifdef __cplusplus
}
#endif
#endif
