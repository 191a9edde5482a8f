// Scores of the keys of one block of rows, in any format.
#pragma once

#include <type_traits>

#include "query.hpp"

namespace kvant::KVANT_TARGET {

// Call f(Int<n>, first) for the queries of a group, four at a time; the block stays in the L1 cache.
template <class Fn> inline void by_four(int group, Fn f) {
    int g = 0;
    for (; g + 4 <= group; g += 4) f(Int<4>(), g);
    if (g + 2 <= group) f(Int<2>(), g), g += 2;
    if (g < group) f(Int<1>(), g);
}

// Lookup tables of a format's levels, by the bits of a code.
struct Tables {
    Levels<2> two;
    Levels<3> three;
    Levels<4> four;
    Levels<5> five;
    Levels<6> six;
    Levels<8> eight;
    explicit Tables(const float *levels)
        : two(levels), three(levels), four(levels), five(levels), six(levels), eight(levels) {}
};

constexpr float HALF_UNIT = 256.0f;  // HalfWords gives 2^-8 of a value

// The levels of a codebook as integers, in steps of `unit`; the code that a level of zero stands for.
struct FixedLevels {
    float unit, middle;
    int16_t values[64];
    explicit FixedLevels(const kvant_side &side) {
        const int count = side.format == KVANT_CODEBOOK ? 1 << side.bits : 0;
        middle = has_bytes(side) ? CodeWords<8>::MIDDLE : 0;
        unit = side.format == KVANT_FP8 ? HALF_UNIT : 1.0f;
        float top = 1e-30f;
        for (int i = 0; i < count; i++) top = std::fmax(top, std::fabs(side.levels[i]));
        if (count) unit = top / MAX_LEVEL;
        for (int i = 0; i < 64; i++)
            values[i] = i < count ? (int16_t)std::lrint(side.levels[i] / unit * LEVEL_FRACTION) : 0;
    }
};

// The levels of a side as 64 floats: a codebook's levels, or integers around zero.
struct LevelList {
    float middle = 0, values[64];
    explicit LevelList(const kvant_side &side) {
        const int count = side.format == KVANT_RAW || side.bits > 6 ? 0 : 1 << side.bits;
        if (side.format == KVANT_AFFINE && count) middle = (float)(1 << (side.bits - 1));
        for (int i = 0; i < 64; i++) values[i] = 0;
        for (int i = 0; i < count; i++)
            values[i] = side.format == KVANT_CODEBOOK ? side.levels[i] : (float)i - middle;
    }
};

// Tables shared by all blocks of a side.
struct SideTables {
    LevelList list;
    Tables tables;
    FixedLevels fixed;
    int bits, span;     // span: interleaved channels, 16 or 32
    int width, groups;  // bytes of codes and scales of a row; raw rows have unchecked bits and groups
    bool bytes, quads, codebook;
    explicit SideTables(const kvant_side &side)
        : list(side), tables(list.values), fixed(side), bits((int)side.bits),
          span(side.dim % 32 ? 16 : 32), width(side.format == KVANT_RAW ? 0 : (int)(side.dim * side.bits / 8)),
          groups(side.format == KVANT_RAW ? 0 : (int)((side.dim + side.group - 1) / side.group)),
          bytes(has_bytes(side)), quads(in_quads(side)),
          codebook(side.format == KVANT_CODEBOOK) {}
};

// Call f(Int<bits>, words) for affine codes of fewer than 8 bits.
template <class Fn> inline void with_code_words(int bits, const Fn &f) {
    if (bits == 6) f(Int<6>(), CodeWords<6>());
    if (bits == 5) f(Int<5>(), CodeWords<5>());
    if (bits == 4) f(Int<4>(), CodeWords<4>());
    if (bits == 3) f(Int<3>(), CodeWords<3>());
    if (bits == 2) f(Int<2>(), CodeWords<2>());
}

// Call f(Int<bits>, Int<span>, words) for a side with codes in fours.
template <class Fn> inline void with_words(const SideTables &side, const Fn &f) {
    if (side.bytes) return f(Int<8>(), Int<16>(), CodeWords<8>());
#if KVANT_INTEGER_CODES
    if (side.bits == 8) return f(Int<8>(), Int<16>(), HalfWords());
    const auto spans = [&](auto bits, const auto &words) {
        if (side.span == 32) return f(bits, Int<32>(), words);
        if constexpr (bits.value != 3 && bits.value != 5) f(bits, Int<16>(), words);
    };
    if (!side.codebook) return with_code_words(side.bits, spans);
    const int16_t *levels = side.fixed.values;
    if (side.bits == 4) spans(Int<4>(), TableWords<4>(levels));
    if (side.bits == 3) spans(Int<3>(), TableWords<3>(levels));
    if (side.bits == 2) spans(Int<2>(), TableWords<2>(levels));
#endif
}

inline void dense_scores(const RowBlock &rows, int64_t dtype, const Query &q, float *s) {
    by_four(q.group, [&](auto n, int g) {
        constexpr int GN = decltype(n)::value;
        float *at = s + g * PITCH;
#if KVANT_BFLOAT_DOT
        if (dtype == KVANT_BF16) {
            bfloat_scores<GN>(rows, q.high[g], MAX_DIM, q.dim, at);
            if (q.exact) return;
            float rest[GN * PITCH];
            bfloat_scores<GN>(rows, q.low[g], MAX_DIM, q.dim, rest);
            for (int i = 0; i < GN; i++)
                for (int r = 0; r < rows.count; r++) at[i * PITCH + r] += rest[i * PITCH + r];
            return;
        }
#endif
        if (dtype == KVANT_BF16) row_scores<Bfloat, GN>(rows, q.rows[g], MAX_DIM, q.dim, at);
        if (dtype == KVANT_F16) row_scores<Half, GN>(rows, q.rows[g], MAX_DIM, q.dim, at);
        if (dtype == KVANT_F32) row_scores<float, GN>(rows, q.rows[g], MAX_DIM, q.dim, at);
    });
}

#if !KVANT_INTEGER_CODES

// Floats of 8 bits are more precise than queries rounded to 16 bits.
template <int GN>
inline void float_scores(const SealedBlock &block, const Levels<8> &levels, const Query &q, int g,
                         float *s) {
    if (q.exact)
        pair_scores<8, 16, GN>(block, levels, 0.0f, q.pairs[g], q.sums[g], s);
    else
        pair_scores<8, 16, GN>(block, levels, 0.0f, q.fine[g], q.sums[g], s);
}

template <int BITS, int GN>
inline void coded_scores(const SealedBlock &block, const SideTables &side,
                         const Levels<BITS> &levels, const Query &q, int g, float *s) {
    const uint32_t *pairs = q.pairs[g];
    if (side.span == 32)
        pair_scores<BITS, 32, GN>(block, levels, side.list.middle, pairs, q.sums[g], s);
    else if constexpr (BITS != 3 && BITS != 5)
        pair_scores<BITS, 16, GN>(block, levels, side.list.middle, pairs, q.sums[g], s);
}

#endif

inline void sealed_scores(const SealedBlock &block, const SideTables &side, const Query &q,
                          float *s) {
    if (side.quads)
        return with_words(side, [&](auto bits, auto span, const auto &words) {
            using Number = typename std::decay_t<decltype(words)>::Number;
            by_four(q.group, [&](auto n, int g) {
                const FixedQueries<Number> fixed{q.fours_of(g, Number()), q.step + g, q.sums[g]};
                quad_scores<bits.value, span.value, n.value>(block, words, side.fixed.unit, fixed,
                                                             s + g * PITCH);
            });
        });
#if !KVANT_INTEGER_CODES
    by_four(q.group, [&](auto n, int g) {
        constexpr int GN = decltype(n)::value;
        float *at = s + g * PITCH;
        const Tables &t = side.tables;
        switch (side.bits) {
        case 8: return float_scores<GN>(block, t.eight, q, g, at);
        case 6: return coded_scores<6, GN>(block, side, t.six, q, g, at);
        case 5: return coded_scores<5, GN>(block, side, t.five, q, g, at);
        case 4: return coded_scores<4, GN>(block, side, t.four, q, g, at);
        case 3: return coded_scores<3, GN>(block, side, t.three, q, g, at);
        case 2: return coded_scores<2, GN>(block, side, t.two, q, g, at);
        }
    });
#endif
}

}  // namespace kvant::KVANT_TARGET
