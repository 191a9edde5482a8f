// The online softmax: scores of a block become weights against the largest score so far.
#pragma once

#include "values.hpp"

namespace kvant::KVANT_TARGET {

constexpr float NOTHING = -__builtin_inff();

struct Softmax {
    float top[MAX_GROUP];
    alignas(64) float totals[MAX_GROUP][16];  // a sum a lane

    void clear(int group) {
        for (int g = 0; g < group; g++) top[g] = NOTHING, store(totals[g], zero());
    }
    float total(int g) const { return sum(load(totals[g])); }

    // Scores [BLOCK] of query g become weights, rounded to 16 bits where `rows` takes them;
    // `sums` fades with what was the largest score.
    void add(int g, float *s, Bfloat *rows, Sums &sums) {
        F x[BLOCK / 16], most = load(s);
        for (int t = 0; t < BLOCK / 16; t++) most = max(most, x[t] = load(s + 16 * t));
        if (any_above(most, top[g])) {  // seldom, once some blocks were seen
            const float now = largest(most);
            const float fade = top[g] == NOTHING ? 0.0f : std::exp(top[g] - now);
            if (top[g] != NOTHING) sums.fade(g, fade);
            store(totals[g], mul(load(totals[g]), set1(fade)));
            top[g] = now;
        }
        const float finite = top[g] == NOTHING ? 0.0f : top[g];
        F all = load(totals[g]);
        for (int t = 0; t < BLOCK / 16; t++) {
            F w = exp(sub(x[t], set1(finite)));
            if (rows) w = rounded(w), store(rows + 16 * t, w);
            store(s + 16 * t, w);
            all = kvant::KVANT_TARGET::add(all, w);
        }
        store(totals[g], all);
    }
};

inline void cap(float *s, float scale, float softcap) {
    for (int i = 0; i < BLOCK; i += 16) store(s + i, mul(load(s + i), set1(scale)));
    if (softcap == 0.0f) return;
    for (int i = 0; i < BLOCK; i++) s[i] = softcap * std::tanh(s[i] / softcap);
}

}  // namespace kvant::KVANT_TARGET
