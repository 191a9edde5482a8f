// Blocks of at most BLOCK rows, one after the other, over the segments that a query sees; and
// where the rows of a block lie, dense or coded.
#pragma once

#include "segments.hpp"
#include "values.hpp"

namespace kvant::KVANT_TARGET {

// Rows [first, stop) of a block are seen; own ones begin at zero.
struct Span {
    Part part;
    int64_t slot, row;  // of a page: where it lies, and the block in it; else the first row
    int first, stop;
    int64_t begin;  // the position of its first row
};

class Walk {
public:
    // All rows that one query sees.
    Walk(const kvant_request &r, int64_t sequence, int64_t query)
        : Walk(r, sequence, Reads(r, sequence), Segments()) {
        if (r.chosen) {
            chosen = r.chosen + (sequence * r.heads * r.queries + query) * r.num_chosen;
            while (num_chosen < r.num_chosen && chosen[num_chosen] >= 0) num_chosen++;
        }
        take(Segments(r, there, query));
    }

    // All rows of these runs.
    Walk(const kvant_request &r, int64_t sequence, const Reads &there, const Segments &segments)
        : r(r), sequence(sequence), there(there), page(r.extent->page) {
        take(segments);
    }

    int64_t total = 0;

    // Heads differ in the pages that they chose, and in nothing else.
    Span at(int64_t index, int64_t head = 0) const {
        const Segment &s = segment_of(index);
        if (s.part == Part::own) {
            const int64_t begin = s.first + index * BLOCK;
            const int count = (int)std::min<int64_t>(BLOCK, s.stop - begin);
            return {s.part, 0, begin - there.own, 0, count, begin};
        }
        const int64_t begin = place(s, index, head), number = begin / page;
        const kvant_table &table = s.part == Part::sealed ? r.extent->sealed : r.extent->open;
        const int64_t slot = table.data[sequence * table.stride + number];
        const int64_t first = std::max<int64_t>(0, s.first - begin);
        const int64_t stop = std::min<int64_t>(BLOCK, s.stop - begin);
        const bool none = first >= stop;  // a block of a page that is chosen, but not seen
        return {s.part, slot, begin - number * page, none ? 0 : (int)first, none ? 0 : (int)stop,
                begin};
    }

    // How many blocks from this one on lie one behind the other: those of a page, or all own ones.
    int64_t together(int64_t index) const {
        const Segment &s = segment_of(index);
        const int64_t left = blocks(s) - index, many = page / BLOCK;
        if (s.part == Part::own) return left;
        return std::min(left, many - (picks(s) ? index : s.first / BLOCK + index) % many);
    }

private:
    const kvant_request &r;
    int64_t sequence;
    Reads there;
    int64_t page;
    Segments segments;
    const int64_t *chosen = nullptr;  // the pages of the first head
    int64_t num_chosen = 0;

    bool picks(const Segment &s) const { return chosen && s.part == Part::sealed; }

    // The first position of a block of a segment.
    int64_t place(const Segment &s, int64_t index, int64_t head) const {
        if (!picks(s)) return (s.first / BLOCK + index) * BLOCK;
        const int64_t many = page / BLOCK;
        const int64_t number = chosen[head * r.queries * r.num_chosen + index / many];
        return number * page + index % many * BLOCK;
    }

    void take(const Segments &runs) {
        segments = runs;
        for (int i = 0; i < runs.count; i++) total += blocks(runs.list[i]);
    }

    // The segment that a block lies in; `index` becomes the block's number inside of it.
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

// A side, and the rows of it that came with the request.
struct Source {
    const kvant_side &side;
    const kvant_rows &own;
};

// The rows of a span that is dense, or sealed as they came.
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

inline SealedBlock sealed_block(const kvant_side &side, const Span &span, int64_t head) {
    const int width = (int)(side.dim * side.bits / 8);
    const int groups = (int)((side.dim + side.group - 1) / side.group);
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

// The bytes of a block that is read next, its scales aside.
inline Ahead ahead(const Source &from, const Span &next, int64_t sequence, int64_t head) {
    if (is_coded(from.side, next)) {
        const SealedBlock block = sealed_block(from.side, next, head);
        return {(const char *)block.codes, (const char *)block.codes + BLOCK * block.width};
    }
    const RowBlock block = row_block(from, next, sequence, head);
    return {block.data, block.data + block.count * block.stride};
}

}  // namespace kvant::KVANT_TARGET
