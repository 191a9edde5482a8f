// RMSNorm, for the table of kernels.
#pragma once

#include "kvant.h"

namespace kvant::KVANT_TARGET {

void norm(const kvant_norm_request &request);

}  // namespace kvant::KVANT_TARGET
