// Products of up to TOGETHER queries with an opened block, on the processor's tiles (AMX): matrices
// of 16 rows of 64 bytes, multiplied 16 queries x 32 numbers x 16 lanes at a time.
//
// Rows of queries behind the last one are multiplied as well, whatever they hold: a row of a product
// comes of one row of queries alone, and nobody reads those.
#pragma once

#include "tile.hpp"

namespace kvant::KVANT_TARGET {

constexpr int TOGETHER = 32;  // queries whose scores are computed before they are used
constexpr int GRAIN = 32;     // channels of an opened row are a multiple of it
constexpr int OUT_PITCH = MAX_DIM + 16;  // numbers from one query's sums to the next's

// While one lives its thread has the tiles, all of full size; then they are as if nobody had.
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

    // Scores [TOGETHER][PITCH] with all rows of a block; added to what is there where there is `more`.
    void scores(const Tile<uint32_t> &keys, const uint32_t *q, bool more, int, float *s) const {
        const int64_t pitch = keys.width / 2;
        for (int t = 0; t < BLOCK; t += 32)
            multiply({q, pitch, 16, 16 * pitch}, {keys.to + t * pitch, 16, 256, 16 * pitch},
                     keys.width / 32, more, s + t, PITCH);
    }

    // acc [TOGETHER][OUT_PITCH] += weights [TOGETHER][PITCH] of the rows of a block times their channels.
    void sums(const Tile<uint32_t> &values, const uint32_t *weights, int, float *acc) const {
        for (int d = 0; d < values.width; d += 32)
            multiply({weights, PITCH / 2, 16, 16 * (PITCH / 2)},
                     {values.to + d, values.pitch, 16 * values.pitch, 16}, BLOCK / 32, true, acc + d,
                     OUT_PITCH);
    }

private:
    // Where the matrices of one side lie, in pairs: from one row of a matrix to the next, from
    // a matrix to that of the next 32 numbers, and to the one beside it.
    struct Side {
        const uint32_t *at;
        int64_t row, step, beside;
    };

    // Two by two matrices of 16 x 16 sums.
    static void multiply(const Side &a, const Side &b, int steps, bool more, float *to,
                         int64_t pitch) {
        asm volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
        const int64_t line = pitch * 4;
        float *below = to + 16 * pitch;
        if (more) {
            _tile_loadd(0, to, line);
            _tile_loadd(1, to + 16, line);
            _tile_loadd(2, below, line);
            _tile_loadd(3, below + 16, line);
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
            _tile_loadd(7, y + b.beside, b.row * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, x + a.beside, a.row * 4);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to, line);
        _tile_stored(1, to + 16, line);
        _tile_stored(2, below, line);
        _tile_stored(3, below + 16, line);
    }
};

}  // namespace kvant::KVANT_TARGET
