// The 16-bit float types of the interface, and the bit planes of codes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvant::KVANT_TARGET {

struct Bfloat {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Round to nearest, ties to even; NaN stays NaN.
inline Bfloat to_bfloat(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {(uint16_t)((bits >> 16) | 0x40)};
    return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline float to_float(Bfloat x) { return float_of((uint32_t)x.bits << 16); }

inline uint16_t to_half(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7e00;
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520 and above round to infinity
    if (size < 0x38800000) return sign | (uint16_t)std::rint(float_of(size) * 0x1p24f);
    return sign | (uint16_t)((size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13);
}

// Decode a float of 8 bits (codecs/fp8.py); x is not NaN.
inline float from_float8(uint8_t x) {
    const uint32_t sign = (uint32_t)(x & 0x80) << 24, power = x >> 3 & 15, rest = x & 7;
    if (power == 0) return float_of(sign | bits_of((float)rest * 0x1p-9f));
    return float_of(sign | (power + 120) << 23 | rest << 20);
}

inline uint32_t pair_of(float a, float b) {
    return (uint32_t)to_bfloat(a).bits | (uint32_t)to_bfloat(b).bits << 16;
}

// A code of BITS has LOW bits in the first plane and HIGH bits in the second (codecs/packing.py).
template <int BITS> struct Planes {
    static constexpr int LOW = BITS >= 8 ? 8 : BITS >= 4 ? 4 : 2;
    static constexpr int HIGH = BITS - LOW;
};

}  // namespace kvant::KVANT_TARGET
