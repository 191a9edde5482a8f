// The online softmax: scores of a block become weights against the largest score so far.
#pragma once

#include "values.hpp"

namespace kvant::KVANT_TARGET {

constexpr float NOTHING = -__builtin_inff();

// Scores [BLOCK] of one query become weights, rounded to 16 bits where `rows` takes them. Where
// they pass the largest score so far, fade(factor) is told what all sums before are worth now.
template <class Fade>
inline void soften(float &top, float *totals, float *s, Bfloat *rows, Fade fade) {
    F x[BLOCK / 16], most = load(s);
    for (int t = 0; t < BLOCK / 16; t++) most = max(most, x[t] = load(s + 16 * t));
    if (any_above(most, top)) {  // seldom, once some blocks were seen
        const float now = largest(most);
        const float by = top == NOTHING ? 0.0f : std::exp(top - now);
        if (top != NOTHING) fade(by);
        store(totals, mul(load(totals), set1(by)));
        top = now;
    }
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

inline void cap(float *s, float scale, float softcap) {
    for (int i = 0; i < BLOCK; i += 16) store(s + i, mul(load(s + i), set1(scale)));
    if (softcap == 0.0f) return;
    for (int i = 0; i < BLOCK; i++) s[i] = softcap * std::tanh(s[i] / softcap);
}

}  // namespace kvant::KVANT_TARGET
