// A decoded block of rows, for many queries: decoded once, then read from the L1 or L2 cache. A line
// has 16 lanes:
//
//   keys      line d of rows t...t + 15:    channel d of 16 rows
//   values    line r, channels d...d + 15:  16 channels of row r
//
// A number is a float, or a pair of 16-bit floats from two neighbouring lines: two channels of a
// key, or a channel of two value rows.
#pragma once

#include <algorithm>

#include "visible_blocks.hpp"

namespace kvant::KVANT_TARGET {

constexpr int TOGETHER = 32;  // queries whose scores are computed together
constexpr int OUT_PITCH = MAX_DIM + 16;  // stride of the sums per query

// Lines per line of numbers.
template <class Number> constexpr int EACH = sizeof(Number) / sizeof(float);
template <> constexpr int EACH<uint32_t> = 2;

// Store four neighbouring lines; the first has an even index.
inline void put_lines(float *at, int64_t pitch, F a, F b, F c, F d) {
    store(at, a), store(at + pitch, b), store(at + 2 * pitch, c), store(at + 3 * pitch, d);
}
#if KVANT_BFLOAT_DOT
inline void put_lines(uint32_t *at, int64_t pitch, F a, F b, F c, F d) {
    storei(at, paired(a, b)), storei(at + pitch, paired(c, d));
}
#endif

// The target of decoded rows. Channels from dim to `width` are not written.
template <class Number> struct Tile {
    Number *to;
    int64_t pitch;  // stride of lines in numbers; 16 for keys
    int width;

    // Store four lines of 16 channels of values.
    void put(int64_t line, int channel, F a, F b, F c, F d) const {
        put_lines(to + line / EACH<Number> * pitch + channel, pitch, a, b, c, d);
    }
};

// Transpose 16 channels of 16 key rows into lines.
inline void put_keys(const F *rows, float *to) {
    alignas(64) float transposed[16][16];
    for (int r = 0; r < 16; r++) store(transposed[r], rows[r]);
    for (int d = 0; d < 16; d++)
        for (int r = 0; r < 16; r++) to[16 * d + r] = transposed[r][d];
}

template <class T> void open_dense_keys(const RowBlock &rows, int dim, const Tile<float> &tile) {
    for (int t = 0; t < BLOCK; t += 16)
        for (int d = 0; d < dim; d += 16) {
            F x[16];
            for (int r = 0; r < 16; r++) x[r] = load((const T *)rows.at(t + r) + d);
            put_keys(x, tile.to + t * tile.width + 16 * d);
        }
}

template <class T> void open_dense_values(const RowBlock &rows, int dim, const Tile<float> &tile) {
    for (int r = 0; r < BLOCK; r++)
        for (int d = 0; d < dim; d += 16)
            store(tile.to + r * tile.pitch + d, load((const T *)rows.at(r) + d));
}

#if KVANT_BFLOAT_DOT
inline void pair_dense_keys(const RowBlock &rows, int dim, const Tile<uint32_t> &tile) {
    for (int t = 0; t < BLOCK; t += 16)
        for (int d = 0; d < dim; d += 32) {
            I x[16];
            const int pairs = dim - d < 32 ? 8 : 16;
            rows.ahead.fetch_next<16 * LINE>();
            for (int r = 0; r < 16; r++) {
                const char *row = rows.at(t + r) + 2 * d;
                x[r] = pairs == 8 ? repeated<8>(row) : loadi(row);
            }
            turn(x);
            for (int i = 0; i < pairs; i++) storei(tile.to + t * tile.width / 2 + 8 * d + 16 * i, x[i]);
        }
}

inline void pair_dense_values(const RowBlock &rows, int dim, const Tile<uint32_t> &tile) {
    for (int r = 0; r < BLOCK; r += 2) {
        const Bfloat *a = (const Bfloat *)rows.at(r), *b = (const Bfloat *)rows.at(r + 1);
        for (int d = 0; d < dim; d += 16) {
            rows.ahead.fetch_next<LINE>();
            storei(tile.to + r / 2 * tile.pitch + d, paired(a + d, b + d));
        }
    }
}
#endif

// Scale and bias of one group of channels for 16 rows; the bias is that of a level of zero.
struct Line {
    F scale, bias;
    Line(const SealedBlock &block, int t, int u, float middle) {
        const int at = (t * block.groups + u) * 16;
        scale = load(block.scale + at);
        const float zero_code = block.lowest + middle;
        if (block.bias) bias = fma(scale, set1(middle), load(block.bias + at));
        else bias = zero_code == 0 ? zero() : mul(scale, set1(zero_code));
    }
    F value(F x) const { return fma(x, scale, bias); }
};

template <int BITS, int SPAN, int H, int Q, class Number>
inline void open_key_quad(const uint8_t *low, const uint8_t *high, const Levels<BITS> &levels,
                          const Line &line, int64_t at, const Tile<Number> &tile) {
    F a, b, c, d;
    unpaired(levels.at(key_codes<BITS, SPAN, H, Q, 0>(low, high)), a, c);
    unpaired(levels.at(key_codes<BITS, SPAN, H, Q, 8>(low, high)), b, d);
    tile.put(at + 4 * Q, 0, line.value(a), line.value(b), line.value(c), line.value(d));
}

template <int BITS, int SPAN, int H, class Number>
inline void open_key_span(const uint8_t *low, const uint8_t *high, const Levels<BITS> &levels,
                          const Line &line, int64_t at, const Tile<Number> &tile) {
    open_key_quad<BITS, SPAN, H, 0>(low, high, levels, line, at, tile);
    open_key_quad<BITS, SPAN, H, 1>(low, high, levels, line, at, tile);
    open_key_quad<BITS, SPAN, H, 2>(low, high, levels, line, at, tile);
    open_key_quad<BITS, SPAN, H, 3>(low, high, levels, line, at, tile);
}

template <int BITS, int SPAN, class Number>
void open_keys(const SealedBlock &block, const Levels<BITS> &levels, float middle,
               const Tile<Number> &tile) {
    using P = Planes<BITS>;
    const int low_size = block.dim * P::LOW / 8;
    for (int t = 0; t < BLOCK / 16; t++) {
        const uint8_t *low = block.codes + t * 16 * block.width, *high = low + 16 * low_size;
        for (int u = 0; u < block.groups; u++) {
            const Line line(block, t, u, middle);
            const int stop = std::min(block.dim, (u + 1) * block.group);
            for (int d = u * block.group; d < stop; d += 16) {
                const uint8_t *a = low + d / SPAN * (SPAN * P::LOW * 2);
                const uint8_t *b = high + d / SPAN * (SPAN * P::HIGH * 2);
                const int64_t at = t * tile.width + d;
                block.ahead.fetch_next<32 * BITS>();
                if (SPAN == 16 || d % SPAN == 0)
                    open_key_span<BITS, SPAN, 0>(a, b, levels, line, at, tile);
                else
                    open_key_span<BITS, SPAN, SPAN == 32>(a, b, levels, line, at, tile);
            }
        }
    }
}

template <int N> inline F byte_of(I x) { return to_float(left_cleared(right<8 * N>(x))); }

template <class Number> void open_byte_keys(const SealedBlock &block, const Tile<Number> &tile) {
    for (int t = 0; t < BLOCK / 16; t++)
        for (int u = 0; u < block.groups; u++) {
            const Line line(block, t, u, 0.0f);
            const int stop = std::min(block.dim, (u + 1) * block.group);
            for (int d = u * block.group; d < stop; d += 4) {
                const I x = loadi(block.codes + 16 * (t * block.width + d));
                block.ahead.fetch_next<LINE>();
                tile.put(t * tile.width + d, 0, line.value(byte_of<0>(x)),
                         line.value(byte_of<1>(x)), line.value(byte_of<2>(x)),
                         line.value(byte_of<3>(x)));
            }
        }
}

// Scales and biases of all groups of channels, by row.
struct Columns {
    alignas(64) float scale[MAX_GROUPS][BLOCK], bias[MAX_GROUPS][BLOCK];
    Columns(const SealedBlock &block, float middle) {
        for (int u = 0; u < block.groups; u++)
            for (int t = 0; t < BLOCK / 16; t++) {
                const Line line(block, t, u, middle);
                store(scale[u] + 16 * t, line.scale);
                store(bias[u] + 16 * t, line.bias);
            }
    }
    F value(F x, int u, int row) const {
        return fma(x, set1(scale[u][row]), set1(bias[u][row]));
    }

    // Store 16 channels of group u of four rows from `row` on.
    template <class Number>
    void put(F a, F b, F c, F d, int u, int row, int channel, const Tile<Number> &tile) const {
        tile.put(row, channel, value(a, u, row), value(b, u, row + 1), value(c, u, row + 2),
                 value(d, u, row + 3));
    }
};

// Decode 16 channels of four rows.
template <int BITS, int SPAN, int HALF, class Number>
inline void open_value_part(const SealedBlock &block, const Levels<BITS> &levels,
                            const Columns &columns, int u, int row, int d,
                            const Tile<Number> &tile) {
    using P = Planes<BITS>;
    const int low = d / SPAN * (SPAN * P::LOW / 8);
    const int high = block.dim * P::LOW / 8 + d / SPAN * (SPAN * P::HIGH / 8);
    Pairs even, odd;
    F x[4];
    value_codes<BITS, SPAN, HALF>(block.codes + row * block.width, low, high, levels, even, odd);
    unpaired(even, x[0], x[2]);
    unpaired(odd, x[1], x[3]);
    columns.put(x[0], x[1], x[2], x[3], u, row, d, tile);
}

// Call f(u, row, channel) for 16 channels of four rows, in memory order.
template <class Fn> inline void by_four_rows(const SealedBlock &block, Fn f) {
    for (int row = 0; row < BLOCK; row += 4)
        for (int u = 0; u < block.groups; u++) {
            const int stop = std::min(block.dim, (u + 1) * block.group);
            for (int d = u * block.group; d < stop; d += 16) f(u, row, d);
        }
}

template <int BITS, int SPAN, class Number>
void open_values(const SealedBlock &block, const Levels<BITS> &levels, float middle,
                 const Tile<Number> &tile) {
    const Columns columns(block, middle);
    by_four_rows(block, [&](int u, int row, int d) {
        block.ahead.fetch_next<8 * BITS>();
        if (SPAN == 16 || d % SPAN == 0)
            open_value_part<BITS, SPAN, 0>(block, levels, columns, u, row, d, tile);
        else
            open_value_part<BITS, SPAN, SPAN == 32>(block, levels, columns, u, row, d, tile);
    });
}

template <class Number> void open_byte_values(const SealedBlock &block, const Tile<Number> &tile) {
    const Columns columns(block, 0.0f);
    by_four_rows(block, [&](int u, int row, int d) {
        const I x = loadi(block.codes + row * block.width + 4 * d);
        block.ahead.fetch_next<LINE>();
        columns.put(byte_of<0>(x), byte_of<1>(x), byte_of<2>(x), byte_of<3>(x), u, row, d, tile);
    });
}

template <bool KEYS, int BITS, class Number>
void open_codes(const SealedBlock &block, const SideTables &side, const Levels<BITS> &levels,
                const Tile<Number> &tile) {
    const float middle = side.list.middle;
    if constexpr (BITS == 8) {
        KEYS ? open_keys<8, 16>(block, levels, middle, tile)
             : open_values<8, 16>(block, levels, middle, tile);
    } else if constexpr (KEYS) {
        if (side.span == 32)
            open_keys<BITS, 32>(block, levels, middle, tile);
        else if constexpr (BITS != 3 && BITS != 5)
            open_keys<BITS, 16>(block, levels, middle, tile);
    } else {
        if (side.span == 32)
            open_values<BITS, 32>(block, levels, middle, tile);
        else if constexpr (BITS != 3 && BITS != 5)
            open_values<BITS, 16>(block, levels, middle, tile);
    }
}

template <bool KEYS, class Number>
void open_sealed(const SealedBlock &block, const SideTables &side, const Tile<Number> &tile) {
    const Tables &t = side.tables;
    if (side.bytes) return KEYS ? open_byte_keys(block, tile) : open_byte_values(block, tile);
    switch (side.bits) {
    case 8: return open_codes<KEYS, 8>(block, side, t.eight, tile);
    case 6: return open_codes<KEYS, 6>(block, side, t.six, tile);
    case 5: return open_codes<KEYS, 5>(block, side, t.five, tile);
    case 4: return open_codes<KEYS, 4>(block, side, t.four, tile);
    case 3: return open_codes<KEYS, 3>(block, side, t.three, tile);
    case 2: return open_codes<KEYS, 2>(block, side, t.two, tile);
    }
}

template <bool KEYS, class T> void open_rows(const RowBlock &rows, int dim, const Tile<float> &tile) {
    KEYS ? open_dense_keys<T>(rows, dim, tile) : open_dense_values<T>(rows, dim, tile);
}

template <bool KEYS>
void open_dense(const RowBlock &rows, int64_t dtype, int dim, const Tile<float> &tile) {
    if (dtype == KVANT_F32) open_rows<KEYS, float>(rows, dim, tile);
    if (dtype == KVANT_F16) open_rows<KEYS, Half>(rows, dim, tile);
    if (dtype == KVANT_BF16) open_rows<KEYS, Bfloat>(rows, dim, tile);
}

#if KVANT_BFLOAT_DOT
template <bool KEYS>
void open_dense(const RowBlock &rows, int64_t, int dim, const Tile<uint32_t> &tile) {
    KEYS ? pair_dense_keys(rows, dim, tile) : pair_dense_values(rows, dim, tile);
}
#endif

}  // namespace kvant::KVANT_TARGET
