// Sealing, for the table of kernels.
#pragma once

#include "kvant.h"

namespace kvant::KVANT_TARGET {

void seal(const kvant_seal_request &request);

}  // namespace kvant::KVANT_TARGET
