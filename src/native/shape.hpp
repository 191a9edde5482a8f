// What every kernel agrees on: sizes, and the vectors of the instruction set compiled for.
#pragma once

#include "limits.hpp"
#include "vec.hpp"

namespace kvant::KVANT_TARGET {

constexpr int PITCH = BLOCK + 16;  // numbers from one query's scores to the next's: rows are done by 16
constexpr int MAX_GROUPS = MAX_DIM / 16;  // scales of a row

}  // namespace kvant::KVANT_TARGET
