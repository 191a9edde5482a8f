// What there is to read of a sequence: where its sealed, open and own rows begin and end.
//
// Checks and kernels both go by it, so what was checked is what is read.
#pragma once

#include <algorithm>

#include "kvant.h"

namespace kvant {

// In columns, which are positions unless pages are numbered by columns; sinks are positions.
struct Reads {
    int64_t origin;  // the column of position 0
    int64_t end;     // behind the newest column
    int64_t sinks;   // positions below it are read from open pages
    int64_t begins, sinks_stop;  // rows of the pages of sinks: from there on, unless they are sinks
    int64_t sealed_first, sealed_stop, open_first, open_stop;
    int64_t own;  // the column of the first of the request's own rows
    int64_t own_first;

    Reads(const kvant_request &r, int64_t sequence) {
        const kvant_extent &e = *r.extent;
        const int64_t *n = e.numbers + sequence * KVANT_NUMBERS;
        origin = e.by_column ? n[KVANT_PADDING] : 0;
        end = n[KVANT_LENGTH] + origin;
        own = end - r.num_own;
        sinks = std::min(e.sinks, (e.by_column ? end : own) - origin);
        const int64_t whole = (e.sinks + e.page - 1) / e.page * e.page;
        sinks_stop = e.by_column ? sinks : std::min(whole, own);
        begins = n[KVANT_BEGINS];
        own_first = e.by_column ? std::max(own, sinks + origin) : std::max(own, begins);
        sealed_first = std::max(n[KVANT_FIRST_SEALED] * e.page, begins);
        sealed_stop = std::min(n[KVANT_STOP_SEALED] * e.page, seam(r, end - 1));
        open_first = std::max({n[KVANT_FIRST_OPEN] * e.page, begins, sinks_stop});
        open_stop = e.by_column ? 0 : own;
    }

    // The column below which the query at a column reads sealed rows, else dense ones.
    int64_t seam(const kvant_request &r, int64_t column) const {
        const kvant_extent &e = *r.extent;
        const int64_t length = column + 1;
        if (e.tail < 0 || length < e.dense_until || length < e.tail) return 0;
        return std::min((length - e.tail) / e.page * e.page, end - r.num_dense);
    }
};

}  // namespace kvant
