// One block of rows as plain numbers, for many queries at a time: opened once, then read from the
// second cache. Keys lie [16 rows][channel][lane = row], values [row][lane = channel].
#pragma once

#include "walk.hpp"

namespace kvant::KVANT_TARGET {

// Channels of 16 key rows: lane i of x[d] is channel d of row i.
inline void put_keys(const F *rows, float *tile) {
    alignas(64) float turned[16][16];
    for (int r = 0; r < 16; r++) store(turned[r], rows[r]);
    for (int d = 0; d < 16; d++)
        for (int r = 0; r < 16; r++) tile[16 * d + r] = turned[r][d];
}

template <class T> void open_dense_keys(const RowBlock &rows, int dim, float *tile) {
    for (int t = 0; t < BLOCK; t += 16)
        for (int d = 0; d < dim; d += 16) {
            F x[16];
            for (int r = 0; r < 16; r++) x[r] = load((const T *)rows.at(t + r) + d);
            put_keys(x, tile + t * dim + 16 * d);
        }
}

template <class T> void open_dense_values(const RowBlock &rows, int dim, float *tile) {
    for (int r = 0; r < BLOCK; r++)
        for (int d = 0; d < dim; d += 16)
            store(tile + r * dim + d, load((const T *)rows.at(r) + d));
}

// Scale and bias of the group of each channel, for 16 rows; the bias of the lowest code, or of the
// middle level.
struct Line {
    F scale, bias;
    Line(const SealedBlock &block, int t, int u, float middle) {
        const int at = (t * block.groups + u) * 16;
        scale = load(block.scale + at);
        bias = block.bias ? fma(scale, set1(middle), load(block.bias + at)) : zero();
    }
};

template <int BITS, int SPAN, int H, int Q>
inline void open_key_quad(const uint8_t *low, const uint8_t *high, const Levels<BITS> &levels,
                          const Line &line, float *tile) {
    F even, odd;
    unpaired(levels.at(key_codes<BITS, SPAN, H, Q, 0>(low, high)), even, odd);
    store(tile + 64 * Q, fma(even, line.scale, line.bias));
    store(tile + 64 * Q + 32, fma(odd, line.scale, line.bias));
    unpaired(levels.at(key_codes<BITS, SPAN, H, Q, 8>(low, high)), even, odd);
    store(tile + 64 * Q + 16, fma(even, line.scale, line.bias));
    store(tile + 64 * Q + 48, fma(odd, line.scale, line.bias));
}

template <int BITS, int SPAN, int H>
inline void open_key_span(const uint8_t *low, const uint8_t *high, const Levels<BITS> &levels,
                          const Line &line, float *tile) {
    open_key_quad<BITS, SPAN, H, 0>(low, high, levels, line, tile);
    open_key_quad<BITS, SPAN, H, 1>(low, high, levels, line, tile);
    open_key_quad<BITS, SPAN, H, 2>(low, high, levels, line, tile);
    open_key_quad<BITS, SPAN, H, 3>(low, high, levels, line, tile);
}

template <int BITS, int SPAN>
void open_keys(const SealedBlock &block, const Levels<BITS> &levels, float middle, float *tile) {
    using P = Planes<BITS>;
    const int low_size = block.dim * P::LOW / 8;
    for (int t = 0; t < BLOCK / 16; t++) {
        const uint8_t *low = block.codes + t * 16 * block.width, *high = low + 16 * low_size;
        for (int d = 0; d < block.dim; d += 16) {
            const Line line(block, t, d / block.group, middle);
            const uint8_t *a = low + d / SPAN * (SPAN * P::LOW * 2);
            const uint8_t *b = high + d / SPAN * (SPAN * P::HIGH * 2);
            float *to = tile + 16 * (t * block.dim + d);
            if (SPAN == 16 || d % SPAN == 0)
                open_key_span<BITS, SPAN, 0>(a, b, levels, line, to);
            else
                open_key_span<BITS, SPAN, SPAN == 32>(a, b, levels, line, to);
        }
    }
}

template <int N> inline F byte_of(I x) { return to_float(left_cleared(right<8 * N>(x))); }

inline void open_byte_keys(const SealedBlock &block, float *tile) {
    for (int t = 0; t < BLOCK / 16; t++)
        for (int d = 0; d < block.dim; d += 4) {
            const Line line(block, t, d / block.group, 0.0f);
            const I x = loadi(block.codes + 16 * (t * block.width + d));
            float *to = tile + 16 * (t * block.dim + d);
            store(to, fma(byte_of<0>(x), line.scale, line.bias));
            store(to + 16, fma(byte_of<1>(x), line.scale, line.bias));
            store(to + 32, fma(byte_of<2>(x), line.scale, line.bias));
            store(to + 48, fma(byte_of<3>(x), line.scale, line.bias));
        }
}

// Scales and biases of one group of channels, row by row.
struct Column {
    alignas(64) float scale[BLOCK], bias[BLOCK];
    Column(const SealedBlock &block, int u, float middle) {
        for (int t = 0; t < BLOCK / 16; t++) {
            const Line line(block, t, u, middle);
            store(scale + 16 * t, line.scale);
            store(bias + 16 * t, line.bias);
        }
    }
    void put(F x, int row, float *to) const { store(to, fma(x, set1(scale[row]), set1(bias[row]))); }
};

template <int BITS, int SPAN, int HALF>
void open_value_part(const SealedBlock &block, const Levels<BITS> &levels, const Column &column,
                     int d, float *tile) {
    using P = Planes<BITS>;
    const int low = d / SPAN * (SPAN * P::LOW / 8);
    const int high = block.dim * P::LOW / 8 + d / SPAN * (SPAN * P::HIGH / 8);
    for (int r = 0; r < BLOCK; r += 4) {
        Pairs a, b;
        F even, odd;
        value_codes<BITS, SPAN, HALF>(block.codes + r * block.width, low, high, levels, a, b);
        float *to = tile + r * block.dim + d;
        unpaired(a, even, odd);
        column.put(even, r, to), column.put(odd, r + 2, to + 2 * block.dim);
        unpaired(b, even, odd);
        column.put(even, r + 1, to + block.dim), column.put(odd, r + 3, to + 3 * block.dim);
    }
}

template <int BITS, int SPAN>
void open_values(const SealedBlock &block, const Levels<BITS> &levels, float middle, float *tile) {
    for (int u = 0; u < block.groups; u++) {
        const Column column(block, u, middle);
        for (int d = u * block.group; d < block.dim && d < (u + 1) * block.group; d += 16)
            if (SPAN == 16 || d % SPAN == 0)
                open_value_part<BITS, SPAN, 0>(block, levels, column, d, tile);
            else
                open_value_part<BITS, SPAN, SPAN == 32>(block, levels, column, d, tile);
    }
}

inline void open_byte_values(const SealedBlock &block, float *tile) {
    for (int u = 0; u < block.groups; u++) {
        const Column column(block, u, 0.0f);
        for (int d = u * block.group; d < block.dim && d < (u + 1) * block.group; d += 16)
            for (int r = 0; r < BLOCK; r += 4) {
                const I x = loadi(block.codes + r * block.width + 4 * d);
                float *to = tile + r * block.dim + d;
                column.put(byte_of<0>(x), r, to);
                column.put(byte_of<1>(x), r + 1, to + block.dim);
                column.put(byte_of<2>(x), r + 2, to + 2 * block.dim);
                column.put(byte_of<3>(x), r + 3, to + 3 * block.dim);
            }
    }
}

template <bool KEYS, int BITS>
void open_codes(const SealedBlock &block, const SideTables &side, const Levels<BITS> &levels,
                float *tile) {
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

template <bool KEYS>
void open_sealed(const SealedBlock &block, const SideTables &side, float *tile) {
    const Tables &t = side.tables;
    if (side.quads) return KEYS ? open_byte_keys(block, tile) : open_byte_values(block, tile);
    switch (side.bits) {
    case 8: return open_codes<KEYS, 8>(block, side, t.eight, tile);
    case 6: return open_codes<KEYS, 6>(block, side, t.six, tile);
    case 5: return open_codes<KEYS, 5>(block, side, t.five, tile);
    case 4: return open_codes<KEYS, 4>(block, side, t.four, tile);
    case 3: return open_codes<KEYS, 3>(block, side, t.three, tile);
    case 2: return open_codes<KEYS, 2>(block, side, t.two, tile);
    }
}

template <bool KEYS, class T> void open_rows(const RowBlock &rows, int dim, float *tile) {
    KEYS ? open_dense_keys<T>(rows, dim, tile) : open_dense_values<T>(rows, dim, tile);
}

template <bool KEYS>
void open_dense(const RowBlock &rows, int64_t dtype, int dim, float *tile) {
    if (dtype == KVANT_F32) open_rows<KEYS, float>(rows, dim, tile);
    if (dtype == KVANT_F16) open_rows<KEYS, Half>(rows, dim, tile);
    if (dtype == KVANT_BF16) open_rows<KEYS, Bfloat>(rows, dim, tile);
}

}  // namespace kvant::KVANT_TARGET
