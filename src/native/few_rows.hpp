// Products of rows with a weight as it is stored: for few rows, which are limited by reading the
// weight, and for any number of them where codes are multiplied as integers. A part of a block is
// read from memory once, and is in the cache for the rows after the first four.
//
// With codes, 64 x 256 of them are 8 KB (4 bits) or 16 KB (8 bits), multiplied as keys are
// (integer_codes.hpp). Dense outputs are read in memory order, a few of them together.
#pragma once

#include <atomic>
#include <memory>

#include "team.hpp"
#include "weight_blocks.hpp"

namespace kvant::KVANT_TARGET {

constexpr int64_t FEW_ROWS = 32;  // always multiplied so; their sums of a block are 20 KB

// Rows in the form that the weight is multiplied with.
class ConvertedRows {
public:
    ConvertedRows(const kvant_multiply_request &r, const WeightBlocks &blocks)
        : r(r), blocks(blocks), width(r.weight->width) {
        bfloats = KVANT_BFLOAT_DOT && !blocks.coded && r.weight->dtype == KVANT_BF16 &&
                 r.dtype == KVANT_BF16;
        if (bfloats) return;
        if (!blocks.coded) {
            floats.reset(new float[r.count * width]);
            return;
        }
        const int64_t parts = blocks.parts * r.count;
        fours.reset(new uint32_t[parts * (MAX_DIM / 2)]);
        steps.reset(new float[parts]), sums.reset(new float[parts * MAX_GROUPS]);
    }

    void convert(int64_t row) {
        if (bfloats) return;
        if (!blocks.coded) return convert_dense(row, floats.get() + row * width);
        alignas(64) float values[MAX_DIM];
        for (int64_t p = 0; p < blocks.parts; p++) {
            const int64_t at = p * r.count + row;
            read_row(r.dtype, row_at(r, row) + p * blocks.part * size_of(r.dtype), blocks.part, values);
            steps[at] = make_fours<false>(values, (int)blocks.part, blocks.group,
                                          &fours[at * (MAX_DIM / 2)], &sums[at * MAX_GROUPS]);
        }
    }

    bool are_bfloats() const { return bfloats; }
    const Bfloat *bfloat_row(int64_t row, int64_t column) const {
        return (const Bfloat *)row_at(r, row) + column;
    }
    const float *float_row(int64_t row, int64_t column) const {
        return floats.get() + row * width + column;
    }
    FixedQueries<uint32_t> fixed(int64_t row, int64_t p) const {
        const int64_t at = p * r.count + row;
        return {&fours[at * (MAX_DIM / 2)], &steps[at], &sums[at * MAX_GROUPS]};
    }

private:
    const kvant_multiply_request &r;
    const WeightBlocks &blocks;
    const int64_t width;
    bool bfloats;
    std::unique_ptr<float[]> floats, steps, sums;
    std::unique_ptr<uint32_t[]> fours;

    void convert_dense(int64_t row, float *to) const {
        read_row(r.dtype, row_at(r, row), width, to);
        if (r.weight->dtype != KVANT_BF16) return;
        for (int64_t d = 0; d < width; d += 16) store(to + d, split<Bfloat>(load(to + d)));
    }
};

class FewRows {
public:
    explicit FewRows(const kvant_multiply_request &r)
        : r(r), blocks(*r.weight, LONG_PART), rows(r, blocks),
          panels((r.count + PANEL - 1) / PANEL), ranges(r, panels) {}

    void run() {
        if (r.count <= FEW_ROWS)
            for (int64_t row = 0; row < r.count; row++) rows.convert(row);
        else
            in_parallel((int)std::min(r.threads, r.count), convert_rows, this);
        const int64_t bytes = r.weight->outs * r.weight->width * (blocks.coded ? blocks.bits : 16) / 8;
        const int64_t threads = std::min(r.threads, bytes * r.count / BYTES_PER_THREAD + 1);
        in_parallel((int)std::min(threads, tasks()), work, this);
    }

private:
    static constexpr int64_t PANEL = 128, BYTES_PER_THREAD = 1 << 15;

    const kvant_multiply_request &r;
    const WeightBlocks blocks;
    ConvertedRows rows;
    const int64_t panels;
    const OutputRanges ranges;
    std::atomic<int64_t> next_row{0}, next{0};

    int64_t tasks() const { return panels * ranges.count(); }

    static void convert_rows(void *self) {
        FewRows &all = *(FewRows *)self;
        for (int64_t row; (row = all.next_row.fetch_add(1)) < all.r.count;) all.rows.convert(row);
    }

    static void work(void *self) { ((FewRows *)self)->run_tasks(); }

    // If there are enough tasks, a thread reserves its next one in advance, to prefetch its weights.
    void run_tasks() {
        const int64_t room = std::min(r.count, PANEL);
        const std::unique_ptr<float[]> sums(new float[2 * room * PITCH]());
        const bool ahead = tasks() >= 4 * r.threads;
        for (int64_t task = next.fetch_add(1); task < tasks();) {
            int64_t after = ahead ? next.fetch_add(1) : tasks();
            compute(task, after, sums.get(), sums.get() + room * PITCH);
            if (!ahead) after = next.fetch_add(1);
            task = after;
        }
    }

    OutputRange range(int64_t task) const { return ranges.at(task / panels); }

    void compute(int64_t task, int64_t after, float *sums, float *scores) {
        const OutputRange outs = range(task);
        const int64_t first = task % panels * PANEL, count = std::min(PANEL, r.count - first);
        const OutputRange next = after < tasks() ? range(after) : OutputRange{};
        Ahead dense_ahead;  // continues from part to part
        if (!blocks.coded) dense_ahead = dense_prefetch(outs, next, count);
        for (int64_t p = 0; p < blocks.parts; p++) {
            float *to = p ? scores : sums;
            if (blocks.coded) {
                add_codes(coded_block(outs, p, after), p, first, (int)count, to);
            } else {
                RowBlock block = blocks.dense(outs, p);
                block.ahead = dense_ahead;
                add_rows(block, p, first, (int)count, to);
                dense_ahead = block.ahead;
            }
            for (int64_t m = 0; p && m < count; m++)
                for (int i = 0; i < BLOCK; i += 16) {
                    float *at = sums + m * PITCH + i;
                    store(at, add(load(at), load(scores + m * PITCH + i)));
                }
        }
        const BiasRange bias(r, outs);
        for (int64_t m = 0; m < count; m++)
            write_row(r, first + m, outs, bias.values, sums + m * PITCH);
    }

    // Several passes over a range with products of bfloat16 take about as long as the next range
    // takes to arrive from memory, so each of them prefetches a share of it.
    Ahead dense_prefetch(const OutputRange &outs, const OutputRange &next, int64_t count) const {
        if (!rows.are_bfloats() || count < 8 || !next.count()) return blocks.ahead(outs, next);
        Ahead ahead = blocks.whole(next);
        ahead.passes = (count + 3) / 4;
        return ahead;
    }

    // A part of the codes, with the next one to prefetch.
    SealedBlock coded_block(const OutputRange &outs, int64_t p, int64_t after) const {
        SealedBlock block = blocks.codes(outs, p);
        const bool last = p + 1 == blocks.parts;
        if (last && after >= tasks()) return block;
        const OutputRange next_outs = last ? range(after) : outs;
        const int64_t next_part = last ? 0 : p + 1;
        block.ahead = blocks.ahead(next_outs, next_part);
        block.to_next_scale =
            (const char *)blocks.codes(next_outs, next_part).scale - (const char *)block.scale;
        return block;
    }

    void add_codes(const SealedBlock &block, int64_t p, int64_t first, int count, float *scores) {
        const auto multiply = [&](auto bits, auto span, const auto &words) {
            by_four(count, [&](auto n, int m) {
                quad_scores<bits.value, span.value, n.value>(block, words, 1.0f,
                                                             rows.fixed(first + m, p),
                                                             scores + m * PITCH);
            });
        };
        if (blocks.bits == 8) return multiply(Int<8>(), Int<16>(), CodeWords<8>());
        with_code_words(blocks.bits, [&](auto bits, const auto &words) { multiply(bits, Int<32>(), words); });
    }

    void add_rows(const RowBlock &block, int64_t p, int64_t first, int count, float *scores) {
        const int dim = blocks.columns(p);
        const int64_t column = p * blocks.part, width = r.weight->width;
        by_four(count, [&](auto n, int m) {
            constexpr int GN = decltype(n)::value, R = std::min(DOTS / GN, WEIGHT_ROWS);
            float *to = scores + m * PITCH;
#if KVANT_BFLOAT_DOT
            if (rows.are_bfloats()) {
                const Bfloat *q = rows.bfloat_row(first + m, column);
                if (block.ahead.passes == 1) return bfloat_scores<GN>(block, q, width, dim, to);
                return bfloat_scores<GN, true>(block, q, width, dim, to);
            }
#endif
            const float *q = rows.float_row(first + m, column);
            if (r.weight->dtype == KVANT_BF16) row_scores<Bfloat, GN, R>(block, q, width, dim, to);
            if (r.weight->dtype == KVANT_F16) row_scores<Half, GN, R>(block, q, width, dim, to);
        });
    }
};

}  // namespace kvant::KVANT_TARGET
