// What there is to read of a sequence: where its sealed, open and own rows begin and end.
//
// Checks and kernels both go by it, so what was checked is what is read.
#pragma once

#include <algorithm>

#include "kvant.h"

namespace kvant {

// In positions.
struct Reads {
    int64_t end;    // behind the newest
    int64_t own;    // the first of the request's own rows; open rows end there
    int64_t sinks;  // below it, rows are read from open pages
    int64_t begins, sinks_stop;  // rows of the pages of sinks: from there on, unless they are sinks
    int64_t sealed_first, sealed_stop, open_first, own_first;

    Reads(const kvant_request &r, int64_t sequence) {
        const kvant_extent &e = *r.extent;
        const int64_t *n = e.numbers + sequence * KVANT_NUMBERS;
        end = n[KVANT_LENGTH];
        own = end - r.num_own;
        sinks = std::min(e.sinks, own);
        begins = n[KVANT_BEGINS];
        sinks_stop = std::min((e.sinks + e.page - 1) / e.page * e.page, own);
        own_first = std::max(own, begins);
        sealed_first = std::max(n[KVANT_FIRST_SEALED] * e.page, begins);
        sealed_stop = std::min(n[KVANT_STOP_SEALED] * e.page, seam(r, end - 1));
        open_first = std::max({n[KVANT_FIRST_OPEN] * e.page, begins, sinks_stop});
    }

    // The position below which the query at `position` reads sealed rows, else dense ones.
    int64_t seam(const kvant_request &r, int64_t position) const {
        const kvant_extent &e = *r.extent;
        const int64_t length = position + 1;
        if (e.tail < 0 || length < e.dense_until || length < e.tail) return 0;
        return std::min((length - e.tail) / e.page * e.page, end - r.num_dense);
    }
};

}  // namespace kvant
