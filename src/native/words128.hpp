// Products of codes as 16-bit integers on NEON: each word of a register times one of four numbers.
#pragma once

#include "vec128.hpp"

namespace kvant::KVANT_TARGET {

constexpr int QUAD_TILES = 1, QUAD_CHUNKS = 1;  // of 16 rows, or channels, whose sums fit registers

// Sums of products with four 16-bit numbers.
struct Quads {
    int32x4_t all[4];
    struct Four {
        int16x4_t all;
        explicit Four(const uint32_t *p) : all(vld1_s16((const int16_t *)p)) {}
    };
    void clear() { all[0] = all[1] = all[2] = all[3] = vdupq_n_s32(0); }
    void add(const Words &x, const Four &four) {
        add<0>(x.at[0], four), add<1>(x.at[1], four), add<2>(x.at[2], four), add<3>(x.at[3], four);
    }
    void put(F &sums) const {
        sums = each([&](int i) { return vcvtq_f32_s32(all[i]); });
    }

private:
    template <int LANE> void add(const int16x8_t *words, const Four &four) {
        all[0] = vmlal_lane_s16(all[0], vget_low_s16(words[0]), four.all, LANE);
        all[1] = vmlal_high_lane_s16(all[1], words[0], four.all, LANE);
        all[2] = vmlal_lane_s16(all[2], vget_low_s16(words[1]), four.all, LANE);
        all[3] = vmlal_high_lane_s16(all[3], words[1], four.all, LANE);
    }
};
// Codes that are their own levels.
template <int BITS> struct CodeWords {
    using Number = uint32_t;
    static constexpr int PARTS = 1, STEP = 1, MIDDLE = 0;
    template <int> using Sums = Quads;
    static Words at(I x) {
        const uint16x8_t mask = vdupq_n_u16((1 << BITS) - 1);
        int16x8_t even[4], odd[4];
        for (int i = 0; i < 4; i++) {
            const uint16x8_t words = vreinterpretq_u16_u32(x.at[i]), high = vshrq_n_u16(words, 8);
            even[i] = vreinterpretq_s16_u16(vandq_u16(words, mask));
            odd[i] = vreinterpretq_s16_u16(BITS == 8 ? high : vandq_u16(high, mask));
        }
        return {even, odd};
    }
};
// A table of up to 16 levels, looked up in two halves of 8 bits.
template <int BITS> struct TableWords {
    using Number = uint32_t;
    static constexpr int PARTS = 1, STEP = 1, MIDDLE = 0;
    template <int> using Sums = Quads;
    uint8x16_t low, high;
    explicit TableWords(const int16_t *levels) {
        uint8_t bytes[2][16];
        for (int i = 0; i < 16; i++) {
            const uint16_t level = (uint16_t)levels[i & ((1 << BITS) - 1)];
            bytes[0][i] = (uint8_t)level, bytes[1][i] = (uint8_t)(level >> 8);
        }
        low = vld1q_u8(bytes[0]), high = vld1q_u8(bytes[1]);
    }
    Words at(I x) const {
        int16x8_t even[4], odd[4];
        for (int i = 0; i < 4; i++) {
            const uint8x16_t code =
                vandq_u8(vreinterpretq_u8_u32(x.at[i]), vdupq_n_u8((1 << BITS) - 1));
            const uint8x16_t a = vqtbl1q_u8(low, code), b = vqtbl1q_u8(high, code);
            even[i] = vreinterpretq_s16_u8(vtrn1q_u8(a, b));
            odd[i] = vreinterpretq_s16_u8(vtrn2q_u8(a, b));
        }
        return {even, odd};
    }
};

// Store 16 numbers as the fours that Quads::Four reads.
template <bool> inline void store_fixed(uint32_t *p, I x) {
    for (int i = 0; i < 4; i++)
        vst1_s16((int16_t *)(p + 2 * i), vmovn_s32(vreinterpretq_s32_u32(x.at[i])));
}

}  // namespace kvant::KVANT_TARGET
