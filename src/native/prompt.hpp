// Attention of many query positions: each block of rows is decoded once for up to MANY queries.
//
// If the processor multiplies pairs of 16-bit floats, rows are multiplied as such (Number is a
// pair); otherwise in single precision. Masks are segments of visible rows (visible_blocks.hpp); the
// scores of hidden rows of a block are replaced by -infinity.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "softmax.hpp"
#include "team.hpp"
#if KVANT_TILES
#include "amx_products.hpp"
#else
#include "vector_products.hpp"
#endif

namespace kvant::KVANT_TARGET {

constexpr int MANY = 128;  // queries of a chunk, all of one key head
static_assert(MANY % TOGETHER == 0, "queries computed together have room");

template <class Number> struct ChunkScratch {
    static constexpr int WIDTH = MAX_DIM / EACH<Number>;
    alignas(64) Number keys[BLOCK * WIDTH], values[BLOCK * WIDTH];
    alignas(64) Number q[MANY * WIDTH], rest[MANY * WIDTH];
    alignas(64) float scores[TOGETHER * PITCH];
    alignas(64) Bfloat weights[TOGETHER * PITCH];
    alignas(64) float acc[MANY * OUT_PITCH];
    alignas(64) float totals[MANY][16];
    float top[MANY];
    Segments seen[MANY];  // by position
};

// Whether both sides are 16-bit floats, and the processor multiplies pairs of them.
inline bool in_pairs(const kvant_request &r) {
    const bool bytes = has_bytes(*r.keys) || has_bytes(*r.values);
    return KVANT_BFLOAT_DOT && r.keys->dtype == KVANT_BF16 && r.values->dtype == KVANT_BF16 &&
           (KVANT_TILES || !bytes);
}

constexpr uint64_t ALL = ~(uint64_t)0;  // a bit for each row of a block

// The bits of rows [first, stop) of a block.
inline uint64_t rows_between(int64_t first, int64_t stop) {
    return first < stop ? ALL >> (BLOCK - (stop - first)) << first : 0;
}

// For each part, the rows that every query of a chunk sees.
class Shared {
public:
    void begin() {
        for (Run &run : runs) run = {INT64_MIN, INT64_MAX};
    }

    void narrow(const Segments &segments) {
        for (int part = 0; part < PARTS; part++) {
            Run &run = runs[part];
            int count = 0;
            for (int i = 0; i < segments.count; i++) {
                const Segment &other = segments.list[i];
                if ((int)other.part != part) continue;
                run = {std::max(run.first, other.first), std::min(run.stop, other.stop)};
                count++;
            }
            if (count != 1) run.stop = INT64_MIN;  // no run, or two with a gap
        }
    }

    bool hold(const Span &span) const {
        const Run &run = runs[(int)span.part];
        return span.stop - span.first == BLOCK && run.first <= span.begin &&
               span.begin + BLOCK <= run.stop;
    }

private:
    static constexpr int PARTS = 4;
    struct Run {
        int64_t first, stop;
    } runs[PARTS];
};

template <class Number> class Chunk {
public:
    Chunk(const kvant_request &r, const SideTables &keys, const SideTables &values,
          ChunkScratch<Number> &s)
        : r(r), keys(keys), values(values), s(s),
          key_tile{s.keys, 16, padded(r.keys->dim)},
          value_tile{s.values, padded(r.values->dim), padded(r.values->dim)} {
        // Channels beyond dim are zero and never written again.
        std::memset(s.keys, 0, sizeof s.keys);
        std::memset(s.values, 0, sizeof s.values);
        std::memset(s.q, 0, sizeof s.q);
        std::memset(s.rest, 0, sizeof s.rest);
    }

    static int64_t positions(const kvant_request &r) { return std::max<int64_t>(1, MANY / r.group); }

    // Compute the queries at [first, stop) of one key head, into `out` and `lse`.
    void run(int64_t b, int64_t h, int64_t first_query, int64_t stop_query) {
        sequence = b, head = h, first = first_query, stop = stop_query;
        many = (int)((stop - first) * r.group);
        read_queries();
        const Reads reads(r, b);
        Segments all;
        shared.begin();
        for (int64_t query = first; query < stop; query++) {
            all.widen(s.seen[query - first] = Segments(r, reads, query));
            shared.narrow(s.seen[query - first]);
        }
        const Walk walk(r, b, reads, all);
        for (int64_t i = 0; i < walk.total; i++) {
            const Span now = walk.at(i), next = walk.at(std::min(i + 1, walk.total - 1));
            block(now, next);
        }
        for (int m = 0; m < many; m++) write_query(m);
    }

private:
    static constexpr bool PAIRED = EACH<Number> == 2;

    const kvant_request &r;
    const SideTables &keys, &values;
    ChunkScratch<Number> &s;
    const Tile<Number> key_tile, value_tile;
    const Products products{};
    Shared shared;
    int64_t sequence = 0, head = 0, first = 0, stop = 0;
    int many = 0;
    bool exact = true;  // whether all queries are exact in this number type

    static int padded(int64_t dim) { return (int)((dim + GRAIN - 1) / GRAIN * GRAIN); }
    int64_t query_of(int m) const { return first + m / r.group; }
    int64_t head_of(int m) const { return head * r.group + m % r.group; }

    void read_queries() {
        const int64_t width = key_tile.width / EACH<Number>;
        exact = true;
        for (int m = 0; m < many; m++) {
            alignas(64) float q[MAX_DIM];
            read_query(r, sequence, head_of(m), query_of(m), q);
            put_query(q, s.q + m * width, s.rest + m * width);
            s.top[m] = NOTHING;
            store(s.totals[m], zero());
            for (int d = 0; d < value_tile.width; d += 16) store(s.acc + m * OUT_PITCH + d, zero());
        }
    }

    void put_query(const float *q, float *to, float *) {
        for (int d = 0; d < r.keys->dim; d += 16) store(to + d, load(q + d));
    }

    // Store queries as 16-bit floats, and the rounding errors as `rest`.
    void put_query(const float *q, uint32_t *to, uint32_t *rest) {
        F nonfinite = zero();
        for (int d = 0; d < r.keys->dim; d += 16) {
            const F x = load(q + d), over = sub(x, rounded(x));
            store((Bfloat *)to + d, x);
            store((Bfloat *)rest + d, over);
            nonfinite = max(nonfinite, abs(over));
        }
        exact = exact && !any_above(nonfinite, 0.0f);
    }

    void block(const Span &span, const Span &next) {
        open(span, next);
        const bool all = shared.hold(span), nonfinite = !all && has_nonfinite_values();
        for (int m = 0; m < many; m += TOGETHER)
            attend_together(span, m, std::min(TOGETHER, many - m), all, nonfinite);
    }

    // Add a block to queries [first, first + count); `all`: every query sees all its rows.
    void attend_together(const Span &span, int first, int count, bool all, bool nonfinite) {
        const int64_t width = key_tile.width / EACH<Number>;
        products.scores(key_tile, s.q + first * width, width, false, count, s.scores);
        if (!exact) products.scores(key_tile, s.rest + first * width, width, true, count, s.scores);
        uint64_t seen[TOGETHER];
        for (int i = 0; i < count; i++) {
            seen[i] = all ? ALL : seen_rows(span, s.seen[(first + i) / r.group]);
            soften_one(first + i, seen[i], s.scores + i * PITCH, s.weights + i * PITCH);
        }
        float *acc = s.acc + first * OUT_PITCH;
        if (!nonfinite) return products.sums(value_tile, weights_of(0), count, acc);
        for (int i = 0; i < count; i++) weigh(weights_of(i), seen[i], acc + i * OUT_PITCH);
    }

    const Number *weights_of(int i) const {
        if constexpr (PAIRED) return (const uint32_t *)s.weights + i * (PITCH / 2);
        else return s.scores + i * PITCH;
    }

    // Convert the scores of query m to weights.
    void soften_one(int m, uint64_t seen, float *at, Bfloat *weights) {
        float scale = (float)r.scale;
        const auto fade = [&](float factor) { this->fade(m, factor); };
        if (!PAIRED || seen != ALL || r.softcap != 0.0) cap(at, scale, (float)r.softcap), scale = 1.0f;
        for (int i = 0; seen != ALL && i < BLOCK; i++)
            if (!(seen >> i & 1)) at[i] = NOTHING;
        if constexpr (PAIRED)
            soften_pairs(s.top[m], s.totals[m], at, scale, (uint32_t *)weights, fade);
        else
            soften(s.top[m], s.totals[m], at, nullptr, fade);
    }

    // Decode the rows of a block from its first one on, whether visible or not.
    void open(Span span, const Span &next) {
        span.first = 0;
        if (span.part == Part::sealed) span.stop = BLOCK;
        open_side<true>({*r.keys, keys, r.own_keys}, span, next, key_tile);
        open_side<false>({*r.values, values, r.own_values}, span, next, value_tile);
    }

    template <bool KEYS>
    void open_side(const Source &from, const Span &span, const Span &next,
                   const Tile<Number> &tile) const {
        const Ahead ahead = kvant::KVANT_TARGET::ahead(from, next, sequence, head);
        if (is_coded(from.side, span)) {
            SealedBlock block = sealed_block(from, span, head);
            block.ahead = ahead;
            open_sealed<KEYS>(block, from.tables, tile);
        } else {
            RowBlock block = row_block(from, span, sequence, head);
            block.ahead = ahead;
            open_dense<KEYS>(block, from.side.dtype, (int)from.side.dim, tile);
        }
    }

    // The rows of a block that a query sees.
    static uint64_t seen_rows(const Span &span, const Segments &segments) {
        uint64_t seen = 0;
        for (int i = 0; i < segments.count; i++) {
            const Segment &run = segments.list[i];
            // Two runs of one part may touch the block: take only rows of this span.
            if (run.part == span.part)
                seen |= rows_between(std::max<int64_t>(run.first - span.begin, span.first),
                                     std::min<int64_t>(run.stop - span.begin, span.stop));
        }
        return seen;
    }

    void fade(int m, float factor) {
        for (int d = 0; d < value_tile.width; d += 16) {
            float *at = s.acc + m * OUT_PITCH + d;
            store(at, mul(load(at), set1(factor)));
        }
    }

    bool has_nonfinite_values() const {
        F x = zero(), y = zero();
        for (int64_t i = 0; i < BLOCK / EACH<Number> * value_tile.pitch; i += 32) {
            x = times(x, load_line(s.values + i), Number());
            y = times(y, load_line(s.values + i + 16), Number());
        }
        return sum(add(x, y)) != 0.0f;  // NaN
    }

    static float one_of(float x, int) { return x; }
    static float one_of(uint32_t pair, int i) {
        return float_of(i % 2 ? pair & 0xffff0000u : pair << 16);
    }

    // Zero times NaN is NaN: if rows are hidden, add row by row and skip rows without weight.
    void weigh(const Number *w, uint64_t seen, float *acc) const {
        for (int i = 0; i < BLOCK; i++) {
            const float factor = one_of(w[i / EACH<Number>], i);
            if (seen != ALL && factor == 0.0f) continue;
            const Number *row = s.values + i / EACH<Number> * value_tile.pitch;
            for (int64_t d = 0; d < r.values->dim; d++) acc[d] += factor * one_of(row[d], i);
        }
    }

    void write_query(int m) {
        const int64_t heads = r.heads * r.group, dim = r.values->dim, at = head_of(m);
        const int64_t row = (sequence * heads + at) * r.queries + query_of(m);
        float top = s.top[m], total = sum(load(s.totals[m])), factor = 1.0f;
        if (r.sink_logits) {
            const float sink = r.sink_logits[at], old = top;
            top = sink <= top ? top : sink;
            const float finite = top == NOTHING ? 0.0f : top;
            factor = std::exp(old - finite);
            total = total * factor + std::exp(sink - finite);
        }
        factor = total == 0.0f ? 0.0f : factor / total;
        float *out = s.acc + m * OUT_PITCH;
        for (int64_t d = 0; d < dim; d++) out[d] *= factor;
        write_out(r, row, out);
        if (r.lse) r.lse[row] = top + std::log(total);
    }
};

// A unit is up to MANY queries of one head. Units of long sequences start first, so that none of
// them runs alone at the end.
template <class Number> class AttendMany {
public:
    explicit AttendMany(const kvant_request &r)
        : r(r), keys(*r.keys), values(*r.values), order(r.extent->batch) {
        step = Chunk<Number>::positions(r);
        pieces = (r.queries + step - 1) / step;
        units = r.extent->batch * r.heads * pieces;
        for (int64_t b = 0; b < r.extent->batch; b++) order[b] = b;
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
            return Reads(r, a).end > Reads(r, b).end;
        });
    }

    void run() {
        const int64_t threads = std::min(r.threads, units);
        in_parallel((int)threads, [](void *self) { ((AttendMany *)self)->work(); }, this);
    }

private:
    const kvant_request &r;
    SideTables keys, values;
    std::vector<int64_t> order;
    int64_t step, pieces, units;
    std::atomic<int64_t> next{0};

    void work() {
        const std::unique_ptr<ChunkScratch<Number>> scratch(new ChunkScratch<Number>);
        Chunk<Number> chunk(r, keys, values, *scratch);
        for (int64_t i; (i = next.fetch_add(1)) < units;) {
            const int64_t pair = i / pieces, first = i % pieces * step;
            chunk.run(order[pair / r.heads], pair % r.heads, first,
                      std::min(first + step, r.queries));
        }
    }
};

}  // namespace kvant::KVANT_TARGET
