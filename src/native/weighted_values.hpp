// Weighted sums of the values of one block of rows, in any format.
#pragma once

#include "scores.hpp"

namespace kvant::KVANT_TARGET {

// Running sums of each query: [channels], then for each group the weighted biases that its channels
// share, as 16 lanes that are summed at the end.
struct Sums {
    static constexpr int WIDTH = MAX_DIM + 16 * MAX_GROUPS;
    int dim, groups;
    alignas(64) float acc[MAX_GROUP][WIDTH];

    void clear(int group, const kvant_side &side) {
        dim = (int)side.dim;
        groups = side.format == KVANT_AFFINE ? (int)((dim + side.group - 1) / side.group) : 0;
        for (int g = 0; g < group; g++) fade(g, 0.0f);
    }
    float *biases(int g) { return acc[g] + MAX_DIM; }

    // Multiply the sums of query g; a factor of zero clears them, NaN included.
    void fade(int g, float factor) {
        const F by = set1(factor);
        const auto scaled = [&](float *p) { store(p, factor == 0.0f ? zero() : mul(load(p), by)); };
        for (int d = 0; d < dim; d += 16) scaled(acc[g] + d);
        for (int u = 0; u < groups; u++) scaled(biases(g) + 16 * u);
    }

    void finish(int g, int64_t width) {
        for (int u = 0; u < groups; u++) {
            const float bias = sum(load(biases(g) + 16 * u));
            for (int64_t d = u * width; d < dim && d < (u + 1) * width; d++) acc[g][d] += bias;
        }
    }
};

// Weights of one block, in the forms that the kernels of sealed values take.
struct Weights {
    alignas(64) Bfloat rows[MAX_GROUP][PITCH];  // for dense rows; zero after a block
    alignas(64) uint32_t pairs[MAX_GROUPS][MAX_GROUP][BLOCK / 2];
    alignas(64) uint32_t fours[MAX_GROUPS][MAX_GROUP][BLOCK / 2];  // FixedWeights
    alignas(64) Fine fine[MAX_GROUP][BLOCK / 2];
    float step[MAX_GROUPS][MAX_GROUP];

    const uint32_t *fours_of(int u, int g, uint32_t) const { return fours[u][g]; }
    const Fine *fours_of(int, int g, Fine) const { return fine[g]; }

    Weights() {
        for (auto &row : rows) std::memset(row + BLOCK, 0, (PITCH - BLOCK) * sizeof *row);
    }
};

// Scales and biases of one group of channels, for the rows of a block. With `even`, biases are in
// units of the scale and use the same rounded weights as the codes. Otherwise an outlier, which
// makes the scale large, would make the rounding visible in its whole group.
struct Params {
    F scale[BLOCK / 16], bias[BLOCK / 16];
    bool even;
    Params(const SealedBlock &block, int u, float middle, bool even) : even(even) {
        for (int t = 0; t < BLOCK / 16; t++) {
            const int at = (t * block.groups + u) * 16;
            fetch((const char *)(block.scale + at) + block.to_next_scale);
            scale[t] = load(block.scale + at);
            if (even) scale[t] = where_zero(scale[t], set1(1.0f), scale[t]);
            if (!block.bias) continue;
            fetch((const char *)(block.bias + at) + block.to_next_scale);
            bias[t] = fma(scale[t], set1(middle), load(block.bias + at));
            if (even) bias[t] = divide(bias[t], scale[t]);
        }
    }
};

// Store weights times scales in w, and add the weighted biases to `biases`. With HIDDEN rows, rows
// without weight contribute nothing, even if their scale is NaN.
template <bool BIASED, bool HIDDEN>
inline void weigh(const Params &params, const float *p, F *w, float *biases) {
    F total = BIASED ? load(biases) : zero();
    for (int t = 0; t < BLOCK / 16; t++) {
        const F x = load(p + 16 * t);
        w[t] = mul(x, params.scale[t]);
        if (HIDDEN) w[t] = where_zero(x, zero(), w[t]);
        if (!BIASED) continue;
        const F bias = HIDDEN ? where_zero(x, zero(), params.bias[t]) : params.bias[t];
        total = fma(params.even ? rounded(w[t]) : x, bias, total);
    }
    if (BIASED) store(biases, total);
}

inline void weigh(const Params &params, const float *p, bool biased, bool hidden, F *w,
                  float *biases) {
    if (hidden)
        biased ? weigh<true, true>(params, p, w, biases) : weigh<false, true>(params, p, w, biases);
    else
        biased ? weigh<true, false>(params, p, w, biases) : weigh<false, false>(params, p, w, biases);
}

inline void store_pairs(const F *w, uint32_t *pairs) {
    for (int t = 0; t < BLOCK / 16; t++) store((Bfloat *)pairs + 16 * t, swapped(w[t]));
}

inline void store_fine(const F *w, Fine *fine) {
    for (int t = 0; t < BLOCK / 16; t++) store_fine(fine + 8 * t, swapped(w[t]));
}

// Return the step of which the weights of a query become multiples; NaN if one is not finite.
inline float choose_step(const F *w) {
    I largest_bits = zeros();
    for (int t = 0; t < BLOCK / 16; t++) largest_bits = max(largest_bits, magnitudes(w[t]));
    const float top = finite_magnitude(largest_bits);
    return (top < 1e-30f ? 1e-30f : top) * (1.0f / FIXED);  // NaN stays NaN
}

template <bool TABLE> inline void store_fours(const F *w, float step, uint32_t *fours) {
    const F by = set1(1.0f / step);
    for (int t = 0; t < BLOCK / 16; t++) store_fixed<TABLE>(fours + 8 * t, to_int(mul(w[t], by)));
}

inline void make_weights(const SealedBlock &block, const SideTables &side, const float *p,
                         int group, bool hidden, Weights &weights, Sums &sums) {
    F w[MAX_GROUP][BLOCK / 16];
    for (int u = 0; u < block.groups; u++) {
        const bool even = !side.quads && block.bias && (side.bits == 5 || side.bits == 6);
        const Params params(block, u, side.quads ? side.fixed.middle : side.list.middle, even);
        for (int g = 0; g < group; g++)
            weigh(params, p + g * PITCH, block.bias, hidden, w[g], sums.biases(g) + 16 * u);
        float *step = weights.step[u];
        if (side.bytes || (side.quads && side.bits < 8)) {
            for (int g = 0; g < group; g++) step[g] = choose_step(w[g]);
            for (int g = 0; g < group; g++)
                side.codebook ? store_fours<true>(w[g], step[g], weights.fours[u][g])
                              : store_fours<false>(w[g], step[g], weights.fours[u][g]);
        } else if (side.bits == 8) {
            for (int g = 0; g < group; g++) step[g] = 1.0f, store_fine(w[g], weights.fine[g]);
        } else {
            for (int g = 0; g < group; g++) store_pairs(w[g], weights.pairs[u][g]);
        }
    }
}

inline void dense_values(const RowBlock &rows, int64_t dtype, int group, const float *p,
                         [[maybe_unused]] const Weights &weights, int lead, Sums &sums) {
    const int dim = sums.dim;
    by_four(group, [&](auto n, int g) {
        constexpr int GN = decltype(n)::value;
        const float *w = p + g * PITCH + lead;
        float *acc = sums.acc[g];
#if KVANT_BFLOAT_DOT
        if (dtype == KVANT_BF16)
            return bfloat_values<GN>(rows, weights.rows[g] + lead, w, dim, acc, Sums::WIDTH);
#endif
        if (dtype == KVANT_BF16) row_values<Bfloat, GN>(rows, w, dim, acc, Sums::WIDTH);
        if (dtype == KVANT_F16) row_values<Half, GN>(rows, w, dim, acc, Sums::WIDTH);
        if (dtype == KVANT_F32) row_values<float, GN>(rows, w, dim, acc, Sums::WIDTH);
    });
}

#if !KVANT_INTEGER_CODES

template <int BITS, int GN>
inline void coded_values(const SealedBlock &block, const SideTables &side,
                         const Levels<BITS> &levels, int first, int stop, const uint32_t *w,
                         float *acc) {
    constexpr int64_t pitch = BLOCK / 2;
    if (side.span == 32)
        pair_values<BITS, 32, GN>(block, levels, first, stop, w, pitch, acc, Sums::WIDTH);
    else if constexpr (BITS != 3 && BITS != 5)
        pair_values<BITS, 16, GN>(block, levels, first, stop, w, pitch, acc, Sums::WIDTH);
}

#endif

inline void sealed_values(const SealedBlock &block, const SideTables &side, int group,
                          const Weights &weights, Sums &sums) {
    const auto group_stop = [&](int first) { return std::min(block.dim, first + block.group); };
    if (side.quads)
        return with_words(side, [&](auto bits, auto span, const auto &words) {
            using Number = typename std::decay_t<decltype(words)>::Number;
            for (int u = 0, first = 0; u < block.groups; u++, first += block.group)
                by_four(group, [&](auto n, int g) {
                    const FixedWeights<Number> fixed{weights.fours_of(u, g, Number()), weights.step[u] + g};
                    quad_values<bits.value, span.value, n.value>(
                        block, words, side.fixed.unit, first, group_stop(first), fixed,
                        sums.acc[g], Sums::WIDTH);
                });
        });
#if !KVANT_INTEGER_CODES
    for (int u = 0, first = 0; u < block.groups; u++, first += block.group)
        by_four(group, [&](auto n, int g) {
            constexpr int GN = decltype(n)::value;
            float *acc = sums.acc[g];
            const uint32_t *w = weights.pairs[u][g];
            const Tables &t = side.tables;
            switch (side.bits) {
            case 8:
                return pair_values<8, 16, GN>(block, t.eight, first, group_stop(first), weights.fine[g],
                                              BLOCK / 2, acc, Sums::WIDTH);
            case 6: return coded_values<6, GN>(block, side, t.six, first, group_stop(first), w, acc);
            case 5: return coded_values<5, GN>(block, side, t.five, first, group_stop(first), w, acc);
            case 4: return coded_values<4, GN>(block, side, t.four, first, group_stop(first), w, acc);
            case 3: return coded_values<3, GN>(block, side, t.three, first, group_stop(first), w, acc);
            case 2: return coded_values<2, GN>(block, side, t.two, first, group_stop(first), w, acc);
            }
        });
#endif
}

}  // namespace kvant::KVANT_TARGET
