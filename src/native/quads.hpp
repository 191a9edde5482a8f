// Products with codes of 8 bits: integer products of four codes per lane with 15-bit numbers.
//
// Queries and weights are converted to fixed point (Quads); the error of the format is tens of times
// larger than that of the conversion. A lane is a row (keys) or a channel (values), as in pairs.hpp.
#pragma once

#include "kvant.h"
#include "pairs.hpp"

namespace kvant::KVANT_TARGET {

// Whether the codes of a side are 8-bit integers.
inline bool in_quads(const kvant_side &side) {
    return side.format == KVANT_AFFINE && side.bits == 8;
}

constexpr float FIXED = 16256.0f;  // 127 * 128: the largest fixed-point number

// Queries as fours [GN][MAX_DIM / 2], each in units of a step; sums [GN][MAX_GROUPS] of their
// values.
template <int GN>
void quad_scores(const SealedBlock &block, const uint32_t *q, const float *step, const float *sums,
                 float *s) {
    constexpr int TILES = 2;
    for (int t = 0; t < BLOCK / 16; t += TILES) {
        const int tile = 16 * block.width;
        const uint8_t *codes = block.codes + t * tile;
        F total[TILES][GN], shift[TILES][GN];
        for (int i = 0; i < TILES; i++)
            for (int g = 0; g < GN; g++) total[i][g] = shift[i][g] = zero();
        for (int u = 0; u < block.groups; u++) {
            const int stop = (u + 1) * block.group < block.dim ? (u + 1) * block.group : block.dim;
            Quads x[TILES][GN];
            for (int d = u * block.group; d < stop; d += 4) {
                const I first = loadi(codes + 16 * d), second = loadi(codes + tile + 16 * d);
                block.ahead.fetch_next<TILES * LINE>();
                for (int g = 0; g < GN; g++) {
                    const Quads::Four four(q + g * (MAX_DIM / 2) + d / 2);
                    x[0][g].add(first, four);
                    x[1][g].add(second, four);
                }
            }
            for (int i = 0; i < TILES; i++) {
                const int at = ((t + i) * block.groups + u) * 16;
                fetch((const char *)(block.scale + at) + block.to_next_scale);
                fetch((const char *)(block.bias + at) + block.to_next_scale);
                const F scale = load(block.scale + at), bias = load(block.bias + at);
                for (int g = 0; g < GN; g++) {
                    total[i][g] = fma(x[i][g].total(), scale, total[i][g]);
                    shift[i][g] = fma(bias, set1(sums[g * MAX_GROUPS + u]), shift[i][g]);
                }
            }
        }
        for (int i = 0; i < TILES; i++)
            for (int g = 0; g < GN; g++)
                store(s + g * PITCH + 16 * (t + i), fma(total[i][g], set1(step[g]), shift[i][g]));
    }
}

// Weights as fours [GN][w_stride], one per four rows, in units of each query's step.
template <int GN, int NC>
void quad_values_part(const SealedBlock &block, int first, const uint32_t *w, int64_t w_stride,
                      const float *step, float *acc, int64_t stride) {
    Quads x[GN][NC];
    const uint8_t *row = block.codes + 4 * first;
    for (int r = 0; r < BLOCK / 4; r++, row += 4 * block.width) {
        I four[NC];
        for (int c = 0; c < NC; c++) four[c] = loadi(row + 64 * c);
        block.ahead.fetch_next<NC * LINE>();
        for (int g = 0; g < GN; g++) {
            const Quads::Four weights(w + g * w_stride + 2 * r);
            for (int c = 0; c < NC; c++) x[g][c].add(four[c], weights);
        }
    }
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < NC; c++) {
            float *at = acc + g * stride + first + 16 * c;
            store(at, fma(x[g][c].total(), set1(step[g]), load(at)));
        }
}

template <int GN>
void quad_values(const SealedBlock &block, int first, int stop, const uint32_t *w,
                 int64_t w_stride, const float *step, float *acc, int64_t stride) {
    for (; first + 32 <= stop; first += 32)
        quad_values_part<GN, 2>(block, first, w, w_stride, step, acc, stride);
    if (first < stop) quad_values_part<GN, 1>(block, first, w, w_stride, step, acc, stride);
}

}  // namespace kvant::KVANT_TARGET
