// Products with codes as integers: products of four codes a lane with 15-bit numbers.
//
// Queries and weights are converted to fixed point (Quads); the error of the format is tens of times
// larger than that of the conversion. A lane is a row (keys) or a channel (values), as in pairs.hpp.
// Codes are their own levels, or are looked up in a table of 12-bit levels.
#pragma once

#include "kvant.h"
#include "pairs.hpp"

namespace kvant::KVANT_TARGET {

template <int N> struct Int {
    static constexpr int value = N;
};

// Whether the codes of a side are 8-bit integers.
inline bool has_bytes(const kvant_side &side) {
    return side.format == KVANT_AFFINE && side.bits == 8;
}

// Whether the codes of a side are multiplied as integers.
inline bool in_quads(const kvant_side &side) {
    const bool coded = side.format == KVANT_AFFINE || side.format == KVANT_CODEBOOK;
    return KVANT_INTEGER_CODES ? coded : has_bytes(side);
}

constexpr int MAX_LEVEL = 2047;  // of a codebook

// The largest fixed-point query, or weight. The sums of MAX_DIM products with levels, and of BLOCK
// of them, fit 32 bits.
constexpr float FIXED = 16256.0f;  // 127 * 128
constexpr float FIXED_TABLE_QUERY = 4095.0f;
static_assert((int64_t)FIXED_TABLE_QUERY * MAX_LEVEL * MAX_DIM < INT32_MAX);
static_assert((int64_t)FIXED * MAX_LEVEL * BLOCK < INT32_MAX);

// Queries as fours [GN][MAX_DIM / 2], each in units of a step; sums [GN][MAX_GROUPS] of their
// values.
struct FixedQueries {
    const uint32_t *fours;
    const float *step, *sums;
};

template <int BITS, int SPAN, int H, int Q, int GN, int TILES, class Words, class Four, class Sums>
inline void quad_products(const uint8_t *low, const uint8_t *high, int tile, const Words &words,
                          const Four *q, Sums (&x)[TILES][GN]) {
    decltype(words.at(zeros())) codes[TILES];
    for (int t = 0; t < TILES; t++)
        codes[t] = words.at(key_codes<BITS, SPAN, H, Q, 0>(low + t * tile, high + t * tile));
    for (int g = 0; g < GN; g++) {
        const typename Sums::Four four(q + g * (MAX_DIM / 2) + 2 * Q);
        for (int t = 0; t < TILES; t++) x[t][g].add(codes[t], four);
    }
}

// Add the products of 16 channels of the rows of TILES tiles.
template <int BITS, int SPAN, int H, int GN, int TILES, class Words, class Four, class Sums>
inline void quad_span(const uint8_t *low, const uint8_t *high, int tile, const Words &words,
                      const Four *q, Sums (&x)[TILES][GN]) {
    quad_products<BITS, SPAN, H, 0>(low, high, tile, words, q, x);
    quad_products<BITS, SPAN, H, 1>(low, high, tile, words, q, x);
    quad_products<BITS, SPAN, H, 2>(low, high, tile, words, q, x);
    quad_products<BITS, SPAN, H, 3>(low, high, tile, words, q, x);
}

// Compute scores [GN][PITCH]; `unit` is the value of one step of the levels.
template <int BITS, int SPAN, int GN, class Words>
void quad_scores(const SealedBlock &block, const Words &words, float unit, const FixedQueries &q,
                 float *s) {
    using P = Planes<BITS>;
    constexpr int TILES = QUAD_TILES;
    constexpr int low_step = SPAN * P::LOW * 2, high_step = SPAN * P::HIGH * 2;
    const int low_size = block.dim * P::LOW / 8, tile = 16 * block.width;
    for (int t = 0; t < BLOCK / 16; t += TILES) {
        const uint8_t *low = block.codes + t * tile, *high = low + 16 * low_size;
        F total[TILES][GN], shift[TILES][GN];
        for (int i = 0; i < TILES; i++)
            for (int g = 0; g < GN; g++) total[i][g] = shift[i][g] = zero();
        for (int u = 0; u < block.groups; u++) {
            const int stop = std::min(block.dim, (u + 1) * block.group);
            Quads x[TILES][GN];
            for (int d = u * block.group; d < stop; d += 16) {
                const uint8_t *a = low + d / SPAN * low_step, *b = high + d / SPAN * high_step;
                block.ahead.fetch_next<TILES * 32 * BITS>();
                if (SPAN == 16 || d % SPAN == 0)
                    quad_span<BITS, SPAN, 0>(a, b, tile, words, q.fours + d / 2, x);
                else
                    quad_span<BITS, SPAN, SPAN == 32>(a, b, tile, words, q.fours + d / 2, x);
            }
            for (int i = 0; i < TILES; i++) {
                const int at = ((t + i) * block.groups + u) * 16;
                fetch((const char *)(block.scale + at) + block.to_next_scale);
                const F scale = load(block.scale + at);
                for (int g = 0; g < GN; g++)
                    total[i][g] = fma(x[i][g].total(), scale, total[i][g]);
                if (!block.bias) continue;
                fetch((const char *)(block.bias + at) + block.to_next_scale);
                const F bias = load(block.bias + at);
                for (int g = 0; g < GN; g++)
                    shift[i][g] = fma(bias, set1(q.sums[g * MAX_GROUPS + u]), shift[i][g]);
            }
        }
        for (int i = 0; i < TILES; i++)
            for (int g = 0; g < GN; g++)
                store(s + g * PITCH + 16 * (t + i),
                      fma(total[i][g], set1(q.step[g] * unit), shift[i][g]));
    }
}

// The codes of 16 channels of four rows; bits above a code are undefined.
template <int BITS, int SPAN, int HALF> inline I value_quads(const uint8_t *row, int low, int high) {
    using P = Planes<BITS>;
    using Low = Lanes<P::LOW, SPAN, HALF, 0>;
    const I x = Low::a(Low::codes(row, low));
    if constexpr (P::HIGH == 0) {
        return x;
    } else {
        using High = Lanes<P::HIGH, SPAN, HALF, P::LOW>;
        return joined<BITS>(x, High::a(High::codes(row, high)));
    }
}

// Weights as fours [GN][BLOCK / 2], one per four rows, in units of each query's step.
struct FixedWeights {
    const uint32_t *fours;
    const float *step;
};

// Add weights times the channels [first, first + 16 NC) to acc [GN][stride]. HALF is the position of
// `first` in its span, by 16.
template <int BITS, int SPAN, int GN, int NC, int HALF, class Words>
void quad_values_part(const SealedBlock &block, const Words &words, float unit, int first,
                      const FixedWeights &w, float *acc, int64_t stride) {
    using P = Planes<BITS>;
    Quads x[GN][NC];
    const int low_size = block.dim * P::LOW / 8;
    const auto low = [&](int c) { return (first + 16 * c) / SPAN * (SPAN * P::LOW / 8); };
    const auto high = [&](int c) { return low_size + (first + 16 * c) / SPAN * (SPAN * P::HIGH / 8); };
    const uint8_t *row = block.codes;
    for (int r = 0; r < BLOCK / 4; r++, row += 4 * block.width) {
        decltype(words.at(zeros())) codes[NC];
        for (int c = 0; c < NC; c++)
            codes[c] = words.at(
                SPAN == 16 || (HALF + c) % 2 == 0
                    ? value_quads<BITS, SPAN, 0>(row, low(c), high(c))
                    : value_quads<BITS, SPAN, SPAN == 32>(row, low(c), high(c)));
        block.ahead.fetch_next<NC * BITS * 8>();
        for (int g = 0; g < GN; g++) {
            const Quads::Four weights(w.fours + g * (BLOCK / 2) + 2 * r);
            for (int c = 0; c < NC; c++) x[g][c].add(codes[c], weights);
        }
    }
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < NC; c++) {
            float *at = acc + g * stride + first + 16 * c;
            store(at, fma(x[g][c].total(), set1(w.step[g] * unit), load(at)));
        }
}

// Add the channels [first, stop), which share weights.
template <int BITS, int SPAN, int GN, class Words>
void quad_values(const SealedBlock &block, const Words &words, float unit, int first, int stop,
                 const FixedWeights &w, float *acc, int64_t stride) {
    constexpr int NC = QUAD_CHUNKS;
    for (; NC == 2 && first + 32 <= stop; first += 32)
        quad_values_part<BITS, SPAN, GN, NC, 0>(block, words, unit, first, w, acc, stride);
    for (; first < stop; first += 16) {
        if (SPAN == 16 || first % 32 == 0)
            quad_values_part<BITS, SPAN, GN, 1, 0>(block, words, unit, first, w, acc, stride);
        else
            quad_values_part<BITS, SPAN, GN, 1, 1>(block, words, unit, first, w, acc, stride);
    }
}

#if KVANT_INTEGER_CODES

// Floats of 8 bits, converted to 16 bits and multiplied in single precision, for 8 of 16 lanes.
constexpr float HALF_UNIT = 256.0f;  // HalfWords gives 2^-8 of a value

// Queries as fours of Fine [GN][MAX_DIM / 2].
template <int GN>
void float_scores(const SealedBlock &block, const Fine *q, float *s) {
    const HalfWords words;
    for (int t = 0; t < BLOCK / 16; t++) {
        const uint8_t *codes = block.codes + t * 16 * block.width;
        fetch((const char *)(block.scale + 16 * t) + block.to_next_scale);
        const auto part = [&](auto which) {
            HalfQuads<which.value> x[1][GN];
            for (int d = 0; d < block.dim; d += 16) {
                block.ahead.fetch_next<128>();
                quad_span<8, 16, 0>(codes + 16 * d, nullptr, 0, words, q + d / 2, x);
            }
            for (int g = 0; g < GN; g++) x[0][g].store_total(s + g * PITCH + 16 * t);
        };
        part(Int<0>()), part(Int<1>());
        const F scale = mul(load(block.scale + 16 * t), set1(HALF_UNIT));
        for (int g = 0; g < GN; g++) {
            float *at = s + g * PITCH + 16 * t;
            store(at, mul(load(at), scale));
        }
    }
}

// Weights as fours of Fine [GN][BLOCK / 2].
template <int GN>
void float_values(const SealedBlock &block, const Fine *w, float *acc, int64_t stride) {
    const HalfWords words;
    for (int d = 0; d < block.dim; d += 16) {
        const auto part = [&](auto which) {
            HalfQuads<which.value> x[GN];
            const uint8_t *row = block.codes + 4 * d;
            for (int r = 0; r < BLOCK / 4; r++, row += 4 * block.width) {
                block.ahead.fetch_next<32>();
                const auto codes = words.at(loadi(row));
                for (int g = 0; g < GN; g++)
                    x[g].add(codes, typename HalfQuads<which.value>::Four(w + g * (BLOCK / 2) + 2 * r));
            }
            float total[16];
            for (int g = 0; g < GN; g++) {
                x[g].store_total(total);
                float *at = acc + g * stride + d;
                for (int i = 8 * which.value; i < 8 * which.value + 8; i++)
                    at[i] += total[i] * HALF_UNIT;
            }
        };
        part(Int<0>()), part(Int<1>());
    }
}

#endif

}  // namespace kvant::KVANT_TARGET
