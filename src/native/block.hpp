// A block of rows: dense rows in memory order, or sealed rows in tiles; and the prefetch of the next
// block while the current one is computed, in memory order, as the processor's own prefetcher does.
//
// The codes of a tile are four bytes wide, so that a lane of 32 bits has what is summed together:
//
//   keys: 16 rows, 4 bytes of each         values: 4 rows, each byte of them
//
//     row 0    | 0 1 2 3 |                   byte 0   | row 0 | row 1 | row 2 | row 3 |
//     row 1    | 0 1 2 3 |                   byte 1   | row 0 | row 1 | row 2 | row 3 |
//     ...                                    ...
//     row 15   | 0 1 2 3 |                   byte 15  | row 0 | row 1 | row 2 | row 3 |
//     row 0    | 4 5 6 7 |                   byte 16  ...
//
// A byte has one code of 8 bits, or codes of channels that are an eighth, a quarter or half of a span apart:
// with 4 bits and spans of 32 channels, byte 0 has channels 0 and 16. Codes of 3, 5 and 6 bits are
// split in a plane of low bits and one of high bits, each in such tiles (kvant.h).
#pragma once

#include <cstdint>

#include "limits.hpp"
#include "vec.hpp"

namespace kvant::KVANT_TARGET {

constexpr int64_t LINE = 64;

inline void fetch(const void *p) { __builtin_prefetch(p); }

struct Ahead {
    const char *at = nullptr, *stop = nullptr;
    const char *next_at = nullptr, *next_stop = nullptr;  // prefetched after `stop`
    int64_t passes = 1;  // over the rows that are read meanwhile

    // Prefetch the next BYTES (as many as the caller has just read), in whole lines.
    template <int64_t BYTES> void fetch_next() {
        if (at >= stop) {
            if (next_at >= next_stop) return;
            at = next_at, stop = next_at = next_stop;
        }
        for (int64_t i = 0; i < BYTES; i += LINE) fetch(at + i);
        at += (BYTES + LINE - 1) / LINE * LINE;
    }

    // Prefetch a share of BYTES, which one of several passes over the same rows has just read: all
    // passes together prefetch as much as one of them reads.
    template <int64_t BYTES> void fetch_share() {
        if (at >= stop) return;
        const int64_t share = BYTES / passes;
        for (int64_t i = 0; i < share; i += LINE) fetch(at + i);
        at += share;
    }
};

struct RowBlock {
    const char *data;
    int64_t stride;  // bytes
    int count;       // 1 to BLOCK
    mutable Ahead ahead;

    const char *at(int row) const { return data + (row < count ? row : count - 1) * stride; }
};

struct SealedBlock {
    const uint8_t *codes;
    const Half *scale, *bias;  // [BLOCK / 16][groups][16]; no bias: null
    int dim, group, groups, width;  // width: bytes of codes per row
    mutable Ahead ahead;
    int64_t to_next_scale;  // bytes from these scales to the next block's
    int rows = BLOCK;       // rows to multiply by integers; a multiple of 32
    float lowest = 0;       // if there is no bias: code c stands for (c + lowest) * scale
};

}  // namespace kvant::KVANT_TARGET
