// Prefetch the next block while the current one is computed, in memory order, as the processor's own
// prefetcher does.
#pragma once

#include <cstdint>

namespace kvant::KVANT_TARGET {

constexpr int64_t LINE = 64;

inline void fetch(const void *p) { __builtin_prefetch(p); }

struct Ahead {
    const char *at = nullptr, *stop = nullptr;

    // Prefetch the next BYTES (as many as the caller has just read), in whole lines.
    template <int64_t BYTES> void fetch_next() {
        if (at >= stop) return;
        for (int64_t i = 0; i < BYTES; i += LINE) fetch(at + i);
        at += (BYTES + LINE - 1) / LINE * LINE;
    }
};

}  // namespace kvant::KVANT_TARGET
