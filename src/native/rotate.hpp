// The rotation, for the table of kernels.
#pragma once

#include "kvant.h"

namespace kvant::KVANT_TARGET {

void rotate(const kvant_rotate_request &request);

}  // namespace kvant::KVANT_TARGET
