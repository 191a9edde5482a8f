// Putting rows, for the entry points.
#pragma once

#include "kvant.h"

namespace kvant {

void put(const kvant_put_request &request);

}  // namespace kvant
