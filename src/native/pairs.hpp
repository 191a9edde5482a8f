// Codes of 2 to 6 bits: a table gives the level of each as a 16-bit float, two a lane.
//
// In memory (kvant.h) four neighbouring codes of a plane, one a byte, make up a lane: channels of a
// key row, or four rows of a channel of the values. The bytes at even places are one pair, those at
// odd places the other: so a table indexed by 16-bit halves yields what `dot2` wants, with no
// shuffle. A lane is a row (keys) or a channel (values): nothing is summed over lanes.
#pragma once

#include "rows.hpp"

namespace kvant::KVANT_TARGET {

struct SealedBlock {
    const uint8_t *codes;
    const Half *scale, *bias;  // [BLOCK / 16][groups][16]; no bias: null
    int64_t ahead, scale_ahead;  // bytes from here to what is read next
    int dim, group, groups, width;  // width: bytes of codes a row
};

// Bits of the high plane above those of the low one, whatever is above that.
template <int BITS> inline I joined(I low, I high) {
    constexpr int mask = (1 << Planes<BITS>::LOW) - 1;
    return choose(set1i(mask | mask << 16), low, high);
}

template <int N> inline I shifted(I x) {
    if constexpr (N >= 0)
        return right<N>(x);
    else
        return left<-N>(x);
}

// Four key channels of 16 rows: those from 16 H + 4 Q on of a block of SPAN; HALF is 0 or 8.
template <int BITS, int SPAN, int H, int Q, int HALF>
inline I key_codes(const uint8_t *low, [[maybe_unused]] const uint8_t *high) {
    using P = Planes<BITS>;
    constexpr int at = 16 * H + 4 * Q, step = SPAN * P::LOW / 8;
    const I x = right<P::LOW *(at / step) + HALF>(loadi(low + at % step * 16));
    if constexpr (P::HIGH == 0) {
        return x;
    } else {
        constexpr int wide = SPAN * P::HIGH / 8;
        constexpr int by = P::HIGH * (at / wide) + HALF - P::LOW;
        return joined<BITS>(x, shifted<by>(loadi(high + at % wide * 16)));
    }
}

template <int BITS, int SPAN, int GN, int H, int Q>
inline void score_quad(const uint8_t *low, const uint8_t *high, const Levels<BITS> &levels,
                       const uint32_t *q, F *x) {
    const Pairs a = levels.at(key_codes<BITS, SPAN, H, Q, 0>(low, high));
    const Pairs b = levels.at(key_codes<BITS, SPAN, H, Q, 8>(low, high));
    for (int g = 0; g < GN; g++) x[g] = dot2(x[g], a, q[g * (MAX_DIM / 2) + 2 * Q]);
    for (int g = 0; g < GN; g++) x[g] = dot2(x[g], b, q[g * (MAX_DIM / 2) + 2 * Q + 1]);
}

template <int BITS, int SPAN, int GN, int H>
inline void score_span(const uint8_t *low, const uint8_t *high, const Levels<BITS> &levels,
                       const uint32_t *q, F *x) {
    score_quad<BITS, SPAN, GN, H, 0>(low, high, levels, q, x);
    score_quad<BITS, SPAN, GN, H, 1>(low, high, levels, q, x);
    score_quad<BITS, SPAN, GN, H, 2>(low, high, levels, q, x);
    score_quad<BITS, SPAN, GN, H, 3>(low, high, levels, q, x);
}

// Queries as pairs [GN][MAX_DIM / 2], in the order of key_codes, and their sums [GN][MAX_GROUPS];
// scores [GN][PITCH]. The middle level is what a code of zero means, times the scale.
template <int BITS, int SPAN, int GN>
void pair_scores(const SealedBlock &block, const Levels<BITS> &levels, float middle,
                 const uint32_t *q, const float *sums, float *s) {
    using P = Planes<BITS>;
    const int low_size = block.dim * P::LOW / 8, tile = 16 * block.width;
    for (int t = 0; t < BLOCK / 16; t++) {
        const uint8_t *low = block.codes + t * tile, *high = low + 16 * low_size;
        const uint8_t *next = low + block.ahead;
        const int params = t * 16 * block.groups;
        for (int i = 0; i < block.groups; i += 2) {
            fetch((const char *)(block.scale + params + 16 * i) + block.scale_ahead);
            if (block.bias) fetch((const char *)(block.bias + params + 16 * i) + block.scale_ahead);
        }
        F total[GN], x[GN];
        for (int g = 0; g < GN; g++) total[g] = x[g] = zero();
        int u = 0;
        for (int d = 0; d < block.dim; d += 16) {
            constexpr int low_step = SPAN * P::LOW * 2, high_step = SPAN * P::HIGH * 2;
            const uint8_t *a = low + d / SPAN * low_step, *b = high + d / SPAN * high_step;
            const uint32_t *pairs = q + d / 2;
            if (SPAN == 16 || d % SPAN == 0)
                score_span<BITS, SPAN, GN, 0>(a, b, levels, pairs, x);
            else
                score_span<BITS, SPAN, GN, SPAN == 32>(a, b, levels, pairs, x);
            for (int i = 0; i < BITS; i += 2) fetch(next + 32 * i);
            next += 32 * BITS;
            if ((d + 16) % block.group && d + 16 < block.dim) continue;
            const F scale = load(block.scale + params + 16 * u);
            for (int g = 0; g < GN; g++) total[g] = fma(x[g], scale, total[g]), x[g] = zero();
            if (block.bias) {
                const F bias = fma(scale, set1(middle), load(block.bias + params + 16 * u));
                for (int g = 0; g < GN; g++)
                    total[g] = fma(bias, set1(sums[g * MAX_GROUPS + u]), total[g]);
            }
            u++;
        }
        for (int g = 0; g < GN; g++) store(s + g * PITCH + 16 * t, total[g]);
    }
}

// Where the codes of 16 channels of the values lie in one plane, and the shifts to get at them.
struct Lanes {
    int column, columns;
    I left, first, second;  // for pair A: left, then first to the right; for pair B: second

    Lanes(int bits, int span, int channel, int to) {
        const int step = span * bits / 8, inside = channel % span;
        columns = step < 16 ? step : 16;
        column = channel / span * step + inside % step;
        alignas(64) int32_t up[16], a[16], b[16];
        for (int i = 0; i < 16; i++) {
            const int by = bits * (inside / step + i / columns) - to;
            up[i] = by < 0 ? -by : 0;
            a[i] = by < 0 ? 0 : by;
            b[i] = by + 8;
        }
        left = loadi(up), first = loadi(a), second = loadi(b);
    }
};

template <int COLUMNS> inline I lanes_at(const uint8_t *row, int column) {
    return repeated<COLUMNS>(row + 4 * column);
}

// How many columns of one plane 16 channels take.
constexpr int columns_of(int bits, int span) { return span * bits / 8 < 16 ? span * bits / 8 : 16; }

// Weights [GN][PITCH] at `w`, rows 0 2 1 3 of every four swapped to pairs; acc [GN][stride] gets
// the channels [first, first + 16 NC).
template <int BITS, int SPAN, int GN, int NC>
void pair_values_part(const SealedBlock &block, const Levels<BITS> &levels, int first,
                      const uint32_t *w, int64_t w_stride, float *acc, int64_t stride) {
    using P = Planes<BITS>;
    constexpr int low_columns = columns_of(P::LOW, SPAN);
    constexpr int high_columns = P::HIGH ? columns_of(P::HIGH, SPAN) : 4;
    constexpr int TWINS = GN * NC <= 8 ? 2 : 1;  // chains, so that none waits for itself
    F sum[TWINS][GN][NC];
    I by[NC], by8[NC], up[NC], hi[NC], hi8[NC];
    int low[NC], high[NC];
    for (int c = 0; c < NC; c++) {
        const Lanes a(P::LOW, SPAN, first + 16 * c, 0);
        by[c] = a.first, by8[c] = a.second, low[c] = a.column;
        if constexpr (P::HIGH > 0) {
            const Lanes b(P::HIGH, SPAN, first + 16 * c, P::LOW);
            up[c] = b.left, hi[c] = b.first, hi8[c] = b.second;
            high[c] = b.column + block.dim * P::LOW / 8;
        }
        for (int g = 0; g < GN; g++) {
            sum[0][g][c] = load(acc + g * stride + first + 16 * c);
            if (TWINS == 2) sum[1][g][c] = zero();
        }
    }
    const uint8_t *row = block.codes;
    for (int r = 0; r < BLOCK / 4; r++, row += 4 * block.width, w += 2) {
        Pairs a[NC], b[NC];
        for (int c = 0; c < NC; c++) {
            const I x = lanes_at<low_columns>(row, low[c]);
            I one = rightv(x, by[c]), other = rightv(x, by8[c]);
            if constexpr (P::HIGH > 0) {
                const I y = lanes_at<high_columns>(row, high[c]);
                one = joined<BITS>(one, rightv(leftv(y, up[c]), hi[c]));
                other = joined<BITS>(other, rightv(y, hi8[c]));
            }
            a[c] = levels.at(one), b[c] = levels.at(other);
        }
        for (int i = 0; i < NC * P::LOW * 8; i += 64) fetch(row + 4 * low[0] + i + block.ahead);
        if constexpr (P::HIGH > 0)
            for (int i = 0; i < NC * P::HIGH * 8; i += 64)
                fetch(row + 4 * high[0] + i + block.ahead);
        for (int g = 0; g < GN; g++)
            for (int c = 0; c < NC; c++)
                sum[0][g][c] = dot2(sum[0][g][c], a[c], w[g * w_stride]);
        for (int g = 0; g < GN; g++)
            for (int c = 0; c < NC; c++)
                sum[TWINS - 1][g][c] = dot2(sum[TWINS - 1][g][c], b[c], w[g * w_stride + 1]);
    }
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < NC; c++) {
            const F x = TWINS == 2 ? add(sum[0][g][c], sum[TWINS - 1][g][c]) : sum[0][g][c];
            store(acc + g * stride + first + 16 * c, x);
        }
}

// The channels [first, stop) that share weights.
template <int BITS, int SPAN, int GN>
void pair_values(const SealedBlock &block, const Levels<BITS> &levels, int first, int stop,
                 const uint32_t *w, int64_t w_stride, float *acc, int64_t stride) {
    for (; first + 64 <= stop; first += 64)
        pair_values_part<BITS, SPAN, GN, 4>(block, levels, first, w, w_stride, acc, stride);
    if (first + 32 <= stop) {
        pair_values_part<BITS, SPAN, GN, 2>(block, levels, first, w, w_stride, acc, stride);
        first += 32;
    }
    if (first < stop)
        pair_values_part<BITS, SPAN, GN, 1>(block, levels, first, w, w_stride, acc, stride);
}

}  // namespace kvant::KVANT_TARGET
