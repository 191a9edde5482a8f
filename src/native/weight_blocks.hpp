// The weight of a linear layer as blocks of keys: an output is a row, its columns are channels.
#pragma once

#include "decoded_block.hpp"
#include "kernels.hpp"

namespace kvant::KVANT_TARGET {

constexpr int64_t LONG_PART = 1024;  // columns of a dense part: four rows of floats are 16 KB

// Outputs [first, stop) of a block of 64.
struct OutputRange {
    int64_t first, stop;
    int count() const { return (int)(stop - first); }
};

class WeightBlocks {
public:
    const kvant_weight &weight;
    const bool coded;
    const int bits, group, groups, row_bytes;  // groups and row_bytes: of a part of an output
    const int64_t part, parts;

    // Parts of a dense weight have `dense_part` columns, the last one the rest.
    WeightBlocks(const kvant_weight &w, int64_t dense_part)
        : weight(w), coded(w.format != KVANT_RAW), bits((int)w.bits), group((int)w.group),
          groups(coded ? (int)(w.part / w.group) : 0),
          row_bytes(coded ? (int)(w.part * w.bits / 8) : 0), part(coded ? w.part : dense_part),
          parts((w.width + part - 1) / part) {}

    int columns(int64_t p) const { return (int)std::min(part, weight.width - p * part); }

    // The first output is a multiple of 16; so is the count of outputs, except at the end.
    SealedBlock codes(const OutputRange &outs, int64_t p) const {
        const int64_t tile = (outs.first / BLOCK * parts + p) * (BLOCK / 16) + outs.first % BLOCK / 16;
        SealedBlock block{(const uint8_t *)weight.codes + tile * 16 * row_bytes,
                          (const Half *)weight.scale + tile * 16 * groups,
                          weight.bias ? (const Half *)weight.bias + tile * 16 * groups : nullptr,
                          (int)part, group, groups, row_bytes, {}, 0};
        block.rows = (outs.count() + 31) / 32 * 32;
        block.lowest = weight.bias ? 0.0f : -(float)(1 << (bits - 1));
        return block;
    }

    RowBlock dense(const OutputRange &outs, int64_t p) const {
        const int64_t stride = weight.width * size_of(weight.dtype);
        const char *data = (const char *)weight.codes + outs.first * stride;
        return {data + p * part * size_of(weight.dtype), stride, outs.count(), {}};
    }

    // Prefetch a part, without its scales.
    void fetch_part(const OutputRange &outs, int64_t p) const {
        if (coded) {
            const SealedBlock block = codes(outs, p);
            return fetch_bytes((const char *)block.codes, block.rows * row_bytes);
        }
        const RowBlock block = dense(outs, p);
        for (int i = 0; i < block.count; i++)
            fetch_bytes(block.at(i), columns(p) * size_of(weight.dtype));
    }

    // The codes of a part, to prefetch.
    Ahead ahead(const OutputRange &outs, int64_t p) const {
        const SealedBlock block = codes(outs, p);
        return {(const char *)block.codes, (const char *)block.codes + block.rows * row_bytes};
    }

    // Dense outputs to prefetch while `outs` are read: those `distance` bytes ahead, and at the end
    // of the range the first ones of the next range.
    Ahead ahead(const OutputRange &outs, const OutputRange &next) const {
        const RowBlock now = dense(outs, 0), then = dense(next, 0);
        const int64_t distance = WEIGHT_ROWS * now.stride + AHEAD_BYTES;
        const int64_t bytes = now.count * now.stride, next_bytes = then.count * then.stride;
        return {now.data + std::min(distance, bytes), now.data + bytes, then.data,
                then.data + std::min(distance, next_bytes)};
    }

    // All dense outputs of a range, to prefetch.
    Ahead whole(const OutputRange &outs) const {
        const RowBlock block = dense(outs, 0);
        return {block.data, block.data + block.count * block.stride};
    }

private:
    static constexpr int64_t AHEAD_BYTES = 1 << 13;

    static void fetch_bytes(const char *from, int64_t count) {
        for (int64_t i = 0; i < count; i += LINE) fetch(from + i);
    }
};

// The outputs of a request in ranges: enough of them for all threads. A range of dense outputs stays
// in the L2 cache for all rows, also while another range is prefetched.
class OutputRanges {
public:
    OutputRanges(const kvant_multiply_request &r, int64_t row_panels)
        : outs(r.weight->outs) {
        const bool dense = r.weight->format == KVANT_RAW;
        while (step > 32 && count() * row_panels < 4 * r.threads) step /= 2;
        while (dense && step > 16 && step * r.weight->width * 2 > MAX_BYTES) step /= 2;
    }
    int64_t count() const { return (outs + step - 1) / step; }
    OutputRange at(int64_t i) const { return {i * step, std::min(outs, (i + 1) * step)}; }

private:
    static constexpr int64_t MAX_BYTES = 1 << 17;
    const int64_t outs;
    int64_t step = BLOCK;
};

// Add the bias to the sums of a row, and round them to its outputs.
template <class T>
inline void write_outputs(const kvant_multiply_request &r, int64_t row, const OutputRange &outs,
                     const float *bias, const float *sums) {
    T *const to = (T *)r.out + row * r.weight->outs + outs.first;
    T padded[BLOCK];
    T *const at = outs.count() == BLOCK ? to : padded;
    for (int i = 0; i < BLOCK; i += 16) store_nearest(at + i, add(load(sums + i), load(bias + i)));
    if (at == padded) std::memcpy(to, padded, outs.count() * sizeof(T));
}

inline void write_row(const kvant_multiply_request &r, int64_t row, const OutputRange &outs,
                      const float *bias, const float *sums) {
    if (r.dtype == KVANT_F32) write_outputs<float>(r, row, outs, bias, sums);
    if (r.dtype == KVANT_F16) write_outputs<Half>(r, row, outs, bias, sums);
    if (r.dtype == KVANT_BF16) write_outputs<Bfloat>(r, row, outs, bias, sums);
}

// The bias of a range of outputs in single precision, or zeros.
struct BiasRange {
    float values[BLOCK] = {};
    BiasRange(const kvant_multiply_request &r, const OutputRange &outs) {
        if (!r.bias) return;
        const int64_t size = size_of(r.bias_dtype);
        alignas(64) char padded[BLOCK * sizeof(float)] = {};
        std::memcpy(padded, (const char *)r.bias + outs.first * size, outs.count() * size);
        read_row(r.bias_dtype, padded, BLOCK, values);
    }
};

inline const char *row_at(const kvant_multiply_request &r, int64_t row) {
    return (const char *)r.rows + row * r.weight->width * size_of(r.dtype);
}

}  // namespace kvant::KVANT_TARGET
