// Sixteen lanes in two registers: AVX2 with FMA and F16C, and AVX-VNNI if KVANT_VNNI. Products of
// 16-bit floats are computed in single precision, those of codes as 16-bit integers.
#pragma once

#include <immintrin.h>

#include <initializer_list>

#include "floats.hpp"

namespace kvant::KVANT_TARGET {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F divide(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline bool any_above(F x, float y) {
    const __m256 level = _mm256_set1_ps(y);
    return _mm256_movemask_ps(_mm256_cmp_ps(x.a, level, _CMP_NLE_UQ)) ||
           _mm256_movemask_ps(_mm256_cmp_ps(x.b, level, _CMP_NLE_UQ));
}
inline F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline float sum(F x) {
    float lanes[8], total = 0;
    _mm256_storeu_ps(lanes, _mm256_add_ps(x.a, x.b));
    for (float lane : lanes) total += lane;
    return total;
}
inline float largest(F x) {
    const __m256 all = _mm256_max_ps(x.a, x.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    const __m128 two = _mm_max_ps(four, _mm_permute_ps(four, 0x4E));
    return _mm_cvtss_f32(_mm_max_ps(two, _mm_permute_ps(two, 0xB1)));
}
inline __m256 where_zero(__m256 a, __m256 b, __m256 rest) {
    return _mm256_blendv_ps(rest, b, _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_EQ_OQ));
}
inline F where_zero(F a, F b, F rest) {
    return {where_zero(a.a, b.a, rest.a), where_zero(a.b, b.b, rest.b)};
}

inline I zeros() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I set1i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline __m256i load8(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline I loadi(const void *p) { return {load8(p), load8((const char *)p + 32)}; }
inline void storei(void *p, I x) {
    _mm256_storeu_si256((__m256i *)p, x.a);
    _mm256_storeu_si256((__m256i *)p + 1, x.b);
}
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
template <int N> inline I right(I x) {
    return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N> inline I left(I x) {
    return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
inline I rightv(I x, I by) {
    return {_mm256_srlv_epi32(x.a, by.a), _mm256_srlv_epi32(x.b, by.b)};
}
inline I leftv(I x, I by) {
    return {_mm256_sllv_epi32(x.a, by.a), _mm256_sllv_epi32(x.b, by.b)};
}
// Bits of `x` in `low` and of `y` in `high`; the others are zero.
inline __m256i join(__m256i low, __m256i high, __m256i x, __m256i y) {
    return _mm256_or_si256(_mm256_and_si256(low, x), _mm256_and_si256(high, y));
}
inline I join(I low, I high, I x, I y) {
    return {join(low.a, high.a, x.a, y.a), join(low.b, high.b, x.b, y.b)};
}

inline I max(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
inline int32_t largest(I x) {
    const __m256i all = _mm256_max_epi32(x.a, x.b);
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}
inline I magnitudes(F x) { return {_mm256_castps_si256(abs(x).a), _mm256_castps_si256(abs(x).b)}; }

template <int N> inline I repeated(const void *p) {
    if constexpr (N == 16) return loadi(p);
    if constexpr (N == 8) return {load8(p), load8(p)};
    const __m256i four = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return {four, four};
}

inline __m128i load4(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
inline F load(const Half *p) { return {_mm256_cvtph_ps(load4(p)), _mm256_cvtph_ps(load4(p + 8))}; }
constexpr int QUAD_TILES = 1, QUAD_CHUNKS = 1;  // of 16 rows, or channels, whose sums fit registers
template <int GN> constexpr int ROW_CHUNKS = 4 / GN;
constexpr int WEIGHT_ROWS = 4;  // limit of rows of a dense weight that are read together
constexpr int PRODUCT_QUERIES = 6, PRODUCT_VECTORS = 1;  // whose sums fit registers

// Lanes 0 2 4 ... of 16 channels, then lanes 1 3 5 ...: how rows of 16-bit floats are loaded fastest.
inline F load_split(const float *p) { return load(p); }
inline F load_split(const Half *p) { return load(p); }
inline F load_split(const Bfloat *p) {
    const __m256i x = load8(p), high = _mm256_set1_epi32((int32_t)0xffff0000u);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(x, high))};
}
template <class T> inline F split(F x) { return x; }
template <> inline F split<Bfloat>(F x) {
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(x.a, x.b, 0x88));
    const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(x.a, x.b, 0xDD));
    return {_mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xD8)),
            _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xD8))};
}
template <class T> inline F unsplit(F x) { return x; }
template <> inline F unsplit<Bfloat>(F x) {
    const __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
inline F load(const Bfloat *p) { return unsplit<Bfloat>(load_split(p)); }

// Load x once: GCC would load it again for each use.
inline void in_registers(F &x) { asm("" : "+x"(x.a), "+x"(x.b)); }

// Sums of products of rows with queries, DOTS of them in registers.
constexpr int DOTS = 8;
struct Dot {
    __m256 x = _mm256_setzero_ps();
};
inline void dot(Dot &sum, F x, F y) {
    sum.x = _mm256_fmadd_ps(x.b, y.b, _mm256_fmadd_ps(x.a, y.a, sum.x));
}
inline void store_dots(float *p, const Dot *sums) {
    __m256 x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm256_hadd_ps(sums[2 * i].x, sums[2 * i + 1].x);
    const __m256 a = _mm256_hadd_ps(x[0], x[1]), b = _mm256_hadd_ps(x[2], x[3]);
    _mm256_storeu_ps(p, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20),
                                      _mm256_permute2f128_ps(a, b, 0x31)));
}
inline __m256i narrowed(__m256 x) {  // rounds like to_bfloat
    const __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i near = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(near, quiet, _mm256_castps_si256(nan));
}
inline void store(Bfloat *p, F x) {
    const __m256i both = _mm256_packus_epi32(narrowed(x.a), narrowed(x.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(both, 0xD8));
}
inline void store_nearest(float *p, F x) { store(p, x); }
inline void store_nearest(Bfloat *p, F x) { store(p, x); }
inline void store_nearest(Half *p, F x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline F rounded(F x) {
    Bfloat halves[16];
    store(halves, x);
    return load(halves);
}
inline F swapped(F x) { return {_mm256_permute_ps(x.a, 0xD8), _mm256_permute_ps(x.b, 0xD8)}; }

template <int N> inline __m256 folded(__m256 x) {
    const __m256 other = N == 1   ? _mm256_permute_ps(x, 0xB1)
                         : N == 2 ? _mm256_permute_ps(x, 0x4E)
                                  : _mm256_permute2f128_ps(x, x, 1);
    constexpr int upper = N == 1 ? 0xAA : N == 2 ? 0xCC : 0xF0;
    return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), upper);
}
template <int N> inline F folded(F x) {
    if constexpr (N < 8) return {folded<N>(x.a), folded<N>(x.b)};
    return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)};
}

inline __m256 exp(__m256 x) {
    const __m256 low = _mm256_set1_ps(-87.0f);
    const __m256 tiny = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
    const __m256 y = _mm256_max_ps(low, x);
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(y, _mm256_set1_ps(1.44269504f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693359375f), y);
    f = _mm256_fmadd_ps(n, _mm256_set1_ps(2.12194440e-4f), f);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                    5.0000001201e-1f})
        p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c));
    p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(f, f), p, f), _mm256_set1_ps(1.0f));
    // A NaN propagates through p; its exponent is arbitrary.
    const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const __m256 scale = _mm256_castsi256_ps(_mm256_slli_epi32(power, 23));
    return _mm256_andnot_ps(tiny, _mm256_mul_ps(p, scale));
}
inline F exp(F x) { return {exp(x.a), exp(x.b)}; }

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
inline I left_cleared(I x) {
    const __m256i byte = _mm256_set1_epi32(255);
    return {_mm256_and_si256(x.a, byte), _mm256_and_si256(x.b, byte)};
}
inline F load_line(const float *p) { return load(p); }
inline F times(F acc, F x, float y) { return fma(x, set1(y), acc); }

template <int BITS> struct Levels {
    alignas(32) float table[64];
    explicit Levels(const float *levels) {
        for (int i = 0; i < 64; i++)
            table[i] = to_float(to_bfloat(levels[i & ((1 << BITS) - 1)]));
    }
    __m256 at(__m256i index) const {
        const __m256i i = _mm256_and_si256(index, _mm256_set1_epi32((1 << BITS) - 1));
        if constexpr (BITS > 4) return _mm256_i32gather_ps(table, i, 4);
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), i);
        if constexpr (BITS <= 3) return low;
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), i);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
    }
    Pairs at(I index) const {
        const I up = right<16>(index);
        return {{at(index.a), at(index.b)}, {at(up.a), at(up.b)}};
    }
};

// Floats of 8 bits: their bits x, shifted to the position of a float's. Denormals, below 2^-6, are
// 2 x - 2^-6, which is less than x for them alone.
template <> struct Levels<8> {
    explicit Levels(const float *) {}
    static __m256 at(__m256i code) {
        const __m256i low = _mm256_and_si256(code, _mm256_set1_epi32(127));
        const __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(low, 20),
                                              _mm256_set1_epi32(120 << 23));
        const __m256 x = _mm256_castsi256_ps(bits), two = _mm256_set1_ps(2.0f);
        const __m256 size = _mm256_min_ps(x, _mm256_fmadd_ps(x, two, _mm256_set1_ps(-0x1p-6f)));
        const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(code, 24));
        return _mm256_or_ps(size, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
    }
    Pairs at(I index) const {
        const I up = right<16>(index);
        return {{at(index.a), at(index.b)}, {at(up.a), at(up.b)}};
    }
};

// Add the products of words to sums of 32 bits. With intrinsics, GCC makes all products first, and
// spills them or the sums; and it keeps a sum in memory that is itself an operand of an asm.
inline void add_products(__m256i &to, __m256i x, __m256i y) {
    __m256i sum = to;
#if KVANT_VNNI
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(y));
#else
    __m256i products;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
        : "+x"(sum), "=&x"(products)
        : "x"(x), "x"(y));
#endif
    to = sum;
}

// The four codes of a lane as 16-bit integers: of bytes 0 and 2, and of bytes 1 and 3.
struct Words {
    I even, odd;
};

// Sums of products with four 16-bit numbers, in the order 0 2 1 3.
struct Quads {
    I all;
    struct Four {
        __m256i even, odd;
        explicit Four(const uint32_t *p)
            : even(_mm256_set1_epi32((int32_t)p[0])), odd(_mm256_set1_epi32((int32_t)p[1])) {}
    };
    void clear() { all = zeros(); }
    void add(const Words &x, const Four &four) {
        add_products(all.a, x.even.a, four.even), add_products(all.b, x.even.b, four.even);
        add_products(all.a, x.odd.a, four.odd), add_products(all.b, x.odd.b, four.odd);
    }
    void put(F &sums) const { sums = to_float(all); }
};

// Codes that are their own levels.
template <int BITS> struct CodeWords {
    using Number = uint32_t;  // a pair of the fours that the sums are made of
    static constexpr int PARTS = 1, STEP = 1, MIDDLE = 0;
    template <int> using Sums = Quads;
    static Words at(I x) { return {{even(x.a), even(x.b)}, {odd(x.a), odd(x.b)}}; }

private:
    static __m256i even(__m256i x) {
        return _mm256_and_si256(x, _mm256_set1_epi16((1 << BITS) - 1));
    }
    static __m256i odd(__m256i x) {  // the bits above a code are zero where planes were joined
        const __m256i high = _mm256_srli_epi16(x, 8);
        return BITS == 8 || Planes<BITS>::HIGH ? high : even(high);
    }
};

// The four levels of a lane as 16-bit integers, in order: of lanes 0 1 4 5, and of lanes 2 3 6 7.
struct LaneWords {
    I low, high;
};

// Sums of products with four 16-bit numbers in order, for 8 of the 16 lanes.
template <int PART> struct LaneQuads {
    __m256i low, high;  // a lane has two sums, of its words 0 1 and 2 3
    struct Four {
        __m256i all;
        explicit Four(const uint32_t *p) : all(_mm256_castpd_si256(_mm256_broadcast_sd((const double *)p))) {}
    };
    void clear() { low = high = _mm256_setzero_si256(); }
    void add(const LaneWords &x, const Four &four) {
        add_products(low, PART ? x.low.b : x.low.a, four.all);
        add_products(high, PART ? x.high.b : x.high.a, four.all);
    }
    void put(F &sums) const {
        (PART ? sums.b : sums.a) = _mm256_cvtepi32_ps(_mm256_hadd_epi32(low, high));
    }
};

// A table of up to 16 levels, looked up in two halves of 8 bits.
template <int BITS> struct TableWords {
    using Number = uint32_t;
    static constexpr int PARTS = 2, STEP = 1, MIDDLE = 0;
    template <int PART> using Sums = LaneQuads<PART>;
    __m256i low, high;
    explicit TableWords(const int16_t *levels) {
        alignas(16) uint8_t bytes[2][16];
        for (int i = 0; i < 16; i++) {
            const uint16_t level = (uint16_t)levels[i & ((1 << BITS) - 1)];
            bytes[0][i] = (uint8_t)level, bytes[1][i] = (uint8_t)(level >> 8);
        }
        low = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)bytes[0]));
        high = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)bytes[1]));
    }
    LaneWords at(I x) const {
        LaneWords out;
        look_up(x.a, out.low.a, out.high.a), look_up(x.b, out.low.b, out.high.b);
        return out;
    }

private:
    void look_up(__m256i code, __m256i &first, __m256i &second) const {
        if (!Planes<BITS>::HIGH) code = _mm256_and_si256(code, _mm256_set1_epi8((1 << BITS) - 1));
        const __m256i a = _mm256_shuffle_epi8(low, code), b = _mm256_shuffle_epi8(high, code);
        first = _mm256_unpacklo_epi8(a, b), second = _mm256_unpackhi_epi8(a, b);
    }
};

// The four levels of 8 lanes as floats: of bytes 0 and 2, and of bytes 1 and 3; each of lanes 0 to 3,
// and of lanes 4 to 7.
struct LaneFloats {
    __m256 even[2], odd[2];
};
struct FloatLevels {
    LaneFloats parts[2];
};

// Sums of products with four floats, for 8 of the 16 lanes: the words of a lane have neighbouring
// sums.
template <int PART> struct HalfQuads {
    __m256 low, high;
    struct Four {
        __m256 even, odd;
        explicit Four(const Fine *p)
            : even(_mm256_castpd_ps(_mm256_broadcast_sd((const double *)p))),
              odd(_mm256_castpd_ps(_mm256_broadcast_sd((const double *)(p + 1)))) {}
    };
    void clear() { low = high = _mm256_setzero_ps(); }
    void add(const FloatLevels &levels, const Four &four) {
        const LaneFloats &x = levels.parts[PART];
        low = _mm256_fmadd_ps(x.odd[0], four.odd, _mm256_fmadd_ps(x.even[0], four.even, low));
        high = _mm256_fmadd_ps(x.odd[1], four.odd, _mm256_fmadd_ps(x.even[1], four.even, high));
    }
    void put(F &sums) const {
        const __m256d x = _mm256_castps_pd(_mm256_hadd_ps(low, high));
        (PART ? sums.b : sums.a) = _mm256_castpd_ps(_mm256_permute4x64_pd(x, 0xD8));
    }
};

// Floats of 8 bits, as 2^-8 of their value: they are 16-bit floats after a shift.
struct HalfWords {
    using Number = Fine;
    static constexpr int PARTS = 2, STEP = 1, MIDDLE = 0;
    template <int PART> using Sums = HalfQuads<PART>;
    static FloatLevels at(I x) { return {{levels(x.a), levels(x.b)}}; }

private:
    static LaneFloats levels(__m256i x) {
        const __m256i even = half(_mm256_slli_epi16(x, 8)), odd = half(x);
        return {{convert(even, 0), convert(even, 1)}, {convert(odd, 0), convert(odd, 1)}};
    }
    static __m256i half(__m256i high_byte) {
        return _mm256_and_si256(_mm256_srai_epi16(high_byte, 1),
                                _mm256_set1_epi16((int16_t)0xbf80));
    }
    // Convert from memory: from a register it takes twice as many operations.
    static __m256 convert(const __m256i &halves, int part) {
        __m256 floats;
        asm("vcvtph2ps %1, %0" : "=x"(floats) : "m"(((const __m128i *)&halves)[part]));
        return floats;
    }
};

// Store 16 integers as the fours that the sums of codes read, or of levels from a table.
template <bool TABLE> inline void store_fixed(uint32_t *p, I x) {
    const __m256i words = _mm256_packs_epi32(x.a, x.b);
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    const __m256i fours = TABLE ? words : _mm256_shuffle_epi8(words, order);
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(fours, 0xD8));
}

}  // namespace kvant::KVANT_TARGET
