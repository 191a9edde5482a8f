// The rows of a sequence that attention reads: the ranges of its sealed, open and own rows.
//
//   position   0    sinks         seam           own          end
//              | sinks |    sealed   |    open     |    own     |
//
// Checks and kernels both use it, so kernels read exactly what was checked.
#pragma once

#include <algorithm>

#include "kvant.h"

namespace kvant {

// All in positions.
struct Reads {
    int64_t end;    // one past the newest
    int64_t own;    // the first of the request's own (new) rows; open rows end there
    int64_t sinks;  // positions below it are read from open pages
    int64_t begins, sinks_stop;  // first row except sinks; end of the pages that hold sinks
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

    // The position below which the query at `position` reads sealed rows, and dense ones from it.
    int64_t seam(const kvant_request &r, int64_t position) const {
        const kvant_extent &e = *r.extent;
        const int64_t length = position + 1;
        if (e.tail < 0 || length < e.dense_until || length < e.tail) return 0;
        return std::min((length - e.tail) / e.page * e.page, end - r.num_dense);
    }
};

}  // namespace kvant
