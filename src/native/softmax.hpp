// The online softmax: scores of a block become weights against the largest score so far.
#pragma once

#include "values.hpp"

namespace kvant::KVANT_TARGET {

constexpr float NOTHING = -__builtin_inff();

struct Softmax {
    float top[MAX_GROUP], total[MAX_GROUP];

    void clear(int group) {
        for (int g = 0; g < group; g++) top[g] = NOTHING, total[g] = 0.0f;
    }

    // Scores [BLOCK] of query g become weights, rounded to 16 bits where `rows` takes them;
    // `sums` fades with what was the largest score.
    void add(int g, float *s, Bfloat *rows, Sums &sums) {
        F x[BLOCK / 16], most = set1(top[g]);
        for (int t = 0; t < BLOCK / 16; t++) most = max(most, x[t] = load(s + 16 * t));
        const float now = largest(most);
        const float finite = now == NOTHING ? 0.0f : now;
        if (now != top[g]) {
            const float fade = top[g] == NOTHING ? 0.0f : std::exp(top[g] - finite);
            if (total[g] != 0.0f) sums.fade(g, fade);
            total[g] *= fade;
            top[g] = now;
        }
        F all = zero();
        for (int t = 0; t < BLOCK / 16; t++) {
            F w = exp(sub(x[t], set1(finite)));
            if (rows) w = rounded(w), store(rows + 16 * t, w);
            store(s + 16 * t, w);
            all = kvant::KVANT_TARGET::add(all, w);
        }
        total[g] += sum(all);
    }
};

inline void cap(float *s, float scale, float softcap) {
    for (int i = 0; i < BLOCK; i += 16) store(s + i, mul(load(s + i), set1(scale)));
    if (softcap == 0.0f) return;
    for (int i = 0; i < BLOCK; i++) s[i] = softcap * std::tanh(s[i] / softcap);
}

}  // namespace kvant::KVANT_TARGET
