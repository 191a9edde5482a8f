// Check a request before any kernel runs: all that its counts, strides and tables lead to must be
// inside the memory that it states. So kernels need no checks of their own.
#pragma once

#include "kvant.h"

namespace kvant {

// Return null, or the reason of a refusal; its first word is a field of the request.
const char *check(const kvant_request &request);
const char *check(const kvant_store_request &request);
const char *check(const kvant_rotate_request &request);
const char *check(const kvant_norm_request &request);
const char *check(const kvant_choose_request &request);
const char *check(const kvant_multiply_request &request);
const char *check(const kvant_map_request &request);
const char *check(const kvant_run_request &request);

// Whether there is nothing to do. Other counts are then unchecked, so no kernel may see them.
bool is_empty(const kvant_request &request);
bool is_empty(const kvant_store_request &request);
bool is_empty(const kvant_rotate_request &request);
bool is_empty(const kvant_norm_request &request);
bool is_empty(const kvant_choose_request &request);
bool is_empty(const kvant_multiply_request &request);
bool is_empty(const kvant_map_request &request);

}  // namespace kvant
