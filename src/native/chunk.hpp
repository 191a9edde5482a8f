// Attention of many query positions: each block of rows is opened once for up to MANY queries.
//
// Rows with 16 bits or fewer of their own are multiplied as 16-bit floats where the processor can,
// the others (whole numbers of 8 bits, halves, floats) in single precision. Masks are runs of rows, as in
// decoding; where a query sees only a part of a block its other scores are set aside.
#pragma once

#include <memory>

#include "softmax.hpp"
#include "tile.hpp"

namespace kvant::KVANT_TARGET {

constexpr int MANY = 128;  // queries, all of them of one key head

struct ChunkScratch {
    alignas(64) float keys[BLOCK * MAX_DIM], values[BLOCK * MAX_DIM];
    alignas(64) uint32_t key_pairs[BLOCK * MAX_DIM / 2], value_pairs[BLOCK * MAX_DIM / 2];
    alignas(64) float q[MANY * MAX_DIM];
    alignas(64) uint32_t q_pairs[MANY * MAX_DIM / 2], q_rest[MANY * MAX_DIM / 2];
    alignas(64) float scores[MANY * PITCH];
    alignas(64) Bfloat weights[MANY * PITCH];
    alignas(64) float acc[MANY * MAX_DIM];
    alignas(64) float totals[MANY][16];
    float top[MANY];
    Segments seen[MANY];  // by each position
};

// Does a side keep what it has as 16-bit floats?
inline bool in_pairs(const kvant_side &side) {
    return KVANT_BFLOAT_DOT && !in_quads(side) && side.dtype == KVANT_BF16;
}

#if KVANT_BFLOAT_DOT
// Lines of 16 lanes, two and two as pairs.
inline void pair_lines(const float *from, int64_t lines, int64_t width, uint32_t *to) {
    for (int64_t i = 0; i < lines; i += 2)
        for (int64_t d = 0; d < width; d += 16)
            storei(to + i / 2 * width + d,
                   paired(load(from + i * width + d), load(from + (i + 1) * width + d)));
}
#endif

// Scores of MQ queries with all rows of a block, or more of them.
template <int MQ, class Number, class Query>
inline void tile_scores(const Number *keys, int steps, const Query *q, int64_t pitch, bool more,
                        float *s) {
    F acc[MQ][BLOCK / 16];
    for (int m = 0; m < MQ; m++)
        for (int t = 0; t < BLOCK / 16; t++)
            acc[m][t] = more ? load(s + m * PITCH + 16 * t) : zero();
    for (int d = 0; d < steps; d++)
        for (int t = 0; t < BLOCK / 16; t++) {
            const auto k = load_line(keys + 16 * ((int64_t)t * steps + d));
            for (int m = 0; m < MQ; m++) acc[m][t] = times(acc[m][t], k, q[m * pitch + d]);
        }
    for (int m = 0; m < MQ; m++)
        for (int t = 0; t < BLOCK / 16; t++) store(s + m * PITCH + 16 * t, acc[m][t]);
}

// acc of MQ queries += weights times NC vectors of channels; `lines` of values, a weight for each.
template <int MQ, int NC, class Number>
inline void tile_values(const Number *values, int lines, int64_t dim, const Number *weights,
                        int64_t pitch, float *acc) {
    F sum[MQ][NC];
    for (int m = 0; m < MQ; m++)
        for (int c = 0; c < NC; c++) sum[m][c] = load(acc + m * MAX_DIM + 16 * c);
    for (int r = 0; r < lines; r++)
        for (int c = 0; c < NC; c++) {
            const auto v = load_line(values + r * dim + 16 * c);
            for (int m = 0; m < MQ; m++) sum[m][c] = times(sum[m][c], v, weights[m * pitch + r]);
        }
    for (int m = 0; m < MQ; m++)
        for (int c = 0; c < NC; c++) store(acc + m * MAX_DIM + 16 * c, sum[m][c]);
}

template <int MQ, class Number>
inline void tile_rows(const Number *values, int lines, int dim, const Number *weights,
                      int64_t pitch, float *acc) {
    int d = 0;
    for (; d + 64 <= dim; d += 64)
        tile_values<MQ, 4>(values + d, lines, dim, weights, pitch, acc + d);
    for (; d < dim; d += 16)
        tile_values<MQ, 1>(values + d, lines, dim, weights, pitch, acc + d);
}

class Chunk {
public:
    Chunk(const kvant_request &r, const SideTables &keys, const SideTables &values, ChunkScratch &s)
        : r(r), keys(keys), values(values), s(s) {}

    static int64_t positions(const kvant_request &r) { return std::max<int64_t>(1, MANY / r.group); }

    // Queries at [first, stop) of one key head, into `out` and `lse`.
    void run(int64_t b, int64_t h, int64_t first_query, int64_t stop_query) {
        sequence = b, head = h, first = first_query, stop = stop_query;
        many = (int)((stop - first) * r.group);
        take_queries();
        const Reads there(r, b);
        Segments all;
        for (int64_t query = first; query < stop; query++)
            all.widen(s.seen[query - first] = Segments(r, there, query));
        const Walk walk(r, b, there, all);
        for (int64_t i = 0; i < walk.total; i++) block(walk.at(i));
        for (int m = 0; m < many; m++) give(m);
    }

private:
    const kvant_request &r;
    const SideTables &keys, &values;
    ChunkScratch &s;
    int64_t sequence = 0, head = 0, first = 0, stop = 0;
    int many = 0;
    bool exact = true;  // are the queries 16-bit floats as they came?

    int64_t query_of(int m) const { return first + m / r.group; }
    int64_t head_of(int m) const { return head * r.group + m % r.group; }

    // Two channels of a query as 16-bit floats, and what that leaves over.
    void halve(const float *q, int64_t at) {
        s.q_pairs[at] = pair_of(q[0], q[1]);
        const float a = q[0] - float_of(s.q_pairs[at] << 16);
        const float b = q[1] - float_of(s.q_pairs[at] & 0xffff0000u);
        s.q_rest[at] = pair_of(a, b);
        exact = exact && a == 0.0f && b == 0.0f;
    }

    void take_queries() {
        const int64_t dim = r.keys->dim;
        exact = true;
        for (int m = 0; m < many; m++) {
            float *q = s.q + m * dim;
            read_query(r, sequence, head_of(m), query_of(m), q);
            for (int64_t d = 0; d < dim; d += 2)
                halve(q + d, (m * dim + d) / 2);
            s.top[m] = NOTHING;
            store(s.totals[m], zero());
            for (int d = 0; d < r.values->dim; d += 16) store(s.acc + m * MAX_DIM + d, zero());
        }
    }

    void block(const Span &span) {
        open(span);
        score();
        bool hidden[MANY];
        for (int m = 0; m < many; m++) {
            float *at = s.scores + m * PITCH;
            cap(at, (float)r.scale, (float)r.softcap);
            hidden[m] = hide(span, m, at);
            soften(s.top[m], s.totals[m], at, in_pairs(*r.values) ? s.weights + m * PITCH : nullptr,
                   [&](float by) { fade(m, by); });
        }
        if (odd_values())
            for (int m = 0; m < many; m++) hidden[m] ? weigh_seen(m) : weigh(m, 1);
        else
            weigh(0, many);
    }

    // Rows of a page from its first on, whatever is seen of them.
    void open(Span span) {
        span.first = 0;
        if (span.part == Part::sealed) span.stop = BLOCK;
        if (is_coded(*r.keys, span))
            open_sealed<true>(sealed_block(*r.keys, span, head), keys, s.keys);
        else
            open_dense<true>(row_block({*r.keys, r.own_keys}, span, sequence, head), r.keys->dtype,
                             (int)r.keys->dim, s.keys);
        if (is_coded(*r.values, span))
            open_sealed<false>(sealed_block(*r.values, span, head), values, s.values);
        else
            open_dense<false>(row_block({*r.values, r.own_values}, span, sequence, head), r.values->dtype,
                              (int)r.values->dim, s.values);
#if KVANT_BFLOAT_DOT
        if (in_pairs(*r.keys)) pair_lines(s.keys, BLOCK / 16 * r.keys->dim, 16, s.key_pairs);
        if (in_pairs(*r.values)) pair_lines(s.values, BLOCK, r.values->dim, s.value_pairs);
#endif
    }

    void score() {
        const int dim = (int)r.keys->dim;
        by_four(many, [&](auto n, int m) {
            constexpr int MQ = decltype(n)::value;
            float *at = s.scores + m * PITCH;
#if KVANT_BFLOAT_DOT
            if (in_pairs(*r.keys)) {
                const int half = dim / 2;
                tile_scores<MQ>(s.key_pairs, half, s.q_pairs + m * half, half, false, at);
                if (!exact)
                    tile_scores<MQ>(s.key_pairs, half, s.q_rest + m * half, half, true, at);
                return;
            }
#endif
            tile_scores<MQ>(s.keys, dim, s.q + m * dim, dim, false, at);
        });
    }

    // Scores of rows that query m does not see are set to nothing; are there any?
    bool hide(const Span &span, int m, float *at) const {
        bool seen[BLOCK] = {};
        const Segments &segments = s.seen[m / r.group];
        const int64_t begin = span.begin;
        int count = 0;
        for (int i = 0; i < segments.count; i++) {
            const Segment &run = segments.list[i];
            if (run.part != span.part) continue;
            // There may be two runs of one part in reach: only this span's rows are in the block.
            const int64_t a = std::max<int64_t>(run.first - begin, span.first);
            const int64_t z = std::min<int64_t>(run.stop - begin, span.stop);
            for (int64_t row = a; row < z; row++) seen[row] = true, count++;
        }
        if (count == BLOCK) return false;
        for (int i = 0; i < BLOCK; i++)
            if (!seen[i]) at[i] = NOTHING;
        return true;
    }

    void fade(int m, float by) {
        for (int d = 0; d < r.values->dim; d += 16) {
            float *at = s.acc + m * MAX_DIM + d;
            store(at, mul(load(at), set1(by)));
        }
    }

    bool odd_values() const {
        F x = zero();
        for (int i = 0; i < BLOCK * r.values->dim; i += 16)
            x = fma(load(s.values + i), zero(), x);
        return sum(x) != 0.0f;  // NaN
    }

    void weigh(int from, int count) {
        const int dim = (int)r.values->dim;
        by_four(count, [&](auto n, int i) {
            constexpr int MQ = decltype(n)::value;
            const int m = from + i;
            float *acc = s.acc + m * MAX_DIM;
#if KVANT_BFLOAT_DOT
            if (in_pairs(*r.values))
                return tile_rows<MQ>(s.value_pairs, BLOCK / 2, dim,
                                     (const uint32_t *)(s.weights + m * PITCH), PITCH / 2, acc);
#endif
            tile_rows<MQ>(s.values, BLOCK, dim, s.scores + m * PITCH, PITCH, acc);
        });
    }

    // Zero times NaN is NaN: what is not seen is left out, row by row.
    void weigh_seen(int m) {
        for (int i = 0; i < BLOCK; i++) {
            const float w = s.scores[m * PITCH + i];
            if (w == 0.0f) continue;
            for (int64_t d = 0; d < r.values->dim; d++)
                s.acc[m * MAX_DIM + d] += w * s.values[i * r.values->dim + d];
        }
    }

    void give(int m) {
        const int64_t heads = r.heads * r.group, dim = r.values->dim, at = head_of(m);
        const int64_t row = (sequence * heads + at) * r.queries + query_of(m);
        float top = s.top[m], total = sum(load(s.totals[m])), by = 1.0f;
        if (r.sink_logits) {
            const float sink = r.sink_logits[at], old = top;
            top = sink <= top ? top : sink;
            const float finite = top == NOTHING ? 0.0f : top;
            by = std::exp(old - finite);
            total = total * by + std::exp(sink - finite);
        }
        by = total == 0.0f ? 0.0f : by / total;
        float *out = s.acc + m * MAX_DIM;
        for (int64_t d = 0; d < dim; d++) out[d] *= by;
        write_out(r, row, out);
        if (r.lse) r.lse[row] = top + std::log(total);
    }
};

}  // namespace kvant::KVANT_TARGET
