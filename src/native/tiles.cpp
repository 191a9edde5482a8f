// Attention and linear layers on processors with matrix tiles of 16-bit floats (AMX), for many
// positions. Other requests use AVX-512. Codes of few positions use AVX-VNNI: these processors take
// half the time for products of integers, and less for fp8 in float32, than for 16-bit floats.
#include "few_rows.hpp"
#include "kernels.hpp"
#include "many_rows.hpp"
#include "prompt.hpp"

namespace kvant::KVANT_TARGET {

// Up to this many positions (a draft and the token before it) pass over all rows separately here,
// and up to the other number where tiles are not used (attend.cpp).
constexpr int64_t MAX_SEPARATE_QUERIES = 9, MAX_SEPARATE_WITHOUT_TILES = 16;

// Whether AVX-512 multiplies the codes of this side as 16-bit floats.
static bool are_floats(const kvant_side &side) {
    return side.format != KVANT_RAW && !has_bytes(side);
}

void attend(const kvant_request &request) {
    if (request.queries > MAX_SEPARATE_QUERIES && !request.chosen && in_pairs(request))
        return AttendMany<uint32_t>(request).run();
    const bool few = request.queries <= MAX_SEPARATE_WITHOUT_TILES || request.chosen;
    if (few && are_floats(*request.keys) && are_floats(*request.values))
        return avxvnni::attend(request);
    avx512::attend(request);
}

void multiply(const kvant_multiply_request &request) {
    if (request.count > FEW_ROWS && multiplies_pairs(request))
        return ManyRows<uint32_t>(request).run();
    avx512::multiply(request);
}

}  // namespace kvant::KVANT_TARGET
