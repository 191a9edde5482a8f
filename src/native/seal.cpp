// Seal pages like codecs/affine.py, codebook.py and fp8.py, to the bit, in the arrangement that the
// kernels read. Compiled without fused operations, which would round differently from the codecs.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "encode.hpp"

namespace kvant::KVANT_TARGET {
namespace {

constexpr uint16_t NOT_A_NUMBER = 0x7e00;

struct Row {
    alignas(64) float x[MAX_DIM];
    alignas(64) uint8_t codes[MAX_DIM], packed[MAX_DIM];
    uint16_t scale[MAX_GROUPS], bias[MAX_GROUPS];
    FitSums sums[MAX_GROUPS];
};

constexpr int TILE = 16;  // rows whose scales are fitted together

// The minimum and the maximum of x; both NaN if any value is NaN or infinite.
struct Ends {
    float low, high;
};
Ends ends_of(const float *x, int count) {
    F high = set1(-3.4028235e38f), low = high, nonfinite = zero();
    for (int d = 0; d < count; d += 16) {
        const F y = load(x + d);
        high = max(high, y);
        low = max(low, sub(zero(), y));
        nonfinite = fma(y, zero(), nonfinite);
    }
    if (any_above(nonfinite, 0.0f)) return {__builtin_nanf(""), __builtin_nanf("")};
    return {-largest(low), largest(high)};
}

// Find the nearest codes, as integral floats.
void find_codes(const float *x, float *codes, int count, float scale, float bias, float max_code) {
    const float step = scale > 0 ? scale : 1.0f;
    for (int i = 0; i < count; i++)
        codes[i] = std::min(std::max(std::rint((x[i] - bias) / step), 0.0f), max_code);
}

void affine_row(Row &row, const kvant_side &r) {
    const float max_code = (float)((1 << r.bits) - 1);
    alignas(64) float codes[MAX_DIM];
    for (int64_t d = 0, u = 0; d < r.dim; d += r.group, u++) {
        const int count = (int)std::min(r.group, r.dim - d);
        float *x = row.x + d, *n = codes + d;
        const Ends ends = ends_of(x, count);
        if (std::isnan(ends.low)) {
            row.scale[u] = row.bias[u] = NOT_A_NUMBER;
            std::memset(x, 0, count * sizeof *x);
            std::memset(n, 0, count * sizeof *n);
            continue;
        }
        row.bias[u] = half_below(clamped(ends.low, LIMIT) + 0.0f);
        const float bias = half_value(row.bias[u]);
        row.scale[u] = half_above((clamped(ends.high, LIMIT) + 0.0f - bias) / max_code);
        for (int i = 0; i < count; i++) x[i] = clamped(x[i], LIMIT);
        find_codes(x, n, count, half_value(row.scale[u]), bias, max_code);
    }
    if (!r.corrected) {
        for (int64_t d = 0; d < r.dim; d++) row.codes[d] = (uint8_t)(int)codes[d];
        return;
    }
    for (int64_t d = 0, u = 0; d < r.dim; d += r.group, u++)
        row.sums[u] = sums_of(row.x + d, codes + d, (int)std::min(r.group, r.dim - d));
}

// Find the codes again, with the fitted scales and biases of a lane; 0 in broken groups.
void find_fitted_codes(Row &row, const FitGroups *tile, int lane, const kvant_side &r) {
    const float max_code = (float)((1 << r.bits) - 1);
    alignas(64) float codes[MAX_DIM];
    for (int64_t d = 0, u = 0; d < r.dim; d += r.group, u++)
        find_codes(row.x + d, codes + d, (int)std::min(r.group, r.dim - d),
                   half_value(tile[u].scale[lane].bits), half_value(tile[u].bias[lane].bits),
                   max_code);
    for (int64_t d = 0; d < r.dim; d++) row.codes[d] = (uint8_t)(int)codes[d];
}

void codebook_row(Row &row, const kvant_side &r) {
    const int dim = (int)r.dim;
    std::memset(row.codes, 0, dim);
    if (std::isnan(ends_of(row.x, dim).low)) {
        row.scale[0] = NOT_A_NUMBER;
        return;
    }
    double sums[MAX_DIM], squares[MAX_DIM];
    float unit[MAX_DIM];
    for (int d = 0; d < dim; d++) {
        row.x[d] = clamped(row.x[d], LIMIT);
        sums[d] = (double)row.x[d] * row.x[d];
    }
    double scale = std::sqrt(tree_sum(sums, dim) / dim);
    const float rms = (float)scale, by = rms > 0 ? rms : 1.0f;
    for (int d = 0; d < dim; d++) unit[d] = row.x[d] / by;
    for (int b = 0; b + 1 < 1 << r.bits; b++)
        for (int d = 0; d < dim; d++) row.codes[d] += unit[d] >= r.boundaries[b];
    if (r.corrected) {
        for (int d = 0; d < dim; d++) {
            const double level = r.levels[row.codes[d]];
            sums[d] = level * row.x[d];
            squares[d] = level * level;
        }
        scale = (tree_sum(sums, dim) + 0.0) / tree_sum(squares, dim);
    }
    row.scale[0] = to_half(std::min((float)scale, LIMIT));
}

// Round to the nearest float of 8 bits, ties to even; a negative zero becomes zero. x is not NaN,
// and at most 448 after rounding.
uint8_t to_float8(float x) {
    const uint32_t bits = bits_of(x), size = bits & 0x7fffffff;
    // Numbers below 2^-6 are denormal: multiples of 2^-9.
    const uint32_t code = size < 0x3c800000
                              ? (uint32_t)std::rint(float_of(size) * 0x1p9f)
                              : (size + 0x7ffff + (size >> 20 & 1) - 0x3c000000) >> 20;
    return (uint8_t)(code ? (bits >> 24 & 0x80) | code : 0);
}

void fp8_row(Row &row, const kvant_side &r) {
    const int dim = (int)r.dim;
    const Ends ends = ends_of(row.x, dim);
    if (std::isnan(ends.low)) {
        std::memset(row.codes, 0, dim);
        row.scale[0] = NOT_A_NUMBER;
        return;
    }
    row.scale[0] = half_above((clamped(std::max(ends.high, -ends.low), LIMIT) + 0.0f) / 448.0f);
    const float scale = half_value(row.scale[0]), step = scale > 0 ? scale : 1.0f;
    for (int d = 0; d < dim; d++) row.codes[d] = to_float8(clamped(row.x[d], LIMIT) / step);
}

// The arrangement of a field: tiles of `rows` rows and `width` bytes; one row: canonical order.
struct Place {
    int64_t rows, width;
    int64_t at(int64_t row, int64_t column, int64_t columns) const {
        return row / rows * rows * columns + column / width * rows * width + row % rows * width +
               column % width;
    }
};

class Sealing {
public:
    Sealing(const kvant_side &r, const PageSeal &page) : r(r), page(page) {
        width = r.dim * r.bits / 8;
        groups = r.format != KVANT_AFFINE ? 1 : (r.dim + r.group - 1) / r.group;
        codes = r.arrangement == KVANT_KEYS     ? Place{16, 4}
                : r.arrangement == KVANT_VALUES ? Place{4, 1}
                                                : Place{1, width};
        params = r.arrangement == KVANT_ROWS ? Place{1, groups} : Place{16, 1};
    }

    void run() {
        Row rows[TILE] = {};
        FitGroups tile[MAX_GROUPS];
        for (int64_t first = 0; first < page.count; first += TILE) {
            for (int n = 0; n < TILE; n++) {
                take(rows[n], first + n);
                seal_row(rows[n]);
                for (int64_t u = 0; u < groups; u++)
                    tile[u].take(n, rows[n].scale[u], rows[n].bias[u], rows[n].sums[u]);
            }
            put_params(tile, first);
            for (int n = 0; n < TILE; n++) {
                if (r.format == KVANT_AFFINE && r.corrected) find_fitted_codes(rows[n], tile, n, r);
                pack_row(rows[n].codes, (int)r.dim, (int)r.bits, rows[n].packed);
                put_codes(rows[n], first + n);
            }
        }
    }

private:
    const kvant_side &r;
    const PageSeal &page;
    int64_t width, groups;
    Place codes, params;

    void seal_row(Row &row) const {
        if (r.format == KVANT_AFFINE) affine_row(row, r);
        if (r.format == KVANT_CODEBOOK) codebook_row(row, r);
        if (r.format == KVANT_FP8) fp8_row(row, r);
    }

    void take(Row &row, int64_t n) const {
        const char *from = page.rows + n * page.row;
        for (int64_t d = 0; d < r.dim; d += 16) {
            if (r.dtype == KVANT_F32) store(row.x + d, load((const float *)from + d));
            if (r.dtype == KVANT_F16) store(row.x + d, load((const Half *)from + d));
            if (r.dtype == KVANT_BF16) store(row.x + d, load((const Bfloat *)from + d));
        }
    }

    void put_codes(const Row &row, int64_t n) const {
        uint8_t *to = page.codes + codes.at(n, 0, width);
        if (r.arrangement == KVANT_KEYS)
            for (int64_t j = 0; j < width; j += 4) std::memcpy(to + 16 * j, row.packed + j, 4);
        else if (r.arrangement == KVANT_VALUES)
            for (int64_t j = 0; j < width; j++) to[4 * j] = row.packed[j];
        else
            std::memcpy(to, row.packed, width);
    }

    // Fit and store the scales of 16 rows; fitting one would take nearly as long.
    void put_params(FitGroups *tile, int64_t first) const {
        for (int64_t u = 0; u < groups; u++) {
            if (r.format == KVANT_AFFINE && r.corrected)
                tile[u].fit((int)std::min(r.group, r.dim - u * r.group));
            for (int64_t n = 0; n < 16; n++) {
                const int64_t at = params.at(first + n, u, groups);
                page.scale[at] = tile[u].scale[n].bits;
                if (page.bias) page.bias[at] = tile[u].bias[n].bits;
            }
        }
    }
};

}  // namespace

void seal_page(const kvant_side &side, const PageSeal &page) { Sealing(side, page).run(); }

}  // namespace kvant::KVANT_TARGET
