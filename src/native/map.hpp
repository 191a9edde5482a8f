// Elementwise operations, for the table of kernels.
#pragma once

#include "kvant.h"

namespace kvant::KVANT_TARGET {

void map(const kvant_map_request &request);

}  // namespace kvant::KVANT_TARGET
