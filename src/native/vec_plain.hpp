// Sixteen lanes as an array: for any processor, and the reference for the others.
#pragma once

#include <cmath>

#include "floats.hpp"

namespace kvant::KVANT_TARGET {

struct F {
    float at[16];
};
struct I {
    uint32_t at[16];
};

template <class Fn> inline F each(Fn fn) {
    F x;
    for (int i = 0; i < 16; i++) x.at[i] = fn(i);
    return x;
}
template <class Fn> inline I eachi(Fn fn) {
    I x;
    for (int i = 0; i < 16; i++) x.at[i] = fn(i);
    return x;
}

inline float from_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, power = h >> 10 & 31, rest = h & 1023;
    if (power == 0) return float_of(sign | bits_of((float)rest * 0x1p-24f));
    if (power == 31) return float_of(sign | 0x7f800000u | rest << 13);
    return float_of(sign | (power + 112) << 23 | rest << 13);
}

inline F set1(float x) { return each([&](int) { return x; }); }
inline F zero() { return set1(0.0f); }
inline F load(const float *p) { return each([&](int i) { return p[i]; }); }
inline F load(const Half *p) { return each([&](int i) { return from_half(p[i].bits); }); }
inline F load(const Bfloat *p) { return each([&](int i) { return to_float(p[i]); }); }
inline void store(float *p, F x) { std::memcpy(p, x.at, sizeof x.at); }
inline void store(Bfloat *p, F x) {
    for (int i = 0; i < 16; i++) p[i] = to_bfloat(x.at[i]);
}
inline void store_nearest(float *p, F x) { store(p, x); }
inline void store_nearest(Bfloat *p, F x) { store(p, x); }
inline void store_nearest(Half *p, F x) {
    for (int i = 0; i < 16; i++) p[i].bits = to_half(x.at[i]);
}
inline F add(F x, F y) { return each([&](int i) { return x.at[i] + y.at[i]; }); }
inline F sub(F x, F y) { return each([&](int i) { return x.at[i] - y.at[i]; }); }
inline F mul(F x, F y) { return each([&](int i) { return x.at[i] * y.at[i]; }); }
inline F divide(F x, F y) { return each([&](int i) { return x.at[i] / y.at[i]; }); }
inline F fma(F x, F y, F z) { return each([&](int i) { return x.at[i] * y.at[i] + z.at[i]; }); }
inline F max(F x, F y) { return each([&](int i) { return x.at[i] > y.at[i] ? x.at[i] : y.at[i]; }); }
inline F abs(F x) { return each([&](int i) { return std::fabs(x.at[i]); }); }
inline F exp(F x) { return each([&](int i) { return x.at[i] < -87.0f ? 0.0f : std::exp(x.at[i]); }); }
inline F rounded(F x) { return each([&](int i) { return to_float(to_bfloat(x.at[i])); }); }
inline F swapped(F x) {
    constexpr int from[4] = {0, 2, 1, 3};
    return each([&](int i) { return x.at[(i & ~3) + from[i & 3]]; });
}
template <int N> inline F folded(F x) {
    return each([&](int i) { return i & N ? x.at[i ^ N] - x.at[i] : x.at[i] + x.at[i ^ N]; });
}
inline F where_zero(F a, F b, F rest) {
    return each([&](int i) { return a.at[i] == 0.0f ? b.at[i] : rest.at[i]; });
}
inline float sum(F x) {
    float total = 0;
    for (float lane : x.at) total += lane;
    return total;
}
inline float largest(F x) {
    float top = x.at[0];
    for (float lane : x.at) top = lane <= top ? top : lane;
    return top;
}

inline bool any_above(F x, float y) {
    bool any = false;
    for (float lane : x.at) any = any || !(lane <= y);
    return any;
}

inline I set1i(int32_t x) { return eachi([&](int) { return (uint32_t)x; }); }
inline I zeros() { return set1i(0); }
inline I loadi(const void *p) {
    I x;
    std::memcpy(x.at, p, sizeof x.at);
    return x;
}
inline void storei(void *p, I x) { std::memcpy(p, x.at, sizeof x.at); }
inline F to_float(I x) { return each([&](int i) { return (float)(int32_t)x.at[i]; }); }
// NaN becomes the same integer as with AVX2 and AVX-512.
inline I to_int(F x) {
    return eachi([&](int i) {
        const float n = std::nearbyint(x.at[i]);
        return std::fabs(n) < 2147483648.0f ? (uint32_t)(int32_t)n : 0x80000000u;
    });
}
template <int N> inline I right(I x) { return eachi([&](int i) { return x.at[i] >> N; }); }
template <int N> inline I left(I x) { return eachi([&](int i) { return x.at[i] << N; }); }
inline I rightv(I x, I by) { return eachi([&](int i) { return x.at[i] >> by.at[i]; }); }
inline I leftv(I x, I by) { return eachi([&](int i) { return x.at[i] << by.at[i]; }); }
// Bits of `x` in `low` and of `y` in `high`; the others are zero.
inline I join(I low, I high, I x, I y) {
    return eachi([&](int i) { return (x.at[i] & low.at[i]) | (y.at[i] & high.at[i]); });
}
inline I max(I x, I y) {
    return eachi([&](int i) { return (int32_t)x.at[i] < (int32_t)y.at[i] ? y.at[i] : x.at[i]; });
}
inline int32_t largest(I x) {
    int32_t top = (int32_t)x.at[0];
    for (uint32_t lane : x.at) top = (int32_t)lane < top ? top : (int32_t)lane;
    return top;
}
// The bits of absolute values: they are ordered like the values, with NaN above infinity.
inline I magnitudes(F x) { return eachi([&](int i) { return bits_of(std::fabs(x.at[i])); }); }
template <int N> inline I repeated(const void *p) {
    I x;
    for (int i = 0; i < 16; i++) std::memcpy(x.at + i, (const char *)p + i % N * 4, 4);
    return x;
}

struct Pairs {
    F even, odd;
};

inline F dot2(F acc, Pairs x, uint32_t pair) {
    acc = fma(x.even, set1(float_of(pair << 16)), acc);
    return fma(x.odd, set1(float_of(pair & 0xffff0000u)), acc);
}

// Two numbers in single precision.
struct Fine {
    float even, odd;
};
inline void store_fine(Fine *p, F x) { store(&p->even, x); }

inline void unpaired(Pairs x, F &even, F &odd) { even = x.even, odd = x.odd; }
inline I left_cleared(I x) { return eachi([&](int i) { return x.at[i] & 255; }); }
inline F load_line(const float *p) { return load(p); }
inline F times(F acc, F x, float y) { return fma(x, set1(y), acc); }

template <int BITS> struct Levels {
    float table[1 << BITS];
    explicit Levels(const float *levels) {
        for (int i = 0; i < 1 << BITS; i++) table[i] = to_float(to_bfloat(levels[i]));
    }
    Pairs at(I x) const {
        constexpr uint32_t mask = (1 << BITS) - 1;
        return {each([&](int i) { return table[x.at[i] & mask]; }),
                each([&](int i) { return table[x.at[i] >> 16 & mask]; })};
    }
};

// Floats of 8 bits.
template <> struct Levels<8> {
    float table[256];
    explicit Levels(const float *) {
        for (int i = 0; i < 256; i++) table[i] = from_float8((uint8_t)i);
    }
    Pairs at(I x) const {
        return {each([&](int i) { return table[x.at[i] & 255]; }),
                each([&](int i) { return table[x.at[i] >> 16 & 255]; })};
    }
};

constexpr int QUAD_TILES = 1, QUAD_CHUNKS = 1;
template <int GN> constexpr int ROW_CHUNKS = 4;
constexpr int WEIGHT_ROWS = 64;  // no limit: a whole range is prefetched before it is read
constexpr int PRODUCT_QUERIES = 4, PRODUCT_VECTORS = 4;

// The levels of four codes a lane, as 16-bit integers: of bytes 0 and 2, and of bytes 1 and 3.
struct Words {
    I even, odd;
};
template <class Fn> inline Words each_word(I x, Fn level) {
    const auto two = [&](uint32_t x) {
        return (uint32_t)(uint16_t)level(x & 255) | (uint32_t)(uint16_t)level(x >> 16 & 255) << 16;
    };
    return {eachi([&](int i) { return two(x.at[i]); }), eachi([&](int i) { return two(x.at[i] >> 8); })};
}
// Sums of products with four 16-bit numbers: 0 2 for even words, 1 3 for odd ones.
struct Quads {
    I all;
    struct Four {
        uint32_t even, odd;
        explicit Four(const uint32_t *p) : even(p[0]), odd(p[1]) {}
    };
    void clear() { all = zeros(); }
    void add(const Words &x, const Four &four) {
        all = eachi([&](int i) {
            return all.at[i] + two(x.even.at[i], four.even) + two(x.odd.at[i], four.odd);
        });
    }
    void put(F &sums) const { sums = to_float(all); }

private:
    static uint32_t two(uint32_t x, uint32_t y) {
        return (int16_t)x * (int16_t)y + (int16_t)(x >> 16) * (int16_t)(y >> 16);
    }
};

// Codes that are their own levels.
template <int BITS> struct CodeWords {
    using Number = uint32_t;  // a pair of the fours that the sums are made of
    static constexpr int PARTS = 1, STEP = 1, MIDDLE = 0;
    template <int> using Sums = Quads;
    static Words at(I x) {
        return each_word(x, [](uint32_t code) { return code & ((1 << BITS) - 1); });
    }
};
template <int BITS> struct TableWords {
    using Number = uint32_t;
    static constexpr int PARTS = 1, STEP = 1, MIDDLE = 0;
    template <int> using Sums = Quads;
    int16_t levels[1 << BITS];
    explicit TableWords(const int16_t *from) { std::memcpy(levels, from, sizeof levels); }
    Words at(I x) const {
        return each_word(x, [&](uint32_t code) { return levels[code & ((1 << BITS) - 1)]; });
    }
};
template <bool> inline void store_fixed(uint32_t *p, I x) {
    for (int i = 0; i < 16; i += 4) {
        p[i / 2] = (x.at[i] & 0xffff) | x.at[i + 2] << 16;
        p[i / 2 + 1] = (x.at[i + 1] & 0xffff) | x.at[i + 3] << 16;
    }
}

// Sums of products of 16-bit floats with four floats.
struct HalfQuads {
    F all;
    using Four = const Fine *;
    void clear() { all = zero(); }
    void add(const Words &x, const Fine *four) {
        all = each([&](int i) {
            return all.at[i] + two(x.even.at[i], four[0]) + two(x.odd.at[i], four[1]);
        });
    }
    void put(F &sums) const { sums = all; }

private:
    static float two(uint32_t x, Fine y) {
        return from_half((uint16_t)x) * y.even + from_half((uint16_t)(x >> 16)) * y.odd;
    }
};

// Floats of 8 bits as 16-bit floats, 2^-8 of their value.
struct HalfWords {
    using Number = Fine;
    static constexpr int PARTS = 1, STEP = 1, MIDDLE = 0;
    template <int> using Sums = HalfQuads;
    static Words at(I x) {
        return each_word(x, [](uint32_t code) { return (code & 128) << 8 | (code & 127) << 7; });
    }
};

// Sums of products of rows with queries.
constexpr int DOTS = 16;
struct Dot {
    F x = zero();
};
inline void dot(Dot &sum, F x, F y) { sum.x = fma(x, y, sum.x); }
inline void store_dots(float *p, const Dot *dots) {
    for (int i = 0; i < DOTS; i++) p[i] = sum(dots[i].x);
}

}  // namespace kvant::KVANT_TARGET
