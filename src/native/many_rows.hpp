// Products of many rows with a weight: a part of a block is decoded once for all of them
// (decoded_block.hpp). If the processor multiplies pairs of bfloat16, and the rows are such, a weight
// of bfloat16 or of codes is multiplied so (Number is a pair); otherwise in single precision.
#pragma once

#include <atomic>
#include <memory>

#include "team.hpp"
#include "weight_blocks.hpp"
#if KVANT_TILES
#include "amx_products.hpp"
#else
#include "vector_products.hpp"
#endif

namespace kvant::KVANT_TARGET {

// Whether rows and weight are multiplied as pairs of bfloat16.
inline bool multiplies_pairs(const kvant_multiply_request &r) {
    const bool paired = r.weight->format != KVANT_RAW || r.weight->dtype == KVANT_BF16;
    return KVANT_BFLOAT_DOT && r.dtype == KVANT_BF16 && paired;
}

template <class Number> class ManyRows {
public:
    explicit ManyRows(const kvant_multiply_request &r)
        : r(r), blocks(*r.weight, MAX_DIM), side(make_side(*r.weight)), tables(side),
          width(r.weight->width / EACH<Number>), panel(choose_panel(r)),
          panels((r.count + panel - 1) / panel),
          num_ranges((r.weight->outs + BLOCK - 1) / BLOCK) {
        if (sizeof(Number) != (size_t)size_of(r.dtype) * EACH<Number>)
            floats.reset(new float[r.count * width]);
    }

    void run() {
        if (floats) in_parallel((int)std::min(r.threads, r.count), convert_rows, this);
        in_parallel((int)std::min(r.threads, num_ranges * panels), work, this);
    }

private:
    const kvant_multiply_request &r;
    const WeightBlocks blocks;
    const kvant_side side;
    const SideTables tables;
    const int64_t width, panel, panels, num_ranges;  // width: numbers of a row
    std::unique_ptr<float[]> floats;
    std::atomic<int64_t> next_row{0}, next{0};

    struct Scratch {
        alignas(64) Number weight[BLOCK * MAX_DIM / EACH<Number>];
        alignas(64) Number rows[TOGETHER * MAX_DIM / EACH<Number>];
    };

    static kvant_side make_side(const kvant_weight &w) {
        kvant_side side = {};
        side.format = w.format, side.bits = w.bits, side.group = w.group, side.dim = w.part;
        return side;
    }

    // Rows that share a decoded block: more are better, but all threads should have work.
    static int64_t choose_panel(const kvant_multiply_request &r) {
        const int64_t ranges = (r.weight->outs + BLOCK - 1) / BLOCK;
        for (int64_t panel = 1024; panel > 128; panel /= 2)
            if (ranges * ((r.count + panel - 1) / panel) >= 4 * r.threads) return panel;
        return 128;
    }

    static void convert_rows(void *self) {
        ManyRows &all = *(ManyRows *)self;
        for (int64_t row; (row = all.next_row.fetch_add(1)) < all.r.count;)
            read_row(all.r.dtype, row_at(all.r, row), all.width, all.floats.get() + row * all.width);
    }

    OutputRange range_at(int64_t out) const { return {out, std::min(r.weight->outs, out + BLOCK)}; }

    static void work(void *self) { ((ManyRows *)self)->run_tasks(); }

    void run_tasks() {
        const std::unique_ptr<Scratch> scratch(new Scratch);
        const std::unique_ptr<float[]> sums(new float[(panel + TOGETHER) * PITCH]);
        const Products products;
        for (int64_t task; (task = next.fetch_add(1)) < num_ranges * panels;)
            compute(products, task, *scratch, sums.get());
    }

    void compute(const Products &products, int64_t task, Scratch &s, float *sums) {
        const int64_t out = task / panels * BLOCK, first = task % panels * panel;
        const OutputRange outs = range_at(out);
        const int64_t count = std::min(panel, r.count - first);
        for (int64_t p = 0; p < blocks.parts; p++) {
            const Tile<Number> tile{s.weight, 16, blocks.columns(p)};
            open(outs, p, tile);
            if (p + 1 < blocks.parts) blocks.fetch_part(outs, p + 1);
            else if (outs.stop < r.weight->outs) blocks.fetch_part(range_at(out + BLOCK), 0);
            for (int64_t m = 0; m < count; m += TOGETHER) {
                const int n = (int)std::min<int64_t>(TOGETHER, count - m);
                int64_t stride = width;
                const Number *rows = rows_from(first + m, n, p, s.rows, stride);
                products.scores(tile, rows, stride, p > 0, n, sums + m * PITCH);
            }
        }
        const BiasRange bias(r, outs);
        for (int64_t m = 0; m < count; m++)
            write_row(r, first + m, outs, bias.values, sums + m * PITCH);
    }

    void open(const OutputRange &outs, int64_t p, const Tile<Number> &tile) const {
        if (blocks.coded)
            open_sealed<true>(blocks.codes(outs, p), tables, tile);
        else
            open_dense<true>(blocks.dense(outs, p), r.weight->dtype, tile.width, tile);
    }

    // The columns of a part of `count` rows; copied if pairs are not aligned, or if tiles, which read
    // TOGETHER rows, would read more.
    const Number *rows_from(int64_t row, int count, int64_t p, Number *scratch,
                            int64_t &stride) const {
        const Number *from = floats ? (const Number *)(const void *)floats.get() : (const Number *)r.rows;
        from += row * width + p * blocks.part / EACH<Number>;
        const bool aligned = (uintptr_t)from % alignof(Number) == 0;
        if (aligned && (!KVANT_TILES || count == TOGETHER)) return from;
        const int64_t columns = blocks.columns(p) / EACH<Number>;
        for (int i = 0; i < count; i++)
            std::memcpy(scratch + i * columns, from + i * stride, columns * sizeof(Number));
        std::memset(scratch + count * columns, 0, (TOGETHER - count) * columns * sizeof(Number));
        stride = columns;
        return scratch;
    }
};

}  // namespace kvant::KVANT_TARGET
