// Products with codes of 2 to 6 bits and floats of 8, looked up in a table of 16-bit floats.
//
// A lane of 32 bits holds four neighbouring bytes of a plane (kvant.h): four channels of a key row,
// or four rows of a value channel. `dot2` takes two values a lane; two lookups by 16-bit halves give
// both pairs without a shuffle:
//
//   lane      | byte 3 | byte 2 | byte 1 | byte 0 |
//   x         | half 1: bytes 3 2 | half 0: bytes 1 0 |    low bits: pair of bytes 0 and 2
//   x >> 8                                                 low bits: pair of bytes 1 and 3
//
// A lane belongs to one row (keys) or one channel (values), so nothing is summed over lanes.
#pragma once

#include "dense_rows.hpp"

namespace kvant::KVANT_TARGET {

// Combine the bits of the low plane with those of the high one, in each byte.
template <int BITS> inline I joined(I low, I high) {
    constexpr int mask = (1 << Planes<BITS>::LOW) - 1, rest = ((1 << BITS) - 1) & ~mask;
    return join(set1i(mask * 0x01010101), set1i(rest * 0x01010101), low, high);
}

template <int N> inline I shifted(I x) {
    if constexpr (N >= 0)
        return right<N>(x);
    else
        return left<-N>(x);
}

// Codes of four key channels of 16 rows, from channel 16 H + 4 Q of a span of SPAN; HALF is 0 or 8.
template <int BITS, int SPAN, int H, int Q, int HALF>
inline I key_codes(const uint8_t *low, [[maybe_unused]] const uint8_t *high) {
    using P = Planes<BITS>;
    constexpr int at = 16 * H + 4 * Q, step = SPAN * P::LOW / 8;
    const I x = right<P::LOW *(at / step) + HALF>(loadi(low + at % step * 16));
    if constexpr (P::HIGH == 0) {
        return x;
    } else {
        constexpr int high_step = SPAN * P::HIGH / 8;
        constexpr int by = P::HIGH * (at / high_step) + HALF - P::LOW;
        return joined<BITS>(x, shifted<by>(loadi(high + at % high_step * 16)));
    }
}

#if !KVANT_INTEGER_CODES

// Running scores of GN queries with the rows of TILES tiles. The two pairs of a lane have separate
// sums, so that no product waits for the previous one.
template <int GN, int TILES> struct Chains {
    F a[TILES][GN], b[TILES][GN];
    void clear() {
        for (int t = 0; t < TILES; t++)
            for (int g = 0; g < GN; g++) a[t][g] = b[t][g] = zero();
    }
};

template <int BITS, int SPAN, int GN, int TILES, int H, int Q, class Two>
inline void score_quad(const uint8_t *low, const uint8_t *high, int tile,
                       const Levels<BITS> &levels, const Two *q, Chains<GN, TILES> &x) {
    Pairs a[TILES], b[TILES];
    for (int t = 0; t < TILES; t++) {
        a[t] = levels.at(key_codes<BITS, SPAN, H, Q, 0>(low + t * tile, high + t * tile));
        b[t] = levels.at(key_codes<BITS, SPAN, H, Q, 8>(low + t * tile, high + t * tile));
    }
    for (int g = 0; g < GN; g++) {
        const Two *pairs = q + g * (MAX_DIM / 2) + 2 * Q;
        for (int t = 0; t < TILES; t++) x.a[t][g] = dot2(x.a[t][g], a[t], pairs[0]);
        for (int t = 0; t < TILES; t++) x.b[t][g] = dot2(x.b[t][g], b[t], pairs[1]);
    }
}

template <int BITS, int SPAN, int GN, int TILES, int H, class Two>
inline void score_span(const uint8_t *low, const uint8_t *high, int tile,
                       const Levels<BITS> &levels, const Two *q, Chains<GN, TILES> &x) {
    score_quad<BITS, SPAN, GN, TILES, H, 0>(low, high, tile, levels, q, x);
    score_quad<BITS, SPAN, GN, TILES, H, 1>(low, high, tile, levels, q, x);
    score_quad<BITS, SPAN, GN, TILES, H, 2>(low, high, tile, levels, q, x);
    score_quad<BITS, SPAN, GN, TILES, H, 3>(low, high, tile, levels, q, x);
}

// Compute scores [GN][PITCH] from queries [GN][MAX_DIM / 2], as pairs or Fine in the order of
// key_codes, and their sums [GN][MAX_GROUPS]. `middle` is the code that a level of zero stands for.
template <int BITS, int SPAN, int GN, class Two>
void pair_scores(const SealedBlock &block, const Levels<BITS> &levels, float middle,
                 const Two *q, const float *sums, float *s) {
    using P = Planes<BITS>;
    constexpr int TILES = 2;
    const int low_size = block.dim * P::LOW / 8, tile = 16 * block.width;
    for (int t = 0; t < BLOCK / 16; t += TILES) {
        const uint8_t *low = block.codes + t * tile, *high = low + 16 * low_size;
        F total[TILES][GN];
        for (auto &row : total)
            for (F &x : row) x = zero();
        Chains<GN, TILES> x;
        x.clear();
        int u = 0;
        for (int d = 0; d < block.dim; d += 16) {
            constexpr int low_step = SPAN * P::LOW * 2, high_step = SPAN * P::HIGH * 2;
            const uint8_t *a = low + d / SPAN * low_step, *b = high + d / SPAN * high_step;
            const Two *pairs = q + d / 2;
            if (SPAN == 16 || d % SPAN == 0)
                score_span<BITS, SPAN, GN, TILES, 0>(a, b, tile, levels, pairs, x);
            else
                score_span<BITS, SPAN, GN, TILES, SPAN == 32>(a, b, tile, levels, pairs, x);
            block.ahead.fetch_next<TILES * 32 * BITS>();
            if ((d + 16) % block.group && d + 16 < block.dim) continue;
            for (int i = 0; i < TILES; i++) {
                const int at = ((t + i) * block.groups + u) * 16;
                fetch((const char *)(block.scale + at) + block.to_next_scale);
                const F scale = load(block.scale + at);
                for (int g = 0; g < GN; g++)
                    total[i][g] = fma(add(x.a[i][g], x.b[i][g]), scale, total[i][g]);
                if (!block.bias) continue;
                fetch((const char *)(block.bias + at) + block.to_next_scale);
                const F bias = fma(scale, set1(middle), load(block.bias + at));
                for (int g = 0; g < GN; g++)
                    total[i][g] = fma(bias, set1(sums[g * MAX_GROUPS + u]), total[i][g]);
            }
            x.clear();
            u++;
        }
        for (int g = 0; g < GN; g++)
            for (int i = 0; i < TILES; i++) store(s + g * PITCH + 16 * (t + i), total[i][g]);
    }
}

#endif

// Locate 16 channels of the values in a plane of WIDTH bits: those of a span of SPAN from 16 * HALF
// on. Lane i has byte `column + i % columns` of four rows. Shifting it right by `by` moves the codes
// of rows 0 and 2 to bit TO; 8 bits more, those of rows 1 and 3.
template <int WIDTH, int SPAN, int HALF, int TO> struct Lanes {
    static constexpr int step = SPAN * WIDTH / 8;
    static constexpr int columns = step < 16 ? step : 16;
    static constexpr int first = 16 * HALF / step * WIDTH - TO;
    static constexpr bool even = columns == 16;  // the same for all lanes
    static constexpr int column(int channel) { return channel / SPAN * step; }

    static I codes(const uint8_t *row, int column) { return repeated<columns>(row + 4 * column); }
    static I a(I x) {
        if constexpr (even)
            return shifted<first>(x);
        else if constexpr (first < 0)
            return rightv(leftv(x, by(-1, 0)), by(1, 0));
        else
            return rightv(x, by(1, 0));
    }
    static I b(I x) {
        if constexpr (even)
            return shifted<first + 8>(x);
        else
            return rightv(x, by(1, 8));
    }

private:
    static I by(int sign, int more) {
        alignas(64) int32_t lanes[16];
        for (int i = 0; i < 16; i++) {
            const int n = sign * (first + i / columns * WIDTH + more);
            lanes[i] = n < 0 ? 0 : n;
        }
        return loadi(lanes);
    }
};

template <int BITS, int SPAN, int HALF>
inline void value_codes(const uint8_t *row, int low, int high, const Levels<BITS> &levels,
                        Pairs &a, Pairs &b) {
    using P = Planes<BITS>;
    using Low = Lanes<P::LOW, SPAN, HALF, 0>;
    const I x = Low::codes(row, low);
    if constexpr (P::HIGH == 0) {
        a = levels.at(Low::a(x)), b = levels.at(Low::b(x));
    } else {
        using High = Lanes<P::HIGH, SPAN, HALF, P::LOW>;
        const I y = High::codes(row, high);
        a = levels.at(joined<BITS>(Low::a(x), High::a(y)));
        b = levels.at(joined<BITS>(Low::b(x), High::b(y)));
    }
}

#if !KVANT_INTEGER_CODES

// Add weights [GN][w_stride] (pairs or Fine, rows 0 2 and 1 3 of every four) times the channels
// [first, first + 16 NC) to acc [GN][stride]. HALF is the position of `first` in its span, by 16.
template <int BITS, int SPAN, int GN, int NC, int HALF, class Two>
void pair_values_part(const SealedBlock &block, const Levels<BITS> &levels, int first,
                      const Two *w, int64_t w_stride, float *acc, int64_t stride) {
    using P = Planes<BITS>;
    constexpr int CHAINS = GN * NC <= 8 ? 2 : 1;  // separate sums: no product waits
    F sum[CHAINS][GN][NC];
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < NC; c++) {
            sum[0][g][c] = load(acc + g * stride + first + 16 * c);
            if (CHAINS == 2) sum[CHAINS - 1][g][c] = zero();
        }
    const int low_size = block.dim * P::LOW / 8;
    const auto low = [&](int c) { return Lanes<P::LOW, SPAN, 0, 0>::column(first + 16 * c); };
    const auto high = [&](int c) {
        return low_size + (P::HIGH ? (first + 16 * c) / SPAN * (SPAN * P::HIGH / 8) : 0);
    };
    const uint8_t *row = block.codes;
    for (int r = 0; r < BLOCK / 4; r++, row += 4 * block.width, w += 2) {
        Pairs a[NC], b[NC];
#pragma GCC unroll 4
        for (int c = 0; c < NC; c++) {
            if (SPAN == 16 || (HALF + c) % 2 == 0)
                value_codes<BITS, SPAN, 0>(row, low(c), high(c), levels, a[c], b[c]);
            else
                value_codes<BITS, SPAN, SPAN == 32>(row, low(c), high(c), levels, a[c], b[c]);
        }
        block.ahead.fetch_next<NC * BITS * 8>();
        for (int g = 0; g < GN; g++)
            for (int c = 0; c < NC; c++)
                sum[0][g][c] = dot2(sum[0][g][c], a[c], w[g * w_stride]);
        for (int g = 0; g < GN; g++)
            for (int c = 0; c < NC; c++)
                sum[CHAINS - 1][g][c] = dot2(sum[CHAINS - 1][g][c], b[c], w[g * w_stride + 1]);
    }
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < NC; c++) {
            const F x = CHAINS == 2 ? add(sum[0][g][c], sum[CHAINS - 1][g][c]) : sum[0][g][c];
            store(acc + g * stride + first + 16 * c, x);
        }
}

// Add the channels [first, stop), which share weights.
template <int BITS, int SPAN, int GN, class Two>
void pair_values(const SealedBlock &block, const Levels<BITS> &levels, int first, int stop,
                 const Two *w, int64_t w_stride, float *acc, int64_t stride) {
    for (; first + 64 <= stop; first += 64)
        pair_values_part<BITS, SPAN, GN, 4, 0>(block, levels, first, w, w_stride, acc, stride);
    if (first + 32 <= stop) {
        pair_values_part<BITS, SPAN, GN, 2, 0>(block, levels, first, w, w_stride, acc, stride);
        first += 32;
    }
    if (first >= stop) return;
    if (first % 32 == 0)
        pair_values_part<BITS, SPAN, GN, 1, 0>(block, levels, first, w, w_stride, acc, stride);
    else
        pair_values_part<BITS, SPAN, GN, 1, 1>(block, levels, first, w, w_stride, acc, stride);
}

#endif

}  // namespace kvant::KVANT_TARGET
