// RMSNorm of rows, with the bits of PyTorch's operators. Squares are added in the order of PyTorch's
// sums: 32 partial sums, of every 32nd value, each as a tree with 16 values per branch. Compiled
// without fused operations.
#include "kernels.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "limits.hpp"
#include "team.hpp"
#include "vec.hpp"

namespace kvant::KVANT_TARGET {
namespace {

constexpr int64_t CHUNK_VALUES = 1 << 12;       // that a thread takes at a time; at least a row
constexpr int64_t VALUES_PER_THREAD = 1 << 15;  // some microseconds
constexpr int LEVELS = 4, BRANCH = 16;

struct Sums {
    F low = zero(), high = zero();
    void add_squares(F x, F y) {
        low = add(low, mul(x, x));
        high = add(high, mul(y, y));
    }
    void take(Sums &other) {
        low = add(low, other.low);
        high = add(high, other.high);
        other = Sums();
    }
    float total() const {
        float lanes[32], all = 0;
        store(lanes, low);
        store(lanes + 16, high);
        for (int i = 0; i < 8; i++)
            all += ((lanes[i] + lanes[8 + i]) + lanes[16 + i]) + lanes[24 + i];
        return all;
    }
};

template <class T> float squares(const T *x, int64_t dim) {
    Sums sums[LEVELS];
    const int64_t count = dim / NORM_UNIT;
    for (int64_t i = 0; i < count;) {
        for (const int64_t stop = std::min(i + BRANCH, count); i < stop; i++, x += NORM_UNIT)
            sums[0].add_squares(load(x), load(x + 16));
        if (i % BRANCH) break;
        for (int level = 1, branch = BRANCH; level < LEVELS; level++) {
            sums[level].take(sums[level - 1]);
            branch *= BRANCH;
            if (i % branch) break;
        }
    }
    for (int level = 1; level < LEVELS; level++) sums[0].take(sums[level]);
    return sums[0].total();
}

template <class T> void row(const T *x, const T *weight, T *out, int64_t dim, float eps) {
    const F scale = set1(1.0f / std::sqrt(squares(x, dim) / (float)dim + eps));
    for (int64_t d = 0; d < dim; d += 16) {
        T rounded[16];
        store_nearest(rounded, mul(load(x + d), scale));
        store_nearest(out + d, mul(load(weight + d), load(rounded)));
    }
}

class Norming {
public:
    explicit Norming(const kvant_norm_request &r) : r(r) {}

    void run() {
        const auto work = r.dtype == KVANT_F32    ? &Norming::work<float>
                          : r.dtype == KVANT_BF16 ? &Norming::work<Bfloat>
                                                  : &Norming::work<Half>;
        in_parallel((int)std::min(r.threads, r.count * r.dim / VALUES_PER_THREAD + 1), work, this);
    }

private:
    const kvant_norm_request &r;
    std::atomic<int64_t> next{0};

    template <class T> static void work(void *self) { ((Norming *)self)->take<T>(); }

    template <class T> void take() {
        const int64_t rows = std::max<int64_t>(CHUNK_VALUES / r.dim, 1);
        for (int64_t n; (n = next.fetch_add(rows)) < r.count;)
            for (const int64_t stop = std::min(n + rows, r.count); n < stop; n++)
                row((const T *)r.rows + n * r.dim, (const T *)r.weight, (T *)r.out + n * r.dim,
                    r.dim, (float)r.eps);
    }
};

}  // namespace

void norm(const kvant_norm_request &request) { Norming(request).run(); }

}  // namespace kvant::KVANT_TARGET
