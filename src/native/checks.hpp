// What a request leads to, checked against what it says is there: before any kernel runs, so that
// none of them has to look.
#pragma once

#include "kvant.h"

namespace kvant {

// Null, or in words what is refused; the first word is a field of the request.
const char *refused(const kvant_request &request);
const char *refused(const kvant_store_request &request);
const char *refused(const kvant_rotate_request &request);
const char *refused(const kvant_norm_request &request);
const char *refused(const kvant_choose_request &request);
const char *refused(const kvant_multiply_request &request);
const char *refused(const kvant_map_request &request);
const char *refused(const kvant_run_request &request);

// Is there nothing to do? Counts beside one that is zero may be anything, so no kernel sees them.
bool is_empty(const kvant_request &request);
bool is_empty(const kvant_store_request &request);
bool is_empty(const kvant_rotate_request &request);
bool is_empty(const kvant_norm_request &request);
bool is_empty(const kvant_choose_request &request);
bool is_empty(const kvant_multiply_request &request);
bool is_empty(const kvant_map_request &request);

}  // namespace kvant
