// The rows that a query sees, as segments of neighbouring rows that are all visible.
//
// Visibility follows attention/mask.py. Own rows are read from the request. Of the others, positions
// below `sinks` are read from open pages only, those below the seam from sealed pages, the rest from
// open pages. Pages that hold sinks are always open.
#pragma once

#include "reads.hpp"
#include "shape.hpp"

namespace kvant::KVANT_TARGET {

enum class Part { sinks, sealed, open, own };

// Positions [first, stop).
struct Segment {
    Part part;
    int64_t first, stop;
};

struct Segments {
    Segment list[12];
    int count = 0;

    Segments() = default;
    Segments(const kvant_request &r, const Reads &reads, int64_t query) {
        const int64_t position = reads.end - r.queries + query;
        if (position < 0) return;
        int64_t low = 0, high = r.causal ? position + 1 : reads.end;
        if (r.chunk) {
            low = position / r.chunk * r.chunk;
            high = std::min(high, low + r.chunk);
        }
        const int64_t window_low = r.window ? std::max(low, position - r.window + 1) : low;
        const int64_t seam = reads.seam(r, position);
        if (window_low > low) add(r, reads, seam, low, std::min({high, window_low, r.mask_sinks}));
        add(r, reads, seam, window_low, high);
    }

    // Extend the segments to cover others; segments of the same part become one.
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
    // Add positions [low, high).
    void add(const kvant_request &r, const Reads &reads, int64_t seam, int64_t low, int64_t high) {
        const int64_t sinks = r.extent->sinks;
        put(Part::sinks, low, std::min(high, reads.sinks));
        put(Part::own, std::max(low, reads.own_first), std::min(high, sinks));
        low = std::max(low, sinks);
        put(Part::sealed, std::max(low, reads.sealed_first),
            std::min({high, seam, reads.sealed_stop}));
        low = std::max(low, seam);
        put(Part::sinks, std::max(low, reads.begins), std::min(high, reads.sinks_stop));
        put(Part::open, std::max(low, reads.open_first), std::min(high, reads.own));
        put(Part::own, std::max(low, reads.own_first), high);
    }

    void put(Part part, int64_t first, int64_t stop) {
        if (first >= stop) return;
        if (count && list[count - 1].part == part && list[count - 1].stop == first)
            list[count - 1].stop = stop;
        else
            list[count++] = {part, first, stop};
    }
};

}  // namespace kvant::KVANT_TARGET
