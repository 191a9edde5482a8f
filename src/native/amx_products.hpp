// Products of up to TOGETHER queries with a decoded block, on the processor's matrix tiles (AMX). A
// tile has 16 rows of 64 bytes; one instruction multiplies 16 queries x 32 numbers x 16 lanes.
//
// Rows after the last query are multiplied too, with undefined contents. They affect only the same
// rows of the product, which are not read.
#pragma once

#include "decoded_block.hpp"

namespace kvant::KVANT_TARGET {

constexpr int GRAIN = 32;     // channels of a decoded row are padded to a multiple

// Configures the tiles of its thread, all of full size, and releases them when destroyed.
class Products {
public:
    Products() {
        struct {
            uint8_t palette = 1, start = 0, none[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } const config;
        _tile_loadconfig(&config);
    }
    ~Products() { _tile_release(); }
    Products(const Products &) = delete;
    Products &operator=(const Products &) = delete;

    // Scores [TOGETHER][PITCH] with all rows of a block, of queries [TOGETHER][stride]; added to the
    // present ones if `more`.
    void scores(const Tile<uint32_t> &keys, const uint32_t *q, int64_t stride, bool more, int,
                float *s) const {
        const int64_t pitch = keys.width / 2;
        for (int t = 0; t < BLOCK; t += 32)
            multiply({q, stride, 16, 16 * stride}, {keys.to + t * pitch, 16, 256, 16 * pitch},
                     keys.width / 32, more, s + t, PITCH);
    }

    // acc [TOGETHER][OUT_PITCH] += weights [TOGETHER][PITCH] of a block times its channels.
    void sums(const Tile<uint32_t> &values, const uint32_t *weights, int, float *acc) const {
        for (int d = 0; d < values.width; d += 32)
            multiply({weights, PITCH / 2, 16, 16 * (PITCH / 2)},
                     {values.to + d, values.pitch, 16 * values.pitch, 16}, BLOCK / 32, true, acc + d,
                     OUT_PITCH);
    }

private:
    // The matrices of one operand. Strides in pairs: `row` between rows of a matrix, `step` to the
    // matrix of the next 32 numbers, `neighbour` to the neighbouring matrix.
    struct Side {
        const uint32_t *at;
        int64_t row, step, neighbour;
    };

    // Compute two by two matrices of 16 x 16 sums.
    static void multiply(const Side &a, const Side &b, int steps, bool more, float *to,
                         int64_t pitch) {
        asm volatile("" ::: "memory");  // the compiler does not see that tile loads read memory
        const int64_t line = pitch * 4;
        float *lower = to + 16 * pitch;
        if (more) {
            _tile_loadd(0, to, line);
            _tile_loadd(1, to + 16, line);
            _tile_loadd(2, lower, line);
            _tile_loadd(3, lower + 16, line);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int i = 0; i < steps; i++) {
            const uint32_t *x = a.at + i * a.step, *y = b.at + i * b.step;
            _tile_loadd(4, x, a.row * 4);
            _tile_loadd(6, y, b.row * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, y + b.neighbour, b.row * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + a.neighbour, a.row * 4);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to, line);
        _tile_stored(1, to + 16, line);
        _tile_stored(2, lower, line);
        _tile_stored(3, lower + 16, line);
    }
};

}  // namespace kvant::KVANT_TARGET
