// Limits of all kernels, on every instruction set.
#pragma once

#include "kvant.h"

namespace kvant {

constexpr int BLOCK = 64;             // rows of a step of the online softmax; pages are a multiple
constexpr int MAX_DIM = 256;          // channels of a row
constexpr int MAX_GROUPS = MAX_DIM / 16;  // scales of a row
constexpr int PITCH = BLOCK + 16;     // stride of scores per query; rows are processed 16 at a time
constexpr int MAX_GROUP = 16;         // query heads per key head
constexpr int MAX_GROUP_WIDTH = 128;  // channels of an affine group
constexpr int MAX_THREADS = 4096;
constexpr int NORM_UNIT = 32;         // channels of a row to normalize: a multiple of this
constexpr int MAX_NORM = 32768;       // for a longer row PyTorch may split the sum over threads
constexpr int WEIGHT_UNIT = 32;       // the columns of a weight are a multiple of this
constexpr int64_t TABLE = 1 << 16;    // entries of a lookup table for 16-bit values

// Columns of the writes and the seals of kvant_steps.
enum { WRITE_SEQUENCE, WRITE_SLOT, WRITE_ROW, WRITE_ROWS, WRITE_COLUMN, WRITE_WIDTH };
enum { SEAL_SEQUENCE, SEAL_SLOT, SEAL_SOURCE, SEAL_COLUMN, SEAL_WIDTH };

inline int64_t size_of(int64_t dtype) { return dtype == KVANT_F32 ? 4 : 2; }

}  // namespace kvant
