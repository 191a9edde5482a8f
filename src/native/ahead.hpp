// What is read after this, asked for meanwhile in the order of memory: then the processor, which
// fetches ahead by itself where it sees an order, goes along.
#pragma once

#include <cstdint>

namespace kvant::KVANT_TARGET {

constexpr int64_t LINE = 64;

inline void fetch(const void *p) { __builtin_prefetch(p); }

struct Ahead {
    const char *at = nullptr, *stop = nullptr;

    // As many bytes more as were read in the meantime, rounded up to lines.
    template <int64_t BYTES> void go() {
        if (at >= stop) return;
        for (int64_t i = 0; i < BYTES; i += LINE) fetch(at + i);
        at += (BYTES + LINE - 1) / LINE * LINE;
    }
};

}  // namespace kvant::KVANT_TARGET
