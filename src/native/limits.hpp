// What every kernel is made for, whatever it is compiled for.
#pragma once

#include "kvant.h"

namespace kvant {

constexpr int BLOCK = 64;             // rows that share one step of the softmax; pages are multiples
constexpr int MAX_DIM = 256;          // channels of a row
constexpr int MAX_GROUP = 16;         // queries that share a key head
constexpr int MAX_GROUP_WIDTH = 128;  // channels that share an affine scale
constexpr int MAX_THREADS = 4096;
constexpr int NORM_UNIT = 32;         // channels of a row to norm: multiples, at most MAX_NORM
constexpr int MAX_NORM = 32768;       // of one row that is longer PyTorch may share the sum
constexpr int PACKED_OUTS = 64;       // outputs of a block of a packed weight
constexpr int PACKED_WIDTH = 16;      // its columns: multiples
constexpr int64_t TABLE = 1 << 16;    // results of a function of 16 bits

inline int64_t size_of(int64_t dtype) { return dtype == KVANT_F32 ? 4 : 2; }

}  // namespace kvant
