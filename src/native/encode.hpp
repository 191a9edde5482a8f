// Encode rows with the bits of the codecs: round scales to 16-bit floats, pack codes into bytes
// (codecs/packing.py), and fit affine groups by least squares, 16 at a time (codecs/affine.py). Must
// be compiled without fused operations.
#pragma once

#include <algorithm>

#include "limits.hpp"
#include "vec.hpp"

namespace kvant::KVANT_TARGET {

inline float half_value(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, power = h >> 10 & 31, rest = h & 1023;
    if (power == 0) return float_of(sign | bits_of((float)rest * 0x1p-24f));
    return float_of(sign | (power + 112) << 23 | rest << 13);
}

// The largest half that is at most x.
inline uint16_t half_below(float x) {
    const uint16_t nearest = to_half(x);
    if (half_value(nearest) <= x) return nearest;
    if ((nearest & 0x7fff) == 0) return 0x8001;
    return nearest & 0x8000 ? nearest + 1 : nearest - 1;
}

inline uint16_t half_above(float x) { return half_below(-x) ^ 0x8000; }

// Pack WIDTH bits of each code, from bit FROM on, interleaved within spans.
template <int WIDTH, int FROM>
inline void pack_plane(const uint8_t *codes, int dim, int span, uint8_t *out) {
    const int per_byte = 8 / WIDTH, step = span / per_byte;
    for (int d = 0; d < dim; d += span, out += step)
        for (int e = 0; e < step; e++) {
            unsigned byte = 0;
            for (int i = 0; i < per_byte; i++)
                byte |= (codes[d + e + i * step] >> FROM & ((1 << WIDTH) - 1)) << WIDTH * i;
            out[e] = (uint8_t)byte;
        }
}

inline void pack_row(const uint8_t *codes, int dim, int bits, uint8_t *out) {
    const int span = dim % 32 ? 16 : 32;
    switch (bits) {
    case 8: std::memcpy(out, codes, dim); break;
    case 6:
        pack_plane<4, 0>(codes, dim, span, out);
        pack_plane<2, 4>(codes, dim, span, out + dim / 2);
        break;
    case 5:
        pack_plane<4, 0>(codes, dim, span, out);
        pack_plane<1, 4>(codes, dim, span, out + dim / 2);
        break;
    case 4: pack_plane<4, 0>(codes, dim, span, out); break;
    case 3:
        pack_plane<2, 0>(codes, dim, span, out);
        pack_plane<1, 2>(codes, dim, span, out + dim / 4);
        break;
    case 2: pack_plane<2, 0>(codes, dim, span, out); break;
    }
}

constexpr float LIMIT = 65504.0f;

inline float clamped(float x, float limit) { return std::min(std::max(x, -limit), limit); }

// Sum in the order of the codecs.
inline double tree_sum(double *x, int64_t width) {
    while (width > 1) {
        const int64_t half = (width + 1) / 2;
        for (int64_t i = 0; i < width - half; i++) x[i] += x[half + i];
        width = half;
    }
    return x[0];
}

// Eight doubles, and the floats they are converted from; compilers split them into registers.
typedef double Eight __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(32)));

inline void widen(Eight &to, const float *x) {
    Floats y;
    std::memcpy(&y, x, sizeof y);
    to = __builtin_convertvector(y, Eight);
}
inline double tree_sum(const Eight &x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}
template <int COUNT> inline double tree_sum(Eight *x) {
    if constexpr (COUNT > 1) {
        for (int i = 0; i < COUNT / 2; i++) x[i] += x[COUNT / 2 + i];
        return tree_sum<COUNT / 2>(x);
    }
    return tree_sum(*x);
}

template <int WIDTH> inline void float_sums(const float *x, const float *codes, double *sums) {
    constexpr int COUNT = WIDTH / 8;
    Eight products[COUNT], values[COUNT];
    for (int i = 0; i < COUNT; i++) {
        widen(products[i], codes + 8 * i);
        widen(values[i], x + 8 * i);
        products[i] *= values[i];
    }
    sums[0] = tree_sum<COUNT>(products), sums[1] = tree_sum<COUNT>(values);
}

inline void float_sums(const float *x, const float *codes, int count, double *sums) {
    double products[MAX_GROUP_WIDTH] = {}, values[MAX_GROUP_WIDTH] = {};
    for (int i = 0; i < count; i++) {
        values[i] = x[i];
        products[i] = values[i] * codes[i];
    }
    sums[0] = tree_sum(products, count), sums[1] = tree_sum(values, count);
}

// The sums that the fit of a group needs. Products of a code and a value are exact, and so are sums
// of codes in any order: integers below 2^24.
struct FitSums {
    double codes, squares, products, values;
};

inline FitSums sums_of(const float *x, const float *codes, int count) {
    F total = zero(), squares = zero();
    for (int i = 0; i < count; i += 16) {
        const F c = load(codes + i);
        total = add(total, c), squares = fma(c, c, squares);
    }
    double dense[2];
    switch (count) {
    case 16: float_sums<16>(x, codes, dense); break;
    case 32: float_sums<32>(x, codes, dense); break;
    case 64: float_sums<64>(x, codes, dense); break;
    case 128: float_sums<128>(x, codes, dense); break;
    default: float_sums(x, codes, count, dense);
    }
    return {sum(total), sum(squares), dense[0], dense[1]};
}

// The scales and biases of 16 groups with equally many values.
struct FitGroups {
    alignas(64) Half scale[16], bias[16];
    double codes[16], squares[16], products[16], values[16];

    void take(int lane, uint16_t by, uint16_t from, const FitSums &sums) {
        scale[lane].bits = by, bias[lane].bits = from;
        codes[lane] = sums.codes, squares[lane] = sums.squares;
        products[lane] = sums.products, values[lane] = sums.values;
    }

    // Replace each pair by its fit if that has a smaller error.
    void fit(int count) {
        const double n = count;
        double slope[16], spread[16];
        float by[16], from[16], old_by[16], old_from[16];
        store(old_by, load(scale)), store(old_from, load(bias));
        for (int i = 0; i < 16; i++) {
            spread[i] = n * squares[i] - codes[i] * codes[i];
            slope[i] = (n * products[i] - codes[i] * values[i]) / spread[i];
            by[i] = clamped((float)slope[i], LIMIT);
        }
        nearest(by);
        for (int i = 0; i < 16; i++)
            from[i] = clamped((float)((values[i] - by[i] * codes[i]) / n), LIMIT);
        nearest(from);
        // n times the squared error in excess of the unrounded fit's.
        const auto excess = [&](int i, float by, float from) {
            const double off = by - slope[i], rest = by * codes[i] + n * from - values[i];
            return off * off * spread[i] + rest * rest;
        };
        for (int i = 0; i < 16; i++) {
            // Equal codes have no fit: its error is NaN, which is not less.
            const bool less = by[i] > 0 && excess(i, by[i], from[i]) < excess(i, old_by[i], old_from[i]);
            by[i] = less ? by[i] : old_by[i];
            from[i] = less ? from[i] : old_from[i];
        }
        store_nearest(scale, load(by)), store_nearest(bias, load(from));
    }

private:
    // Round to the nearest halves; never a negative zero.
    static void nearest(float *x) {
        Half halves[16];
        store_nearest(halves, load(x));
        store(x, add(load(halves), zero()));
    }
};

}  // namespace kvant::KVANT_TARGET
