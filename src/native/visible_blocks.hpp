// The rows that a query sees, in blocks of at most BLOCK rows, and where the rows of a block are.
//
// Visibility follows attention/mask.py. Own rows are read from the request. Of the others, positions
// below `sinks` are read from open pages only, those below the seam from sealed pages, the rest from
// open pages. Pages that hold sinks are always open.
#pragma once

#include "read_ranges.hpp"
#include "scores.hpp"

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

// A block, of which rows [first, stop) are visible; own blocks start at zero.
struct Span {
    Part part;
    int64_t slot, row;  // of a page: its slot, and the block's first row in it; own: 0, first row
    int first, stop;
    int64_t begin;  // position of the first row
};

class Walk {
public:
    // The rows that one query sees.
    Walk(const kvant_request &r, int64_t sequence, int64_t query)
        : Walk(r, sequence, Reads(r, sequence), Segments()) {
        if (r.chosen) {
            selected = r.chosen + (sequence * r.heads * r.queries + query) * r.num_chosen;
            while (num_chosen < r.num_chosen && selected[num_chosen] >= 0) num_chosen++;
        }
        take(Segments(r, reads, query));
    }

    // The rows of the given segments.
    Walk(const kvant_request &r, int64_t sequence, const Reads &reads, const Segments &segments)
        : r(r), sequence(sequence), reads(reads), page(r.extent->page) {
        take(segments);
    }

    int64_t total = 0;

    // Return a block; `head` matters only for selected pages.
    Span at(int64_t index, int64_t head = 0) const {
        const Segment &s = segment_of(index);
        if (s.part == Part::own) {
            const int64_t begin = s.first + index * BLOCK;
            const int count = (int)std::min<int64_t>(BLOCK, s.stop - begin);
            return {s.part, 0, begin - reads.own, 0, count, begin};
        }
        const int64_t begin = place(s, index, head), number = begin / page;
        const kvant_table &table = s.part == Part::sealed ? r.extent->sealed : r.extent->open;
        const int64_t slot = table.data[sequence * table.stride + number];
        const int64_t first = std::max<int64_t>(0, s.first - begin);
        const int64_t stop = std::min<int64_t>(BLOCK, s.stop - begin);
        const bool hidden = first >= stop;  // a hidden block of a selected page
        return {s.part, slot, begin - number * page, hidden ? 0 : (int)first, hidden ? 0 : (int)stop,
                begin};
    }

    // The number of contiguous blocks from this one on: those of its page, or all own ones.
    int64_t together(int64_t index) const {
        const Segment &s = segment_of(index);
        const int64_t left = blocks(s) - index, page_blocks = page / BLOCK;
        if (s.part == Part::own) return left;
        const int64_t number = picks(s) ? index : s.first / BLOCK + index;
        return std::min(left, page_blocks - number % page_blocks);
    }

private:
    const kvant_request &r;
    int64_t sequence;
    Reads reads;
    int64_t page;
    Segments segments;
    const int64_t *selected = nullptr;  // selected pages of the first head
    int64_t num_chosen = 0;

    bool picks(const Segment &s) const { return selected && s.part == Part::sealed; }

    // The position of the first row of a block.
    int64_t place(const Segment &s, int64_t index, int64_t head) const {
        if (!picks(s)) return (s.first / BLOCK + index) * BLOCK;
        const int64_t page_blocks = page / BLOCK;
        const int64_t number = selected[head * r.queries * r.num_chosen + index / page_blocks];
        return number * page + index % page_blocks * BLOCK;
    }

    void take(const Segments &runs) {
        segments = runs;
        for (int i = 0; i < runs.count; i++) total += blocks(runs.list[i]);
    }

    // The segment of a block; `index` becomes the number of the block in it.
    const Segment &segment_of(int64_t &index) const {
        int i = 0;
        for (; index >= blocks(segments.list[i]); i++) index -= blocks(segments.list[i]);
        return segments.list[i];
    }

    int64_t blocks(const Segment &s) const {
        if (picks(s)) return num_chosen * (page / BLOCK);
        if (s.part == Part::own) return (s.stop - s.first + BLOCK - 1) / BLOCK;
        return (s.stop + BLOCK - 1) / BLOCK - s.first / BLOCK;
    }
};

// A side of the storage, and the request's own rows of it.
struct Source {
    const kvant_side &side;
    const SideTables &tables;
    const kvant_rows &own;
};

// The rows of a span that is dense or sealed raw.
inline RowBlock row_block(const Source &from, const Span &span, int64_t sequence, int64_t head) {
    const int count = span.stop - span.first;
    if (span.part == Part::own) {
        const char *data = (const char *)from.own.data + sequence * from.own.batch + head * from.own.head;
        return {data + span.row * from.own.row, from.own.row, count, {}};
    }
    const kvant_side &side = from.side;
    if (span.part == Part::sealed) {
        const int64_t stride = side.dim * size_of(side.dtype);
        const char *data = (const char *)side.codes.data + span.slot * side.codes.slot +
                           head * side.codes.head + (span.row + span.first) * stride;
        return {data, stride, count, {}};
    }
    const kvant_open &open = side.open;
    const char *data = (const char *)open.data + span.slot * open.slot + head * open.head;
    return {data + (span.row + span.first) * open.row, open.row, count, {}};
}

inline SealedBlock sealed_block(const Source &from, const Span &span, int64_t head) {
    const kvant_side &side = from.side;
    const int width = from.tables.width, groups = from.tables.groups;
    const auto place = [&](const kvant_pages &pages, int64_t row) {
        if (!pages.data) return (const char *)nullptr;
        return (const char *)pages.data + span.slot * pages.slot + head * pages.head + span.row * row;
    };
    return {(const uint8_t *)place(side.codes, width),
            (const Half *)place(side.scale, 2 * groups),
            (const Half *)place(side.bias, 2 * groups),
            (int)side.dim, (int)side.group, groups, width, {}, 0};
}

inline bool is_coded(const kvant_side &side, const Span &span) {
    return span.part == Part::sealed && side.format != KVANT_RAW;
}

// The bytes of the next block to prefetch, without its scales.
inline Ahead ahead(const Source &from, const Span &next, int64_t sequence, int64_t head) {
    if (is_coded(from.side, next)) {
        const SealedBlock block = sealed_block(from, next, head);
        return {(const char *)block.codes, (const char *)block.codes + BLOCK * block.width};
    }
    const RowBlock block = row_block(from, next, sequence, head);
    return {block.data, block.data + block.count * block.stride};
}

}  // namespace kvant::KVANT_TARGET
