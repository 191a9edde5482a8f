// Products of codes as signed bytes on NEON with dot products of four bytes a lane (sdot), or with
// products of two rows of eight bytes (smmla, if KVANT_BYTE_MATRIX). A number of 15 bits is
// 128 high + low, both signed bytes.
//
//   sdot    a register: four codes of 4 lanes; one number's high half, then its low half
//   smmla   a register: eight codes of 2 lanes; the sums of both halves, for both lanes:
//           lane 0 high | lane 0 low | lane 1 high | lane 1 low
#pragma once

#include "vec128.hpp"

namespace kvant::KVANT_TARGET {

constexpr int QUAD_TILES = 1, QUAD_CHUNKS = 1;
constexpr int BYTE_STEP = KVANT_BYTE_MATRIX ? 2 : 1;

// The levels of codes in N registers.
template <int N> struct Bytes {
    int8x16_t at[N];
};
// Levels of 15 bits.
template <int N> struct TwoBytes {
    Bytes<N> high, low;
};

#if KVANT_BYTE_MATRIX
// Eight codes a lane, two lanes a register.
struct LongCodes {
    uint32x4_t at[8];
};
inline LongCodes together(I x, I y) {
    LongCodes out;
    for (int i = 0; i < 4; i++) {
        out.at[2 * i] = vzip1q_u32(x.at[i], y.at[i]);
        out.at[2 * i + 1] = vzip2q_u32(x.at[i], y.at[i]);
    }
    return out;
}

// Sums of products with eight 15-bit numbers, for 8 of the 16 lanes; the products of two low halves,
// 2^-14 of the largest, are left out.
template <int PART> struct Quads {
    int32x4_t all[4];
    struct Four {
        int8x16_t both;  // high halves, then low ones
        explicit Four(const uint32_t *p) : both(vld1q_s8((const int8_t *)p)) {}
    };
    void clear() { all[0] = all[1] = all[2] = all[3] = vdupq_n_s32(0); }
    void add(const Bytes<8> &x, const Four &four) { add(x, four.both); }
    void add(const TwoBytes<8> &x, const Four &four) {
        add(x.high, four.both);
        add(x.low, vextq_s8(vdupq_n_s8(0), four.both, 8));
    }
    // Store the sums of 8 lanes at their places; with levels of 15 bits, 1/128 of the sums.
    void put(F &to) const {
        for (int i = 0; i < 2; i++) {
            const int32x4_t high = vuzp1q_s32(all[2 * i], all[2 * i + 1]);
            const int32x4_t low = vuzp2q_s32(all[2 * i], all[2 * i + 1]);
            to.at[2 * PART + i] = vcvtq_f32_s32(vmlaq_n_s32(low, high, 128));
        }
    }

private:
    void add(const Bytes<8> &x, int8x16_t y) {
        for (int i = 0; i < 4; i++) all[i] = vmmlaq_s32(all[i], x.at[4 * PART + i], y);
    }
};

#else

// Sums of products with four 15-bit numbers, for 8 of the 16 lanes; the products of two low halves,
// 2^-14 of the largest, are left out.
template <int PART> struct Quads {
    int32x4_t high[2], low[2];
    struct Four {
        int8x8_t both;  // high halves, then low ones
        explicit Four(const uint32_t *p) : both(vld1_s8((const int8_t *)p)) {}
    };
    void clear() { high[0] = high[1] = low[0] = low[1] = vdupq_n_s32(0); }
    void add(const Bytes<4> &x, const Four &four) {
        for (int i = 0; i < 2; i++) {
            high[i] = vdotq_lane_s32(high[i], x.at[2 * PART + i], four.both, 0);
            low[i] = vdotq_lane_s32(low[i], x.at[2 * PART + i], four.both, 1);
        }
    }
    void add(const TwoBytes<4> &x, const Four &four) {
        add(x.high, four);
        for (int i = 0; i < 2; i++)
            low[i] = vdotq_lane_s32(low[i], x.low.at[2 * PART + i], four.both, 0);
    }
    // Store the sums of 8 lanes at their places; with levels of 15 bits, 1/128 of the sums.
    void put(F &to) const {
        for (int i = 0; i < 2; i++)
            to.at[2 * PART + i] = vcvtq_f32_s32(vmlaq_n_s32(low[i], high[i], 128));
    }
};

#endif

// Codes that are their own levels; those of 8 bits are less by MIDDLE.
template <int BITS> struct CodeWords {
    using Number = uint32_t;
    static constexpr int PARTS = 2, STEP = BYTE_STEP, MIDDLE = BITS == 8 ? 128 : 0;
    template <int PART> using Sums = Quads<PART>;
    template <class Codes> static auto at(const Codes &x) {
        constexpr int N = sizeof x / 16;
        Bytes<N> out;
        for (int i = 0; i < N; i++) {
            const uint8x16_t code = vreinterpretq_u8_u32(x.at[i]);
            out.at[i] = vreinterpretq_s8_u8(BITS == 8 ? veorq_u8(code, vdupq_n_u8(MIDDLE))
                                                      : vandq_u8(code, vdupq_n_u8((1 << BITS) - 1)));
        }
        return out;
    }
};

inline int high_byte(int x) { return (x + 64) >> 7; }

// A table of up to 16 levels, looked up in two halves.
template <int BITS> struct TableWords {
    using Number = uint32_t;
    static constexpr int PARTS = 2, STEP = BYTE_STEP, MIDDLE = 0;
    template <int PART> using Sums = Quads<PART>;
    int8x16_t high, low;
    explicit TableWords(const int16_t *levels) {
        int8_t bytes[2][16];
        for (int i = 0; i < 16; i++) {
            const int level = levels[i & ((1 << BITS) - 1)];
            bytes[0][i] = (int8_t)high_byte(level);
            bytes[1][i] = (int8_t)(level - 128 * high_byte(level));
        }
        high = vld1q_s8(bytes[0]), low = vld1q_s8(bytes[1]);
    }
    template <class Codes> auto at(const Codes &x) const {
        constexpr int N = sizeof x / 16;
        TwoBytes<N> out;
        for (int i = 0; i < N; i++) {
            const uint8x16_t code =
                vandq_u8(vreinterpretq_u8_u32(x.at[i]), vdupq_n_u8((1 << BITS) - 1));
            out.high.at[i] = vqtbl1q_s8(high, code), out.low.at[i] = vqtbl1q_s8(low, code);
        }
        return out;
    }
};

// Store 16 numbers as the fours that Quads::Four reads.
template <bool> inline void store_fixed(uint32_t *p, I x) {
    int16x4_t high[4], low[4];
    for (int i = 0; i < 4; i++) {
        const int32x4_t n = vreinterpretq_s32_u32(x.at[i]);
        const int32x4_t upper = vrshrq_n_s32(n, 7);
        high[i] = vmovn_s32(upper), low[i] = vmovn_s32(vmlsq_n_s32(n, upper, 128));
    }
    for (int i = 0; i < 4; i += 2) {
        const int32x2_t a = vreinterpret_s32_s8(vmovn_s16(vcombine_s16(high[i], high[i + 1])));
        const int32x2_t b = vreinterpret_s32_s8(vmovn_s16(vcombine_s16(low[i], low[i + 1])));
        int32_t *const at = (int32_t *)p + 2 * i;
        if (BYTE_STEP == 2) vst1_s32(at, a), vst1_s32(at + 2, b);
        else vst1_s32(at, vzip1_s32(a, b)), vst1_s32(at + 2, vzip2_s32(a, b));
    }
}

}  // namespace kvant::KVANT_TARGET
