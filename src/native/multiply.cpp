// Multiply rows by the weight of a linear layer: few rows with the weight as it is stored, many with
// its decoded blocks. Codes are multiplied as integers, also with many rows, where that is faster
// than decoding them.
#include "few_rows.hpp"
#include "many_rows.hpp"

namespace kvant::KVANT_TARGET {

void multiply(const kvant_multiply_request &request) {
    const bool coded = request.weight->format != KVANT_RAW;
    if (request.count <= FEW_ROWS || (coded && KVANT_INTEGER_CODES)) return FewRows(request).run();
#if KVANT_BFLOAT_DOT
    if (multiplies_pairs(request)) return ManyRows<uint32_t>(request).run();
#endif
    ManyRows<float>(request).run();
}

}  // namespace kvant::KVANT_TARGET
