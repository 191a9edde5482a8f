// Products with sealed codes. Codes are their own levels, or are looked up in a table of levels of 12
// bits (15 bits, as two bytes), and are multiplied as integers by numbers of at most 15 bits. Floats
// of 8 bits are multiplied in single precision.
//
// Queries and weights are converted to fixed point: its error is a tenth of the format's, or less. A
// lane is a row (keys) or a channel (values), as in float_codes.hpp. The levels and the sums of a format
// are of its types `Words` and `Words::Sums`, which depend on the instruction set (vec.hpp). Where
// sums of 16 lanes do not fit the registers, they have PARTS, one after the other. STEP fours are
// multiplied together. Codes of 8 bits may be stored as signed bytes, less by MIDDLE.
#pragma once

#include <algorithm>

#include "kvant.h"
#include "float_codes.hpp"

namespace kvant::KVANT_TARGET {

template <int N> struct Int {
    static constexpr int value = N;
};

// Whether the codes of a side are 8-bit integers.
inline bool has_bytes(const kvant_side &side) {
    return side.format == KVANT_AFFINE && side.bits == 8;
}

// Whether the codes of a side are multiplied in fours, not as pairs of 16-bit floats.
inline bool in_quads(const kvant_side &side) {
    return KVANT_INTEGER_CODES ? side.format != KVANT_RAW : has_bytes(side);
}

// FIXED is the largest query or weight in fixed point, FIXED_TABLE_QUERY the largest query of a
// codebook. MAX_LEVEL is the largest level of a codebook, stored in steps of 1 / LEVEL_FRACTION. The
// sums of MAX_DIM products with levels, of BLOCK of them, and of a group of codes fit 32 bits.
constexpr float FIXED = 16256.0f;  // 127 * 128
#if KVANT_BYTE_DOT
constexpr int MAX_LEVEL = 127, LEVEL_FRACTION = 128;
constexpr float FIXED_TABLE_QUERY = FIXED;
#else
constexpr int MAX_LEVEL = 2047, LEVEL_FRACTION = 1;
constexpr float FIXED_TABLE_QUERY = 4095.0f;
#endif
static_assert((int64_t)FIXED_TABLE_QUERY * MAX_LEVEL * MAX_DIM < INT32_MAX);
static_assert((int64_t)FIXED * MAX_LEVEL * BLOCK < INT32_MAX);
static_assert((int64_t)INT16_MAX * 255 * MAX_GROUP_WIDTH < INT32_MAX);

// The magnitude whose bits are the largest; NaN if it is not finite.
inline float finite_magnitude(I largest_bits) {
    const int32_t bits = largest(largest_bits);
    return bits < 0x7f800000 ? float_of((uint32_t)bits) : __builtin_nanf("");
}

// Call f(Int<part>) for the parts of the sums of Words.
template <class Words, class Fn> inline void by_part(Fn f) {
    f(Int<0>());
    if constexpr (Words::PARTS == 2) f(Int<1>());
}

// The levels of STEP fours of codes: `codes(0)` and, if they are multiplied together, `codes(1)`.
template <class Words, class Fn> inline auto levels_of(const Words &words, Fn codes) {
    if constexpr (Words::STEP == 1) return words.at(codes(Int<0>()));
    else return words.at(together(codes(Int<0>()), codes(Int<1>())));
}

// Queries as fours [GN][MAX_DIM / 2] and the sums [GN][MAX_GROUPS] of their values, in units of
// each query's step.
template <class Number> struct FixedQueries {
    const Number *fours;
    const float *step, *sums;
};

// Convert a row of `dim` numbers to fours and to sums over groups of `width`; return the step.
template <bool TABLE>
inline float make_fours(const float *row, int dim, int width, uint32_t *fours, float *sums) {
    constexpr float limit = TABLE ? FIXED_TABLE_QUERY : FIXED;
    I top = zeros();
    for (int d = 0; d < dim; d += 16) top = max(top, magnitudes(load(row + d)));
    // Integers cannot represent NaN or infinity: a NaN step marks the whole row.
    const float size = finite_magnitude(top);
    const float step = (size < 1e-25f ? 1e-25f : size) * (1.0f / limit);
    for (int first = 0; first < dim; first += width) {
        F total = zero();  // of integers that are exact in a float
        for (int d = first; d < std::min(dim, first + width); d += 16) {
            const I n = to_int(mul(load(row + d), set1(1.0f / step)));
            store_fixed<TABLE>(fours + d / 2, n);
            total = add(total, to_float(n));
        }
        *sums++ = sum(total);
    }
    return step;
}

// Codes are prefetched per 4 channels where these fill whole lines, else per 16: spread out, prefetches
// delay loads less.
template <int BITS, int TILES, class Words>
constexpr bool FETCHES_QUADS = TILES * 8 * BITS % (Words::PARTS * LINE) == 0;

template <int BITS, int SPAN, int H, int Q, int GN, int TILES, class Words, class Sums>
inline void quad_products(Ahead &ahead, const uint8_t *low, const uint8_t *high, int tile,
                          const Words &words, const typename Words::Number *q,
                          Sums (&x)[TILES][GN]) {
    const auto levels = [&](int t) {
        return levels_of(words, [&](auto i) {
            return key_codes<BITS, SPAN, H, Q + i.value, 0>(low + t * tile, high + t * tile);
        });
    };
    decltype(levels(0)) codes[TILES];
    for (int t = 0; t < TILES; t++) codes[t] = levels(t);
    if constexpr (FETCHES_QUADS<BITS, TILES, Words>)
        ahead.fetch_next<TILES * 8 * BITS * Words::STEP / Words::PARTS>();
    for (int g = 0; g < GN; g++) {
        const typename Sums::Four four(q + g * (MAX_DIM / 2) + 2 * Q);
        for (int t = 0; t < TILES; t++) x[t][g].add(codes[t], four);
    }
}

// Add the products of 16 channels of the rows of TILES tiles.
template <int BITS, int SPAN, int H, int GN, int TILES, class Words, class Sums>
inline void quad_span(Ahead &ahead, const uint8_t *low, const uint8_t *high, int tile,
                      const Words &words, const typename Words::Number *q, Sums (&x)[TILES][GN]) {
    quad_products<BITS, SPAN, H, 0>(ahead, low, high, tile, words, q, x);
    if constexpr (Words::STEP == 1)
        quad_products<BITS, SPAN, H, 1>(ahead, low, high, tile, words, q, x);
    quad_products<BITS, SPAN, H, 2>(ahead, low, high, tile, words, q, x);
    if constexpr (Words::STEP == 1)
        quad_products<BITS, SPAN, H, 3>(ahead, low, high, tile, words, q, x);
}

// Store the products of the channels of group u of TILES tiles.
template <int BITS, int SPAN, class Sums, int GN, int TILES, class Words>
inline void quad_group(const SealedBlock &block, const uint8_t *low, const Words &words,
                       const typename Words::Number *q, int u, F (&products)[TILES][GN]) {
    using P = Planes<BITS>;
    Sums x[TILES][GN];
#pragma GCC unroll 2
    for (int i = 0; i < TILES; i++)
#pragma GCC unroll 4
        for (int g = 0; g < GN; g++) x[i][g].clear();
    constexpr int low_step = SPAN * P::LOW * 2, high_step = SPAN * P::HIGH * 2;
    const uint8_t *high = low + 2 * block.dim * P::LOW;
    const int tile = 16 * block.width, stop = std::min(block.dim, (u + 1) * block.group);
    for (int d = u * block.group; d < stop; d += 16) {
        const uint8_t *a = low + d / SPAN * low_step, *b = high + d / SPAN * high_step;
        if constexpr (!FETCHES_QUADS<BITS, TILES, Words>)
            block.ahead.fetch_next<TILES * 32 * BITS / Words::PARTS>();
        if (SPAN == 16 || d % SPAN == 0)
            quad_span<BITS, SPAN, 0>(block.ahead, a, b, tile, words, q + d / 2, x);
        else
            quad_span<BITS, SPAN, SPAN == 32>(block.ahead, a, b, tile, words, q + d / 2, x);
    }
#pragma GCC unroll 2
    for (int i = 0; i < TILES; i++)
#pragma GCC unroll 4
        for (int g = 0; g < GN; g++) x[i][g].put(products[i][g]);
}

// Compute scores [GN][PITCH]; `unit` is the value of one step of the levels.
template <int BITS, int SPAN, int GN, class Words>
void quad_scores(const SealedBlock &block, const Words &words, float unit,
                 const FixedQueries<typename Words::Number> &q, float *s) {
    constexpr int TILES = QUAD_TILES;
    for (int t = 0; t < block.rows / 16; t += TILES) {
        const uint8_t *codes = block.codes + t * 16 * block.width;
        F total[TILES][GN];
        for (auto &row : total)
            for (F &x : row) x = zero();
        for (int u = 0; u < block.groups; u++) {
            F products[TILES][GN];
            by_part<Words>([&](auto part) {
                using Sums = typename Words::template Sums<part.value>;
                quad_group<BITS, SPAN, Sums>(block, codes, words, q.fours, u, products);
            });
            for (int i = 0; i < TILES; i++) {
                const int at = ((t + i) * block.groups + u) * 16;
                fetch((const char *)(block.scale + at) + block.to_next_scale);
                const F scale = load(block.scale + at);
                for (int g = 0; g < GN; g++)
                    total[i][g] = fma(products[i][g], scale, total[i][g]);
                if (!block.bias && block.lowest == 0) continue;
                F bias = mul(scale, set1(block.lowest));
                if (block.bias) {
                    fetch((const char *)(block.bias + at) + block.to_next_scale);
                    bias = load(block.bias + at);
                }
                if (Words::MIDDLE) bias = fma(scale, set1(Words::MIDDLE), bias);
                for (int g = 0; g < GN; g++)
                    total[i][g] = fma(bias, set1(q.sums[g * MAX_GROUPS + u]), total[i][g]);
            }
        }
        for (int i = 0; i < TILES; i++)
            for (int g = 0; g < GN; g++)
                store(s + g * PITCH + 16 * (t + i), mul(total[i][g], set1(q.step[g] * unit)));
    }
}

// The codes of 16 channels of four rows; bits above a code are undefined.
template <int BITS, int SPAN, int HALF>
inline I value_quads(const uint8_t *low, [[maybe_unused]] const uint8_t *high) {
    using P = Planes<BITS>;
    using Low = Lanes<P::LOW, SPAN, HALF, 0>;
    const I x = Low::a(Low::codes(low, 0));
    if constexpr (P::HIGH == 0) {
        return x;
    } else {
        using High = Lanes<P::HIGH, SPAN, HALF, P::LOW>;
        return joined<BITS>(x, High::a(High::codes(high, 0)));
    }
}

// Weights as fours [GN][BLOCK / 2], one per four rows, in units of each query's step.
template <class Number> struct FixedWeights {
    const Number *fours;
    const float *step;
};

// Add weights times the channels [first, first + 16 NC) to acc [GN][stride]. HALF is the position of
// `first` in its span, by 16.
template <int BITS, int SPAN, int GN, int NC, int HALF, class Words>
void quad_values_part(const SealedBlock &block, const Words &words, float unit, int first,
                      const FixedWeights<typename Words::Number> &w, float *acc, int64_t stride) {
    static_assert(SPAN == 32 || HALF == 0);
    using P = Planes<BITS>;
    constexpr int low_step = SPAN * P::LOW / 2, high_step = SPAN * P::HIGH / 2;
    const uint8_t *lows = block.codes + first / SPAN * low_step;
    const uint8_t *highs = block.codes + block.dim * P::LOW / 2 + first / SPAN * high_step;
    const int quad = 4 * block.width;  // bytes of four rows
    Ahead ahead = block.ahead;
    F products[GN][NC];
    by_part<Words>([&](auto part) {
        using Sums = typename Words::template Sums<part.value>;
        Sums x[GN][NC];
#pragma GCC unroll 4
        for (int g = 0; g < GN; g++)
            for (int c = 0; c < NC; c++) x[g][c].clear();
        const uint8_t *low = lows, *high = highs;
        const auto levels = [&](int c) {
            const int span = (HALF + c) / (SPAN / 16);
            return levels_of(words, [&](auto i) {
                const uint8_t *a = low + i.value * quad + span * low_step;
                const uint8_t *b = high + i.value * quad + span * high_step;
                return SPAN == 16 || (HALF + c) % 2 == 0 ? value_quads<BITS, SPAN, 0>(a, b)
                                                         : value_quads<BITS, SPAN, SPAN == 32>(a, b);
            });
        };
        for (int r = 0; r < BLOCK / 4; r += Words::STEP) {
            decltype(levels(0)) codes[NC];
            for (int c = 0; c < NC; c++) codes[c] = levels(c);
            low += Words::STEP * quad, high += Words::STEP * quad;
            ahead.fetch_next<Words::STEP * NC * BITS * 8 / Words::PARTS>();
#pragma GCC unroll 4
            for (int g = 0; g < GN; g++) {
                const typename Sums::Four weights(w.fours + g * (BLOCK / 2) + 2 * r);
                for (int c = 0; c < NC; c++) x[g][c].add(codes[c], weights);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < GN; g++)
            for (int c = 0; c < NC; c++) x[g][c].put(products[g][c]);
    });
    block.ahead = ahead;
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < NC; c++) {
            float *at = acc + g * stride + first + 16 * c;
            store(at, fma(products[g][c], set1(w.step[g] * unit), load(at)));
        }
}

// Add the channels [first, stop), which share weights.
template <int BITS, int SPAN, int GN, class Words>
void quad_values(const SealedBlock &block, const Words &words, float unit, int first, int stop,
                 const FixedWeights<typename Words::Number> &w, float *acc, int64_t stride) {
    constexpr int NC = QUAD_CHUNKS;
    for (; NC == 2 && first + 32 <= stop; first += 32)
        quad_values_part<BITS, SPAN, GN, NC, 0>(block, words, unit, first, w, acc, stride);
    for (; first < stop; first += 16) {
        if constexpr (SPAN == 32)
            if (first % 32) {
                quad_values_part<BITS, SPAN, GN, 1, 1>(block, words, unit, first, w, acc, stride);
                continue;
            }
        quad_values_part<BITS, SPAN, GN, 1, 0>(block, words, unit, first, w, acc, stride);
    }
}

}  // namespace kvant::KVANT_TARGET
