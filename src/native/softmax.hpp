// The online softmax: convert the scores of a block to weights relative to the running maximum.
#pragma once

#include <cmath>

#include "block.hpp"

namespace kvant::KVANT_TARGET {

constexpr float NOTHING = -__builtin_inff();

constexpr float LOG2E = 1.44269504f;
constexpr uint32_t ONES = 0x3f803f80;  // a pair of 16-bit floats

// Raise the running maximum: fade(factor) rescales all sums so far.
template <class Fade> inline void rise(float &top, float *totals, float now, Fade fade) {
    const float by = top == NOTHING ? 0.0f : std::exp(top - now);
    if (top != NOTHING) fade(by);
    store(totals, mul(load(totals), set1(by)));
    top = now;
}

// Convert the scores [BLOCK] of one query to weights; also to 16 bits in `rows` unless null.
template <class Fade>
inline void soften(float &top, float *totals, float *s, Bfloat *rows, Fade fade) {
    F x[BLOCK / 16], block_max = load(s);
    for (int t = 0; t < BLOCK / 16; t++) block_max = max(block_max, x[t] = load(s + 16 * t));
    // Rare after some blocks.
    if (any_above(block_max, top)) rise(top, totals, largest(block_max), fade);
    const float finite = top == NOTHING ? 0.0f : top;
    F all = load(totals);
    for (int t = 0; t < BLOCK / 16; t++) {
        F w = exp(sub(x[t], set1(finite)));
        if (rows) w = rounded(w), store(rows + 16 * t, w);
        store(s + 16 * t, w);
        all = add(all, w);
    }
    store(totals, all);
}

#if KVANT_BFLOAT_DOT
// Convert scores times `scale` to weights of 16 bits only.
template <class Fade>
inline void soften_pairs(float &top, float *totals, const float *s, float scale, uint32_t *weights,
                         Fade fade) {
    F x[BLOCK / 16];
    for (int t = 0; t < BLOCK / 16; t++) x[t] = mul(load(s + 16 * t), set1(scale));
    const F block_max = max(max(x[0], x[1]), max(x[2], x[3]));
    if (any_above(block_max, top)) rise(top, totals, largest(block_max), fade);
    const F none = set1(top == NOTHING ? 0.0f : -LOG2E * top);
    F all = load(totals);
    for (int t = 0; t < BLOCK / 16; t += 2) {
        const F a = exp2_short(fma(x[t], set1(LOG2E), none));
        const F b = exp2_short(fma(x[t + 1], set1(LOG2E), none));
        const Pairs both = narrowed(a, b);
        storei(weights + 8 * t, (I)both);
        all = dot2(all, both, ONES);
    }
    store(totals, all);
}
#endif

inline void cap(float *s, float scale, float softcap) {
    for (int i = 0; i < BLOCK; i += 16) store(s + i, mul(load(s + i), set1(scale)));
    if (softcap == 0.0f) return;
    for (int i = 0; i < BLOCK; i++) s[i] = softcap * std::tanh(s[i] / softcap);
}

}  // namespace kvant::KVANT_TARGET
