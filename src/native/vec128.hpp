// Sixteen lanes in four registers: NEON of 64-bit Arm. Products of 16-bit floats are computed in
// single precision, those of codes as integers (words128.hpp, bytes128.hpp).
#pragma once

#include <arm_neon.h>

#include <initializer_list>

#include "floats.hpp"

namespace kvant::KVANT_TARGET {

struct F {
    float32x4_t at[4];
};
struct I {
    uint32x4_t at[4];
};

template <class Fn> inline F each(Fn fn) { return {{fn(0), fn(1), fn(2), fn(3)}}; }
template <class Fn> inline I eachi(Fn fn) { return {{fn(0), fn(1), fn(2), fn(3)}}; }

inline float32x4_t as_floats(uint32x4_t x) { return vreinterpretq_f32_u32(x); }
inline uint32x4_t as_bits(float32x4_t x) { return vreinterpretq_u32_f32(x); }
inline uint32x4_t load4(const void *p) { return vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)p)); }

inline F set1(float x) { return each([&](int) { return vdupq_n_f32(x); }); }
inline F zero() { return set1(0.0f); }
inline F load(const float *p) { return each([&](int i) { return vld1q_f32(p + 4 * i); }); }
inline F load(const Half *p) {
    const float16x8_t a = vreinterpretq_f16_u32(load4(p)), b = vreinterpretq_f16_u32(load4(p + 8));
    return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)),
             vcvt_high_f32_f16(b)}};
}
inline F load(const Bfloat *p) {
    const uint16x8_t none = vdupq_n_u16(0);
    const uint16x8_t a = vreinterpretq_u16_u32(load4(p)), b = vreinterpretq_u16_u32(load4(p + 8));
    const auto widened = [](uint16x8_t x) { return vreinterpretq_f32_u16(x); };
    return {{widened(vzip1q_u16(none, a)), widened(vzip2q_u16(none, a)),
             widened(vzip1q_u16(none, b)), widened(vzip2q_u16(none, b))}};
}
inline void store(float *p, F x) {
    vst1q_f32(p, x.at[0]), vst1q_f32(p + 4, x.at[1]);
    vst1q_f32(p + 8, x.at[2]), vst1q_f32(p + 12, x.at[3]);
}
inline F add(F x, F y) { return each([&](int i) { return vaddq_f32(x.at[i], y.at[i]); }); }
inline F sub(F x, F y) { return each([&](int i) { return vsubq_f32(x.at[i], y.at[i]); }); }
inline F mul(F x, F y) { return each([&](int i) { return vmulq_f32(x.at[i], y.at[i]); }); }
inline F divide(F x, F y) { return each([&](int i) { return vdivq_f32(x.at[i], y.at[i]); }); }
inline F fma(F x, F y, F z) {
    return each([&](int i) { return vfmaq_f32(z.at[i], x.at[i], y.at[i]); });
}
// The second operand if one is NaN, as on the other processors.
inline float32x4_t max(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline F max(F x, F y) { return each([&](int i) { return max(x.at[i], y.at[i]); }); }
inline F abs(F x) { return each([&](int i) { return vabsq_f32(x.at[i]); }); }
inline bool any_above(F x, float y) {
    const I most = eachi([&](int i) { return vcleq_f32(x.at[i], vdupq_n_f32(y)); });
    const uint32x4_t a = vandq_u32(most.at[0], most.at[1]), b = vandq_u32(most.at[2], most.at[3]);
    return vminvq_u32(vandq_u32(a, b)) == 0;
}
inline float sum(F x) {
    return vaddvq_f32(vaddq_f32(vaddq_f32(x.at[0], x.at[1]), vaddq_f32(x.at[2], x.at[3])));
}
inline float largest(F x) {
    float lanes[4];
    vst1q_f32(lanes, max(max(x.at[0], x.at[1]), max(x.at[2], x.at[3])));
    float top = lanes[0];
    for (float lane : lanes) top = lane <= top ? top : lane;
    return top;
}
inline F where_zero(F a, F b, F rest) {
    return each([&](int i) { return vbslq_f32(vceqzq_f32(a.at[i]), b.at[i], rest.at[i]); });
}

inline I set1i(int32_t x) { return eachi([&](int) { return vdupq_n_u32((uint32_t)x); }); }
inline I zeros() { return set1i(0); }
inline I loadi(const void *p) { return eachi([&](int i) { return load4((const char *)p + 16 * i); }); }
inline F to_float(I x) {
    return each([&](int i) { return vcvtq_f32_s32(vreinterpretq_s32_u32(x.at[i])); });
}
inline I to_int(F x) {
    return eachi([&](int i) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(x.at[i])); });
}
template <int N> inline I right(I x) {
    if constexpr (N == 0) return x;
    else return eachi([&](int i) { return vshrq_n_u32(x.at[i], N); });
}
template <int N> inline I left(I x) {
    return eachi([&](int i) { return vshlq_n_u32(x.at[i], N); });
}
inline I leftv(I x, I by) {
    return eachi([&](int i) { return vshlq_u32(x.at[i], vreinterpretq_s32_u32(by.at[i])); });
}
inline I rightv(I x, I by) {
    return eachi([&](int i) { return vshlq_u32(x.at[i], vnegq_s32(vreinterpretq_s32_u32(by.at[i]))); });
}
// Bits of `x` in `low`; elsewhere those of `y`, though only bits in `high` are needed.
inline I join(I low, I, I x, I y) {
    return eachi([&](int i) { return vbslq_u32(low.at[i], x.at[i], y.at[i]); });
}
inline I max(I x, I y) {
    return eachi([&](int i) {
        return vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(x.at[i]), vreinterpretq_s32_u32(y.at[i])));
    });
}
inline int32_t largest(I x) {
    const auto lanes = [&](int i) { return vreinterpretq_s32_u32(x.at[i]); };
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(lanes(0), lanes(1)), vmaxq_s32(lanes(2), lanes(3))));
}
// The bits of absolute values: they are ordered like the values, with NaN above infinity.
inline I magnitudes(F x) { return eachi([&](int i) { return as_bits(vabsq_f32(x.at[i])); }); }
template <int N> inline I repeated(const void *p) {
    return eachi([&](int i) { return load4((const char *)p + 16 * (i % (N / 4))); });
}

template <int GN> constexpr int ROW_CHUNKS = 4 / GN;
constexpr int WEIGHT_ROWS = 64;  // no limit: a whole range is prefetched before it is read
constexpr int PRODUCT_QUERIES = 4, PRODUCT_VECTORS = 1;  // whose sums fit registers

// Sums of products of rows with queries, DOTS of them in registers.
constexpr int DOTS = 8;
struct Dot {
    float32x4_t a = vdupq_n_f32(0.0f), b = vdupq_n_f32(0.0f);  // no product waits for the previous one
};
inline void dot(Dot &sum, F x, F y) {
    sum.a = vfmaq_f32(sum.a, x.at[0], y.at[0]);
    sum.b = vfmaq_f32(sum.b, x.at[1], y.at[1]);
    sum.a = vfmaq_f32(sum.a, x.at[2], y.at[2]);
    sum.b = vfmaq_f32(sum.b, x.at[3], y.at[3]);
}
inline void store_dots(float *p, const Dot *sums) {
    const auto two = [&](int i) {
        return vpaddq_f32(vaddq_f32(sums[i].a, sums[i].b), vaddq_f32(sums[i + 1].a, sums[i + 1].b));
    };
    vst1q_f32(p, vpaddq_f32(two(0), two(2)));
    vst1q_f32(p + 4, vpaddq_f32(two(4), two(6)));
}

// The upper halves round like to_bfloat; the lower ones are undefined.
inline uint32x4_t narrowed(float32x4_t x) {
    const uint32x4_t bits = as_bits(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t near = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(x, x), near, vorrq_u32(bits, vdupq_n_u32(0x400000)));
}
inline void store(Bfloat *p, F x) {
    const auto two = [&](int i) {
        return vuzp2q_u16(vreinterpretq_u16_u32(narrowed(x.at[i])),
                          vreinterpretq_u16_u32(narrowed(x.at[i + 1])));
    };
    vst1q_u16(&p->bits, two(0)), vst1q_u16(&p[8].bits, two(2));
}
inline void store_nearest(float *p, F x) { store(p, x); }
inline void store_nearest(Bfloat *p, F x) { store(p, x); }
inline void store_nearest(Half *p, F x) {
    const auto two = [&](int i) {
        return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.at[i]), x.at[i + 1]));
    };
    vst1q_u16(&p->bits, two(0)), vst1q_u16(&p[8].bits, two(2));
}
inline F rounded(F x) {
    const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
    return each([&](int i) { return as_floats(vandq_u32(narrowed(x.at[i]), upper)); });
}
inline F swapped(F x) {  // lanes 0 2 1 3 of every four
    return each([&](int i) { return vuzp1q_f32(x.at[i], vextq_f32(x.at[i], x.at[i], 1)); });
}

template <int N> inline float32x4_t folded(float32x4_t x) {
    if constexpr (N == 1) {
        const float32x4_t other = vrev64q_f32(x);
        return vtrn1q_f32(vaddq_f32(x, other), vsubq_f32(x, other));
    } else {
        const float32x4_t other = vextq_f32(x, x, 2);
        const float64x2_t sum = vreinterpretq_f64_f32(vaddq_f32(x, other));
        const float64x2_t difference = vreinterpretq_f64_f32(vsubq_f32(x, other));
        return vreinterpretq_f32_f64(vzip1q_f64(sum, difference));
    }
}
template <int N> inline F folded(F x) {
    if constexpr (N < 4) return each([&](int i) { return folded<N>(x.at[i]); });
    constexpr int distance = N / 4;
    return each([&](int i) {
        const float32x4_t a = x.at[i & ~distance], b = x.at[i | distance];
        return i & distance ? vsubq_f32(a, b) : vaddq_f32(a, b);
    });
}

inline float32x4_t exp(float32x4_t x) {
    const float32x4_t low = vdupq_n_f32(-87.0f), y = vmaxq_f32(low, x);
    const float32x4_t n = vrndnq_f32(vmulq_n_f32(y, 1.44269504f));
    float32x4_t f = vfmaq_n_f32(y, n, -0.693359375f);
    f = vfmaq_n_f32(f, n, 2.12194440e-4f);
    float32x4_t p = vdupq_n_f32(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                    5.0000001201e-1f})
        p = vfmaq_f32(vdupq_n_f32(c), p, f);
    p = vaddq_f32(vfmaq_f32(f, vmulq_f32(f, f), p), vdupq_n_f32(1.0f));
    // A NaN propagates through p; its exponent is arbitrary.
    const int32x4_t power = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
    const float32x4_t scale = vreinterpretq_f32_s32(vshlq_n_s32(power, 23));
    return as_floats(vbicq_u32(as_bits(vmulq_f32(p, scale)), vcltq_f32(x, low)));
}
inline F exp(F x) { return each([&](int i) { return exp(x.at[i]); }); }

struct Pairs {
    F even, odd;
};

inline F load_line(const float *p) { return load(p); }
inline F times(F acc, F x, float y) {
    return each([&](int i) { return vfmaq_n_f32(acc.at[i], x.at[i], y); });
}
inline F dot2(F acc, Pairs x, uint32_t pair) {
    return times(times(acc, x.even, float_of(pair << 16)), x.odd, float_of(pair & 0xffff0000u));
}

// Two numbers in single precision.
struct Fine {
    float even, odd;
};
inline void store_fine(Fine *p, F x) { store(&p->even, x); }

inline void unpaired(Pairs x, F &even, F &odd) { even = x.even, odd = x.odd; }
inline I left_cleared(I x) {
    return eachi([&](int i) { return vandq_u32(x.at[i], vdupq_n_u32(255)); });
}

// Bytes of a table of 16, 32 or 64.
template <int SIZE> struct Lookup {
    uint8x16_t table[SIZE / 16];
    explicit Lookup(const uint8_t *bytes) {
        for (int i = 0; i < SIZE / 16; i++) table[i] = vld1q_u8(bytes + 16 * i);
    }
    uint8x16_t at(uint8x16_t index) const {
        if constexpr (SIZE == 16) return vqtbl1q_u8(table[0], index);
        if constexpr (SIZE == 32) return vqtbl2q_u8({{table[0], table[1]}}, index);
        if constexpr (SIZE == 64)
            return vqtbl4q_u8({{table[0], table[1], table[2], table[3]}}, index);
    }
};

// Levels of 16-bit floats, looked up in two halves of 8 bits.
template <int BITS> struct Levels {
    static constexpr int SIZE = BITS > 4 ? 1 << BITS : 16;
    Lookup<SIZE> low, high;
    explicit Levels(const float *levels)
        : low(Bytes(levels, 0).bytes), high(Bytes(levels, 8).bytes) {}
    Pairs at(I index) const {
        Pairs out;
        for (int i = 0; i < 4; i++) {
            const uint32x4_t code = vandq_u32(index.at[i], vdupq_n_u32(((1 << BITS) - 1) * 0x10001u));
            const uint8x16_t bytes = vreinterpretq_u8_u32(code);
            const uint32x4_t words = vreinterpretq_u32_u8(vtrn1q_u8(low.at(bytes), high.at(bytes)));
            out.even.at[i] = as_floats(vshlq_n_u32(words, 16));
            out.odd.at[i] = as_floats(vandq_u32(words, vdupq_n_u32(0xffff0000u)));
        }
        return out;
    }

private:
    struct Bytes {
        uint8_t bytes[SIZE];
        Bytes(const float *levels, int shift) {
            for (int i = 0; i < SIZE; i++)
                bytes[i] = (uint8_t)(to_bfloat(levels[i & ((1 << BITS) - 1)]).bits >> shift);
        }
    };
};

// Floats of 8 bits in the upper byte of each word, as 16-bit floats: 2^-8 of their value.
inline int16x8_t half_of(uint16x8_t x) {
    return vandq_s16(vshrq_n_s16(vreinterpretq_s16_u16(x), 1), vdupq_n_s16((int16_t)0xbf80));
}

template <> struct Levels<8> {
    explicit Levels(const float *) {}
    static Pairs at(I index) {
        const auto widened = [](uint16x4_t x) {
            return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(x)), 256.0f);
        };
        Pairs out;
        for (int i = 0; i < 4; i++) {
            const uint16x8_t x = vshlq_n_u16(vreinterpretq_u16_u32(index.at[i]), 8);
            const uint32x4_t halves = vreinterpretq_u32_s16(half_of(x));
            out.even.at[i] = widened(vmovn_u32(halves));
            out.odd.at[i] = widened(vshrn_n_u32(halves, 16));
        }
        return out;
    }
};

// The levels of four codes a lane, as 16-bit numbers: of byte k, for lanes 0 to 7 and 8 to 15.
struct Words {
    int16x8_t at[4][2];

    Words() = default;
    // Words of bytes 0 and 2 of each lane, and of bytes 1 and 3, in the registers of an I.
    Words(const int16x8_t *even, const int16x8_t *odd) {
        for (int i = 0; i < 2; i++) {
            at[0][i] = vuzp1q_s16(even[2 * i], even[2 * i + 1]);
            at[1][i] = vuzp1q_s16(odd[2 * i], odd[2 * i + 1]);
            at[2][i] = vuzp2q_s16(even[2 * i], even[2 * i + 1]);
            at[3][i] = vuzp2q_s16(odd[2 * i], odd[2 * i + 1]);
        }
    }
};

// Sums of products of 16-bit floats with four floats, for 8 of the 16 lanes.
template <int PART> struct HalfQuads {
    float32x4_t low, high;
    struct Four {
        float32x4_t all;  // 0 2 1 3
        explicit Four(const Fine *p) : all(vld1q_f32(&p->even)) {}
    };
    void clear() { low = high = vdupq_n_f32(0.0f); }
    void add(const Words &x, const Four &four) {
        add<0>(x.at[0][PART], four), add<2>(x.at[1][PART], four);
        add<1>(x.at[2][PART], four), add<3>(x.at[3][PART], four);
    }
    void put(F &sums) const { sums.at[2 * PART] = low, sums.at[2 * PART + 1] = high; }

private:
    template <int LANE> void add(int16x8_t words, const Four &four) {
        const float16x8_t halves = vreinterpretq_f16_s16(words);
        low = vfmaq_laneq_f32(low, vcvt_f32_f16(vget_low_f16(halves)), four.all, LANE);
        high = vfmaq_laneq_f32(high, vcvt_high_f32_f16(halves), four.all, LANE);
    }
};

// Floats of 8 bits as 16-bit floats, 2^-8 of their value.
struct HalfWords {
    using Number = Fine;
    static constexpr int PARTS = 2, STEP = 1, MIDDLE = 0;
    template <int PART> using Sums = HalfQuads<PART>;
    static Words at(I x) {
        int16x8_t even[4], odd[4];
        for (int i = 0; i < 4; i++) {
            const uint16x8_t words = vreinterpretq_u16_u32(x.at[i]);
            even[i] = half_of(vshlq_n_u16(words, 8)), odd[i] = half_of(words);
        }
        return {even, odd};
    }
};

}  // namespace kvant::KVANT_TARGET
