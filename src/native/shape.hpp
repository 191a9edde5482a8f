// Sizes shared by the kernels, and the vector types of the instruction set.
#pragma once

#include "limits.hpp"
#include "vec.hpp"

namespace kvant::KVANT_TARGET {

constexpr int PITCH = BLOCK + 16;  // stride of scores per query; rows are processed 16 at a time
constexpr int MAX_GROUPS = MAX_DIM / 16;  // scales of a row

}  // namespace kvant::KVANT_TARGET
