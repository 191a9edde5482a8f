// Sixteen lanes in one register: AVX-512 with VNNI and BF16.
#pragma once

#include <immintrin.h>

#include "floats.hpp"

namespace kvant::KVANT_TARGET {

using F = __m512;   // 16 floats
using I = __m512i;  // 16 integers of 32 bits, or 64 bytes

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, F x) { _mm512_storeu_ps(p, x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F divide(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
// Returns the second operand if either is NaN.
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
// Whether any lane is above x, or NaN.
inline bool any_above(F a, float x) {
    return _mm512_cmp_ps_mask(a, set1(x), _CMP_NLE_UQ) != 0;
}
inline F abs(F a) { return _mm512_abs_ps(a); }
inline float sum(F x) { return _mm512_reduce_add_ps(x); }
inline float largest(F x) { return _mm512_reduce_max_ps(x); }
// b where a is zero, else rest: lanes without weight ignore NaN.
inline F where_zero(F a, F b, F rest) {
    return _mm512_mask_mov_ps(rest, _mm512_cmp_ps_mask(a, zero(), _CMP_EQ_OQ), b);
}

inline I zeros() { return _mm512_setzero_si512(); }
inline void storei(void *p, I x) { _mm512_storeu_si512(p, x); }
inline I set1i(int32_t x) { return _mm512_set1_epi32(x); }
inline I loadi(const void *p) { return _mm512_loadu_si512(p); }
inline F to_float(I x) { return _mm512_cvtepi32_ps(x); }
inline I to_int(F x) { return _mm512_cvtps_epi32(x); }
template <int N> inline I right(I x) { return N ? _mm512_srli_epi32(x, N) : x; }
template <int N> inline I left(I x) { return N ? _mm512_slli_epi32(x, N) : x; }
inline I rightv(I x, I by) { return _mm512_srlv_epi32(x, by); }
inline I leftv(I x, I by) { return _mm512_sllv_epi32(x, by); }
// Bits of a in `low`; elsewhere those of b, though only bits in `high` are needed.
inline I join(I low, I, I a, I b) { return _mm512_ternarylogic_epi32(low, a, b, 0xCA); }
inline I max(I a, I b) { return _mm512_max_epi32(a, b); }
inline int32_t largest(I x) { return _mm512_reduce_max_epi32(x); }
// The bits of absolute values: they are ordered like the values, with NaN above infinity.
inline I magnitudes(F x) { return _mm512_castps_si512(abs(x)); }

// Repeat N dwords to fill 16 lanes.
template <int N> inline I repeated(const void *p) {
    if constexpr (N == 16) return loadi(p);
    if constexpr (N == 8) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
}

inline F load(const Half *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
inline F load(const Bfloat *p) {
    const __m256i half = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store(Bfloat *p, F x) {
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
}
// Round to nearest, denormals included; the instruction above flushes them to zero.
inline void store_nearest(float *p, F x) { store(p, x); }
inline void store_nearest(Bfloat *p, F x) {
    const I bits = _mm512_castps_si512(x), odd = _mm512_and_si512(right<16>(bits), set1i(1));
    const I near = right<16>(_mm512_add_epi32(bits, _mm512_add_epi32(odd, set1i(0x7fff))));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const I lanes = _mm512_mask_mov_epi32(near, nan, set1i(0x7fc0));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(lanes));
}
inline void store_nearest(Half *p, F x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline F rounded(F x) {  // to what a Bfloat holds
    const __m256i half = (__m256i)_mm512_cvtneps_pbh(x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
// Lanes 0 2 1 3 of every four.
inline F swapped(F x) { return _mm512_permute_ps(x, 0xD8); }

// For lanes at distance N: the sum in the lower lane, the difference in the upper one.
template <int N> inline F folded(F x) {
    const F other = N == 1   ? _mm512_permute_ps(x, 0xB1)
                    : N == 2 ? _mm512_permute_ps(x, 0x4E)
                    : N == 4 ? _mm512_shuffle_f32x4(x, x, 0xB1)
                             : _mm512_shuffle_f32x4(x, x, 0x4E);
    constexpr __mmask16 upper = N == 1 ? 0xAAAA : N == 2 ? 0xCCCC : N == 4 ? 0xF0F0 : 0xFF00;
    return _mm512_mask_sub_ps(add(x, other), upper, other, x);
}

inline F exp(F x) {
    const F low = set1(-87.0f);
    const __mmask16 tiny = _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ);
    const F n = _mm512_roundscale_ps(mul(max(low, x), set1(1.44269504f)), 0);
    F f = fma(n, set1(-0.693359375f), max(low, x));
    f = fma(n, set1(2.12194440e-4f), f);
    F p = set1(1.9875691500e-4f);
    p = fma(p, f, set1(1.3981999507e-3f));
    p = fma(p, f, set1(8.3334519073e-3f));
    p = fma(p, f, set1(4.1665795894e-2f));
    p = fma(p, f, set1(1.6666665459e-1f));
    p = fma(p, f, set1(5.0000001201e-1f));
    p = add(fma(mul(f, f), p, f), set1(1.0f));
    return _mm512_mask_mov_ps(_mm512_scalef_ps(p, n), tiny, zero());
}

// 2^x for x up to about zero, with an error below 3e-6: enough for results of 16 bits.
inline F exp2_short(F x) {
    x = max(set1(-160.0f), x);
    const F n = _mm512_roundscale_ps(x, 0), f = sub(x, n);
    F p = set1(9.570101877e-3f);
    p = fma(p, f, set1(5.591786178e-2f));
    p = fma(p, f, set1(2.402474484e-1f));
    p = fma(p, f, set1(6.931218146e-1f));
    p = fma(p, f, set1(9.999992614e-1f));
    return _mm512_scalef_ps(p, n);
}

// Two 16-bit floats per lane, for dot2.
using Pairs = __m512bh;

// Narrow a and b to 32 values, those of a first.
inline Pairs narrowed(F a, F b) { return _mm512_cvtne2ps_pbh(b, a); }

inline Pairs load_pairs(const void *p) { return (Pairs)loadi(p); }
inline F dot2(F acc, Pairs x, uint32_t pair) {
    return _mm512_dpbf16_ps(acc, x, (Pairs)_mm512_set1_epi32((int32_t)pair));
}
inline F dot2(F acc, Pairs x, Pairs y) { return _mm512_dpbf16_ps(acc, x, y); }

// Two numbers with 16 bits of precision, for dot2: a pair, and a pair of its rounding errors.
struct Fine {
    uint32_t high, low;
};
inline F dot2(F acc, Pairs x, Fine pair) { return dot2(dot2(acc, x, pair.high), x, pair.low); }
inline void store_fine(Fine *p, F x) {
    const __m256i high = (__m256i)_mm512_cvtneps_pbh(x);
    const F rest = sub(x, rounded(x));
    const __m256i low = (__m256i)_mm512_cvtneps_pbh(rest);
    const I wide = _mm512_slli_epi64(_mm512_cvtepu32_epi64(low), 32);
    storei(p, _mm512_or_si512(_mm512_cvtepu32_epi64(high), wide));
}

// Split the two values of every lane into two vectors; `paired` joins them.
inline void unpaired(Pairs x, F &even, F &odd) {
    even = _mm512_castsi512_ps(_mm512_slli_epi32((I)x, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512((I)x, _mm512_set1_epi32((int32_t)0xffff0000u)));
}
inline I paired(F even, F odd) {
    alignas(64) static constexpr uint16_t order[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(loadi(order), (I)_mm512_cvtne2ps_pbh(odd, even));
}
inline I paired(const Bfloat *even, const Bfloat *odd) {
    const I low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)even));
    const I high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)odd));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
inline I left_cleared(I x) { return _mm512_and_si512(x, _mm512_set1_epi32(255)); }

inline F load_line(const float *p) { return load(p); }
inline Pairs load_line(const uint32_t *p) { return load_pairs(p); }
inline F times(F acc, F x, float y) { return fma(x, set1(y), acc); }
inline F times(F acc, Pairs x, uint32_t pair) { return dot2(acc, x, pair); }

// A table of up to 64 levels, looked up by the low bits of each half of a lane.
template <int BITS> struct Levels {
    I low, high;
    explicit Levels(const float *levels) {
        alignas(64) Bfloat table[64];
        for (int i = 0; i < 64; i++) table[i] = to_bfloat(levels[i & ((1 << BITS) - 1)]);
        low = loadi(table);
        high = loadi(table + 32);
    }
    Pairs at(I index) const {
        if constexpr (BITS <= 5) return (Pairs)_mm512_permutexvar_epi16(index, low);
        return (Pairs)_mm512_permutex2var_epi16(low, index, high);
    }
};

// Floats of 8 bits: sign and exponent from one table, the mantissa from another; denormals from a
// third.
template <> struct Levels<8> {
    I power, rest, small;
    explicit Levels(const float *) {
        uint16_t tables[3][32];
        for (int i = 0; i < 32; i++) {
            tables[0][i] = i % 16 ? to_bfloat(from_float8(i << 3)).bits : i / 16 << 15;
            tables[1][i] = i % 8 << 4;
            tables[2][i] = to_bfloat(from_float8(i % 8)).bits;
        }
        power = loadi(tables[0]), rest = loadi(tables[1]), small = loadi(tables[2]);
    }
    Pairs at(I x) const {
        const __mmask32 tiny = _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78));
        const I low = _mm512_permutexvar_epi16(x, rest);
        const I high = _mm512_permutexvar_epi16(_mm512_srli_epi16(x, 3), power);
        return (Pairs)_mm512_or_si512(high, _mm512_mask_permutexvar_epi16(low, tiny, x, small));
    }
};

constexpr int QUAD_TILES = 2, QUAD_CHUNKS = 2;  // of 16 rows, or channels, whose sums fit registers
template <int GN> constexpr int ROW_CHUNKS = 4;
constexpr int WEIGHT_ROWS = 64;  // no limit: a whole range is prefetched before it is read
constexpr int PRODUCT_QUERIES = 4, PRODUCT_VECTORS = 4;

// Sums of 8-bit codes times 15-bit numbers, four per lane; a number is 128 high + low.
struct Quads {
    I high, low;
    struct Four {
        I high, low;
        explicit Four(const uint32_t *p) : high(set1i((int32_t)p[0])), low(set1i((int32_t)p[1])) {}
    };
    // With the intrinsic, GCC copies the sums between registers, at half the speed.
    static I plus(I sum, I codes, I four) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(four));
        return sum;
    }
    void clear() { high = low = zeros(); }
    void add(I codes, const Four &four) {
        high = plus(high, codes, four.high);
        low = plus(low, codes, four.low);
    }
    void put(F &sums) const { sums = to_float(_mm512_add_epi32(left<7>(high), low)); }
};
template <int BITS> struct CodeWords {
    using Number = uint32_t;
    static constexpr int PARTS = 1, STEP = 1, MIDDLE = 0;
    template <int> using Sums = Quads;
    static I at(I x) {
        return BITS == 8 ? x : _mm512_and_si512(x, _mm512_set1_epi8((1 << BITS) - 1));
    }
};
// Store 16 numbers as the pairs of dwords that Quads::Four reads.
template <bool> inline void store_fixed(uint32_t *p, I x) {
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(x, 7));
    const __m128i low = _mm512_cvtepi32_epi8(_mm512_and_si512(x, set1i(127)));
    _mm_storeu_si128((__m128i *)p, _mm_unpacklo_epi32(high, low));
    _mm_storeu_si128((__m128i *)(p + 4), _mm_unpackhi_epi32(high, low));
}

// Lane i of the result is the sum of x[i].
inline F sums(const F *x) {
    F a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]),
                   _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        b[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a[2 * i]),
                                                       _mm512_castps_pd(a[2 * i + 1]))),
                   _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a[2 * i]),
                                                       _mm512_castps_pd(a[2 * i + 1]))));
    for (int i = 0; i < 2; i++)
        c[i] = add(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                   _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xDD));
    return add(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xDD));
}

// Sums of products of rows with queries, DOTS of them in registers.
constexpr int DOTS = 16;
struct Dot {
    F x = zero();
};
inline void dot(Dot &sum, F x, F y) { sum.x = fma(x, y, sum.x); }
inline void store_dots(float *p, const Dot *dots) {
    F x[DOTS];
    for (int i = 0; i < DOTS; i++) x[i] = dots[i].x;
    store(p, sums(x));
}

// Transpose 16 rows of 16 lanes.
inline void turn(I *x) {
    I a[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {  // x[i + c]: lanes c, 4 + c, 8 + c, 12 + c of rows i to i + 3
            x[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
        }
    for (int c = 0; c < 4; c++) {
        const I low = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88);
        const I high = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xDD);
        const I more_low = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
        const I more_high = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xDD);
        a[c] = _mm512_shuffle_i32x4(low, more_low, 0x88);
        a[8 + c] = _mm512_shuffle_i32x4(low, more_low, 0xDD);
        a[4 + c] = _mm512_shuffle_i32x4(high, more_high, 0x88);
        a[12 + c] = _mm512_shuffle_i32x4(high, more_high, 0xDD);
    }
    for (int i = 0; i < 16; i++) x[i] = a[i];
}

// Interleave two rows of 32 values as pairs, in a channel order that `straight` restores.
inline void interleaved(const Bfloat *a, const Bfloat *b, Pairs out[2]) {
    const I x = loadi(a), y = loadi(b);
    out[0] = (Pairs)_mm512_unpacklo_epi16(x, y);
    out[1] = (Pairs)_mm512_unpackhi_epi16(x, y);
}
inline void straight(F &a, F &b) {
    const F x = _mm512_shuffle_f32x4(a, b, 0x44), y = _mm512_shuffle_f32x4(a, b, 0xEE);
    a = _mm512_shuffle_f32x4(x, x, 0xD8);
    b = _mm512_shuffle_f32x4(y, y, 0xD8);
}
// The inverse of `straight`.
inline void crossed(F &a, F &b) {
    const I even = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const I odd = _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    const F x = _mm512_permutex2var_ps(a, even, b), y = _mm512_permutex2var_ps(a, odd, b);
    a = x;
    b = y;
}

}  // namespace kvant::KVANT_TARGET
