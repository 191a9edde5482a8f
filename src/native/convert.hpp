// Read queries and write outputs: the only code that depends on their dtypes.
#pragma once

#include "kvant.h"
#include "limits.hpp"
#include "vec.hpp"

namespace kvant::KVANT_TARGET {

template <class T> inline void read_as(const void *from, int64_t dim, float *to) {
    for (int64_t d = 0; d < dim; d += 16) store(to + d, load((const T *)from + d));
}

template <class T> inline void write_as(void *to, int64_t at, int64_t dim, const float *from) {
    for (int64_t d = 0; d < dim; d += 16) store_nearest((T *)to + at + d, load(from + d));
}

// Convert a row of a dtype to single precision.
inline void read_row(int64_t dtype, const void *from, int64_t dim, float *to) {
    if (dtype == KVANT_F32) read_as<float>(from, dim, to);
    if (dtype == KVANT_F16) read_as<Half>(from, dim, to);
    if (dtype == KVANT_BF16) read_as<Bfloat>(from, dim, to);
}

// Read one query in single precision.
inline void read_query(const kvant_request &r, int64_t sequence, int64_t head, int64_t query,
                       float *to) {
    const char *at =
        (const char *)r.q.data + sequence * r.q.batch + head * r.q.head + query * r.q.row;
    read_row(r.q_dtype, at, r.keys->dim, to);
}

// Write the outputs of one query, rounded once.
inline void write_out(const kvant_request &r, int64_t row, const float *from) {
    const int64_t dim = r.values->dim;
    if (r.out_dtype == KVANT_F32) write_as<float>(r.out, row * dim, dim, from);
    if (r.out_dtype == KVANT_F16) write_as<Half>(r.out, row * dim, dim, from);
    if (r.out_dtype == KVANT_BF16) write_as<Bfloat>(r.out, row * dim, dim, from);
}

}  // namespace kvant::KVANT_TARGET
