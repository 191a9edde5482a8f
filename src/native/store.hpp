// Storage of new rows, for the entry points.
#pragma once

#include "kernels.hpp"

namespace kvant {

void store(const kvant_store_request &request, const Kernels &kernels);

}  // namespace kvant
