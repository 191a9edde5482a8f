// Selection of pages, for the table of kernels.
#pragma once

#include "kvant.h"

namespace kvant::KVANT_TARGET {

void choose(const kvant_choose_request &request);

}  // namespace kvant::KVANT_TARGET
