// Multiplication of rows by a packed weight, for the table of kernels.
#pragma once

#include "kvant.h"

namespace kvant::KVANT_TARGET {

void multiply(const kvant_multiply_request &request);

}  // namespace kvant::KVANT_TARGET
