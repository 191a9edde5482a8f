// Sealing a page of one head, for the table of kernels.
#pragma once

#include "kernels.hpp"

namespace kvant::KVANT_TARGET {

void seal_page(const kvant_side &side, const PageSeal &page);

}  // namespace kvant::KVANT_TARGET
