// Multiply a few rows by a packed weight. The product is limited by reading the weight, so each
// thread streams blocks of outputs from memory. With more rows than registers, rows are multiplied
// in groups while a piece of the block is in the cache, and the next piece is prefetched.
//
// A piece is a part of the columns. Products are summed within a part in order, then part by part,
// as oneDNN does, so outputs can be equal to the bit.
#include "kernels.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "limits.hpp"
#include "team.hpp"
#include "vec.hpp"

namespace kvant::KVANT_TARGET {
namespace {

constexpr int ROWS = 6;               // rows whose sums fit in registers
constexpr int64_t MAX_ROWS = 6 * ROWS;  // rows that share a piece
constexpr int FS = PACKED_OUTS / 16;  // registers of the outputs of a block
constexpr int64_t BYTES_PER_THREAD = 1 << 16;  // of the weight: some microseconds

// Bytes to prefetch into the L2 cache, 128 at each step.
struct Prefetch {
    const char *at = nullptr, *stop = nullptr;
    void fetch() {
        if (at >= stop) return;
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + 64, 0, 2);
        at += 128;
    }
};

#if KVANT_BFLOAT_DOT
inline Pairs load_columns(const Bfloat *p) { return load_pairs(p); }
#else
inline Pairs load_columns(const Bfloat *p) {
    float even[16], odd[16];
    for (int i = 0; i < 16; i++) even[i] = to_float(p[2 * i]), odd[i] = to_float(p[2 * i + 1]);
    return {load(even), load(odd)};
}
#endif

struct Piece {
    const Bfloat *rows, *weight;  // from the first column of the part
    int64_t width, columns;       // of a row, and of the part
    bool first;
};

// Add the sums of a part to those of the parts before, for N rows.
template <int N> inline void add_part(const Piece &piece, Prefetch &prefetch, F (*all)[FS]) {
    F sums[N][FS];
    for (int n = 0; n < N; n++)
        for (F &sum : sums[n]) sum = zero();
    for (int64_t c = 0; c < piece.columns; c += 2) {
        Pairs columns[FS];
        for (int i = 0; i < FS; i++)
            columns[i] = load_columns(piece.weight + c * PACKED_OUTS + 32 * i);
        prefetch.fetch();
        for (int n = 0; n < N; n++) {
            uint32_t pair;
            std::memcpy(&pair, piece.rows + n * piece.width + c, sizeof pair);
            for (int i = 0; i < FS; i++) sums[n][i] = dot2(sums[n][i], columns[i], pair);
        }
    }
    for (int n = 0; n < N; n++)
        for (int i = 0; i < FS; i++) all[n][i] = piece.first ? sums[n][i] : add(all[n][i], sums[n][i]);
}

class Multiplying {
public:
    explicit Multiplying(const kvant_multiply_request &r)
        : r(r), blocks((r.outs + PACKED_OUTS - 1) / PACKED_OUTS) {}

    void run() {
        const int64_t threads = std::min(r.threads, r.width * r.outs * 2 / BYTES_PER_THREAD + 1);
        in_parallel((int)std::min(threads, blocks), work, this);
    }

private:
    const kvant_multiply_request &r;
    const int64_t blocks;
    std::atomic<int64_t> next{0};

    static void work(void *self) { ((Multiplying *)self)->take(); }

    const Bfloat *weight(int64_t block) const {
        return (const Bfloat *)r.weight + block * r.width * PACKED_OUTS;
    }

    void take() {
        for (int64_t block = next.fetch_add(1); block < blocks;) {
            const int64_t after = next.fetch_add(1);
            for (int64_t row = 0; row < r.count; row += MAX_ROWS)
                compute_block(block, row, std::min(MAX_ROWS, r.count - row), after);
            block = after;
        }
    }

    // Compute the outputs of one block for some rows.
    void compute_block(int64_t block, int64_t row, int64_t count, int64_t after) {
        F sums[MAX_ROWS][FS];
        const int64_t groups = (count + ROWS - 1) / ROWS;  // of nearly equal size
        for (int64_t part = 0; part < r.width; part += r.part) {
            const int64_t columns = std::min(r.part, r.width - part);
            const Bfloat *at = weight(block) + part * PACKED_OUTS;
            Prefetch prefetch;
            if (groups > 1) prefetch = prefetch_after(block, part + columns, after);
            for (int64_t g = 0; g < groups; g++) {
                const int64_t first = count * g / groups, stop = count * (g + 1) / groups;
                const Bfloat *rows = (const Bfloat *)r.rows + (row + first) * r.width + part;
                add_rows(stop - first, {rows, at, r.width, columns, !part}, prefetch, sums + first);
            }
        }
        for (int64_t n = 0; n < count; n++) store_outputs(sums[n], row + n, block * PACKED_OUTS);
    }

    Prefetch prefetch_after(int64_t block, int64_t column, int64_t after) const {
        if (column == r.width) block = after, column = 0;
        if (block >= blocks) return {};
        const char *at = (const char *)(weight(block) + column * PACKED_OUTS);
        return {at, at + std::min(r.part, r.width - column) * PACKED_OUTS * 2};
    }

    static void add_rows(int64_t rows, const Piece &piece, Prefetch &prefetch, F (*sums)[FS]) {
        switch (rows) {
            case 1: return add_part<1>(piece, prefetch, sums);
            case 2: return add_part<2>(piece, prefetch, sums);
            case 3: return add_part<3>(piece, prefetch, sums);
            case 4: return add_part<4>(piece, prefetch, sums);
            case 5: return add_part<5>(piece, prefetch, sums);
            default: return add_part<ROWS>(piece, prefetch, sums);
        }
    }

    void store_outputs(const F (&sums)[FS], int64_t row, int64_t begin) {
        const int64_t outs = std::min<int64_t>(PACKED_OUTS, r.outs - begin);
        Bfloat bias[PACKED_OUTS] = {}, rounded[PACKED_OUTS];
        if (r.bias) std::memcpy(bias, (const Bfloat *)r.bias + begin, outs * sizeof(Bfloat));
        for (int i = 0; i < FS; i++)
            store(rounded + 16 * i, r.bias ? add(sums[i], load(bias + 16 * i)) : sums[i]);
        std::memcpy((Bfloat *)r.out + row * r.outs + begin, rounded, outs * sizeof(Bfloat));
    }
};

}  // namespace

void multiply(const kvant_multiply_request &request) { Multiplying(request).run(); }

}  // namespace kvant::KVANT_TARGET
