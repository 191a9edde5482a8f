// Products of up to TOGETHER queries with a decoded block, on vectors.
#pragma once

#include "decoded_block.hpp"

namespace kvant::KVANT_TARGET {

constexpr int GRAIN = 16;     // channels of a decoded row are padded to a multiple

struct Products {
    // Scores [count][PITCH] with all rows of a block, of queries [count][stride]; added to the
    // present ones if `more`.
    template <class Number>
    void scores(const Tile<Number> &keys, const Number *q, int64_t stride, bool more, int count,
                float *s) const {
        const int steps = keys.width / EACH<Number>;
        by_queries(count, [&](auto n, int m) {
            for (int t = 0; t < BLOCK / 16; t += PRODUCT_VECTORS)
                score<n.value>(keys.to + 16 * (int64_t)t * steps, steps, q + m * stride, stride,
                               more, s + m * PITCH + 16 * t);
        });
    }

    // acc [count][OUT_PITCH] += weights [count][PITCH] of the rows of a block times their channels.
    template <class Number>
    void sums(const Tile<Number> &values, const Number *weights, int count, float *acc) const {
        by_queries(count, [&](auto n, int m) {
            constexpr int MQ = n.value, NC = PRODUCT_VECTORS;
            const Number *w = weights + m * (PITCH / EACH<Number>);
            float *to = acc + m * OUT_PITCH;
            int d = 0;
            for (; d + 16 * NC <= values.width; d += 16 * NC)
                sum<MQ, NC>(values.to + d, values.pitch, w, to + d);
            for (; d < values.width; d += 16) sum<MQ, 1>(values.to + d, values.pitch, w, to + d);
        });
    }

private:
    // Call f(Int<n>, first) for `count` queries, PRODUCT_QUERIES at a time, the rest in fours.
    template <class Fn> static void by_queries(int count, Fn f) {
        constexpr int N = PRODUCT_QUERIES;
        int m = 0;
        if constexpr (N > 4)
            for (int left = count; left >= N && left != 8; left -= N, m += N) f(Int<N>(), m);
        by_four(count - m, [&](auto n, int first) { f(n, m + first); });
    }

    // Scores of MQ queries with 16 * PRODUCT_VECTORS rows.
    template <int MQ, class Number>
    static void score(const Number *keys, int steps, const Number *q, int64_t stride, bool more,
                      float *s) {
        constexpr int NT = PRODUCT_VECTORS;
        F acc[MQ][NT];
        for (int m = 0; m < MQ; m++)
            for (int t = 0; t < NT; t++) acc[m][t] = more ? load(s + m * PITCH + 16 * t) : zero();
        for (int d = 0; d < steps; d++)
            for (int t = 0; t < NT; t++) {
                const auto k = load_line(keys + 16 * ((int64_t)t * steps + d));
                for (int m = 0; m < MQ; m++) acc[m][t] = times(acc[m][t], k, q[m * stride + d]);
            }
        for (int m = 0; m < MQ; m++)
            for (int t = 0; t < NT; t++) store(s + m * PITCH + 16 * t, acc[m][t]);
    }

    // Add weights times NC vectors of channels to the sums of MQ queries.
    template <int MQ, int NC, class Number>
    static void sum(const Number *values, int64_t pitch, const Number *weights, float *acc) {
        constexpr int lines = BLOCK / EACH<Number>, w_pitch = PITCH / EACH<Number>;
        F x[MQ][NC];
        for (int m = 0; m < MQ; m++)
            for (int c = 0; c < NC; c++) x[m][c] = load(acc + m * OUT_PITCH + 16 * c);
        for (int r = 0; r < lines; r++)
            for (int c = 0; c < NC; c++) {
                const auto v = load_line(values + r * pitch + 16 * c);
                for (int m = 0; m < MQ; m++) x[m][c] = times(x[m][c], v, weights[m * w_pitch + r]);
            }
        for (int m = 0; m < MQ; m++)
            for (int c = 0; c < NC; c++) store(acc + m * OUT_PITCH + 16 * c, x[m][c]);
    }
};

}  // namespace kvant::KVANT_TARGET
