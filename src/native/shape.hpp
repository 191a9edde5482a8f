// What every kernel agrees on: sizes, and the vectors of the instruction set compiled for.
#pragma once

#include "vec.hpp"

namespace kvant::KVANT_TARGET {

constexpr int BLOCK = 64;      // rows that share one step of the softmax; pages are multiples
constexpr int PITCH = BLOCK + 16;  // numbers from one query's scores to the next's: rows are done by 16
constexpr int MAX_DIM = 256;   // channels of a row
constexpr int MAX_GROUP = 16;  // queries that share a key head
constexpr int MAX_GROUPS = MAX_DIM / 16;  // scales of a row

}  // namespace kvant::KVANT_TARGET
