// Which rows a query sees, as runs of neighbouring rows that are all seen.
//
// The rule is that of attention/mask.py, over positions. The request's own rows are read from there;
// of the others, positions below `sinks` from open pages and nowhere else, those below the seam
// from sealed pages, the rest from open ones. Pages of sinks are always open, whatever others are.
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
    Segments(const kvant_request &r, const Reads &there, int64_t query) {
        const int64_t position = there.end - r.queries + query;
        if (position < 0) return;
        int64_t low = 0, high = r.causal ? position + 1 : there.end;
        if (r.chunk) {
            low = position / r.chunk * r.chunk;
            high = std::min(high, low + r.chunk);
        }
        const int64_t near = r.window ? std::max(low, position - r.window + 1) : low;
        const int64_t seam = there.seam(r, position);
        if (near > low) add(r, there, seam, low, std::min({high, near, r.mask_sinks}));
        add(r, there, seam, near, high);
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
    // Positions [low, high).
    void add(const kvant_request &r, const Reads &there, int64_t seam, int64_t low, int64_t high) {
        const int64_t sinks = r.extent->sinks;
        put(Part::sinks, low, std::min(high, there.sinks));
        put(Part::own, std::max(low, there.own_first), std::min(high, sinks));
        low = std::max(low, sinks);
        put(Part::sealed, std::max(low, there.sealed_first),
            std::min({high, seam, there.sealed_stop}));
        low = std::max(low, seam);
        put(Part::sinks, std::max(low, there.begins), std::min(high, there.sinks_stop));
        put(Part::open, std::max(low, there.open_first), std::min(high, there.own));
        put(Part::own, std::max(low, there.own_first), high);
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
