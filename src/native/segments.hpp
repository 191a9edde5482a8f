// Which rows a query sees, as runs of neighbouring rows that are all seen.
//
// The rule is that of attention/mask.py, over positions. Positions below `num_sinks` are read from
// the sinks and nowhere else; columns below the seam from sealed pages, the others from dense rows.
#pragma once

#include <algorithm>

#include "kvant.h"

namespace kvant::KVANT_TARGET {

enum class Part { sinks, sealed, dense };

// Rows [first, stop): columns, or positions of sinks.
struct Segment {
    Part part;
    int64_t first, stop;
};

struct Segments {
    Segment list[6];
    int count = 0;

    Segments() = default;
    Segments(const kvant_request &r, int64_t sequence, int64_t query) {
        const int64_t start = r.start[sequence], column = r.columns - r.queries + query;
        const int64_t position = column - start;
        if (position < 0) return;
        int64_t low = 0, high = r.causal ? position + 1 : r.columns - start;
        if (r.chunk) {
            low = position / r.chunk * r.chunk;
            high = std::min(high, low + r.chunk);
        }
        const int64_t near = r.window ? std::max(low, position - r.window + 1) : low;
        const int64_t seam = seam_of(r, column);
        if (near > low) add(r, start, seam, low, std::min({high, near, r.mask_sinks}));
        add(r, start, seam, near, high);
    }

    // Take in what others hold: a part of which there is a run already becomes one run.
    void widen(const Segments &others) {
        for (int i = 0; i < others.count; i++) {
            const Segment &other = others.list[i];
            int at = 0;
            while (at < count && list[at].part != other.part) at++;
            if (at == count) {
                list[count++] = other;
                continue;
            }
            list[at].first = std::min(list[at].first, other.first);
            list[at].stop = std::max(list[at].stop, other.stop);
        }
    }

private:
    // The column below which the query at a column reads sealed rows, else dense ones.
    static int64_t seam_of(const kvant_request &r, int64_t column) {
        const int64_t length = column + 1;
        if (r.tail < 0 || length < r.dense_until || length < r.tail) return 0;
        return std::min((length - r.tail) / r.page * r.page, r.own_from);
    }

    // Positions [low, high).
    void add(const kvant_request &r, int64_t start, int64_t seam, int64_t low, int64_t high) {
        const int64_t sinks = std::min(r.num_sinks, r.columns - start);
        put(Part::sinks, low, std::min(high, sinks));
        low = std::max(low, r.num_sinks) + start, high += start;
        const int64_t sealed = r.first_page * r.page;
        put(Part::sealed, std::max(low, sealed),
            std::min({high, seam, sealed + r.num_pages * r.page}));
        put(Part::dense, std::max({low, seam, r.dense_from}),
            std::min(high, r.dense_from + r.num_dense));
    }

    void put(Part part, int64_t first, int64_t stop) {
        if (first < stop) list[count++] = {part, first, stop};
    }
};

}  // namespace kvant::KVANT_TARGET
