// Pack the codes of a row into bytes (codecs/packing.py), and round scales to 16-bit floats.
#pragma once

#include "shape.hpp"

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

}  // namespace kvant::KVANT_TARGET
