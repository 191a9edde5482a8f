// Multiply rows by the weight of a linear layer: few rows with the weight as it is stored, many with
// its decoded blocks. Codes are multiplied as integers, also with many rows, where that is faster
// than decoding them.
#include "few_rows.hpp"
#include "many_rows.hpp"

namespace kvant::KVANT_TARGET {

namespace {

constexpr int64_t MAX_ROWS = 1024;  // multiplied together, which bounds the memory of their copies

void multiply_rows(const kvant_multiply_request &request) {
    const bool coded = request.weight->format != KVANT_RAW;
    if (request.count <= FEW_ROWS || (coded && KVANT_INTEGER_CODES)) return FewRows(request).run();
#if KVANT_BFLOAT_DOT
    if (multiplies_pairs(request)) return ManyRows<uint32_t>(request).run();
#endif
    ManyRows<float>(request).run();
}

}  // namespace

void multiply(const kvant_multiply_request &request) {
    const kvant_weight &weight = *request.weight;
    const int64_t size = size_of(request.dtype);
    for (int64_t first = 0; first < request.count; first += MAX_ROWS) {
        kvant_multiply_request part = request;
        part.rows = (const char *)request.rows + first * weight.width * size;
        part.out = (char *)request.out + first * weight.outs * size;
        part.count = std::min(MAX_ROWS, request.count - first);
        multiply_rows(part);
    }
}

}  // namespace kvant::KVANT_TARGET
