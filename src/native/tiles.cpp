// Attention and linear layers on processors with matrix tiles of 16-bit floats (AMX), for many
// positions; other requests use AVX-512.
#include "few_rows.hpp"
#include "kernels.hpp"
#include "many_rows.hpp"
#include "prompt.hpp"

namespace kvant::KVANT_TARGET {

// Up to this many positions (a draft and the token before it) pass over all rows separately
// (attend.cpp).
constexpr int64_t MAX_SEPARATE_QUERIES = 9;

void attend(const kvant_request &request) {
    if (request.queries > MAX_SEPARATE_QUERIES && !request.chosen && in_pairs(request))
        return AttendMany<uint32_t>(request).run();
    avx512::attend(request);
}

void multiply(const kvant_multiply_request &request) {
    if (request.count > FEW_ROWS && multiplies_pairs(request))
        return ManyRows<uint32_t>(request).run();
    avx512::multiply(request);
}

}  // namespace kvant::KVANT_TARGET
