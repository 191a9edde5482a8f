// Attention where the processor multiplies matrices of 16-bit floats: of many positions here, of all
// else as AVX-512 does it.
#include "kernels.hpp"
#include "many.hpp"

namespace kvant::KVANT_TARGET {

// More positions than these go together: of a draft and the token before it, each passes over all
// rows alone (attend.cpp).
constexpr int64_t FEW = 9;

void attend(const kvant_request &request) {
    if (request.queries > FEW && !request.chosen && in_pairs(request))
        return AttendMany<uint32_t>(request).run();
    avx512::KERNELS.attend(request);
}

}  // namespace kvant::KVANT_TARGET
