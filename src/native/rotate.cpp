// The signed Hadamard transform of codecs/frames/hadamard.py, to the bit. The stages there pair
// neighbours and put all sums before all differences. The in-place stages here, at distances 1, 2,
// 4, ..., give the same order in the end. Compiled without fused operations.
#include "kernels.hpp"

#include <algorithm>
#include <atomic>

#include "limits.hpp"
#include "team.hpp"
#include "vec.hpp"

namespace kvant::KVANT_TARGET {
namespace {

constexpr int64_t CHUNK = 64;               // rows that a thread takes at a time
constexpr int64_t ROWS_PER_THREAD = 1024;  // some tens of microseconds

// Transform 16 N numbers in place.
template <int N> inline void butterfly(F *x) {
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) x[i] = folded<8>(folded<4>(folded<2>(folded<1>(x[i]))));
#pragma GCC unroll 4
    for (int distance = 1; distance < N; distance *= 2)
#pragma GCC unroll 8
        for (int n = 0; n < N / 2; n++) {
            const int i = n / distance * 2 * distance + n % distance;
            const F even = x[i], odd = x[i + distance];
            x[i] = add(even, odd);
            x[i + distance] = sub(even, odd);
        }
}

template <class T, int N> void block(const T *from, T *to, const float *signs, bool last) {
    F x[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
        x[i] = load(from + 16 * i);
        if (!last) x[i] = mul(x[i], load(signs + 16 * i));
    }
    butterfly<N>(x);
#pragma GCC unroll 16
    for (int i = 0; i < N; i++) {
        if (last) x[i] = mul(x[i], load(signs + 16 * i));
        store_nearest(to + 16 * i, x[i]);
    }
}

class Rotating {
public:
    explicit Rotating(const kvant_rotate_request &r) : r(r), rows(r.batch * r.heads * r.count) {}

    void run() {
        const auto work = r.dtype == KVANT_F32    ? &Rotating::work<float>
                          : r.dtype == KVANT_BF16 ? &Rotating::work<Bfloat>
                                                  : &Rotating::work<Half>;
        in_parallel((int)std::min(r.threads, rows / ROWS_PER_THREAD + 1), work, this);
    }

private:
    const kvant_rotate_request &r;
    const int64_t rows;
    std::atomic<int64_t> next{0};

    template <class T> static void work(void *self) { ((Rotating *)self)->take<T>(); }

    template <class T> void take() {
        for (int64_t n; (n = next.fetch_add(CHUNK)) < rows;) {
            int64_t t = n % r.count, head = n / r.count % r.heads, batch = n / r.count / r.heads;
            for (const int64_t stop = std::min(n + CHUNK, rows); n < stop; n++) {
                const char *from = (const char *)r.rows.data + batch * r.rows.batch +
                                   head * r.rows.head + t * r.rows.row;
                row((const T *)from, (T *)r.out + n * r.dim);
                if (++t < r.count) continue;
                t = 0;
                if (++head == r.heads) head = 0, batch++;
            }
        }
    }

    // Rotate the blocks of a row, powers of two, largest first.
    template <class T> void row(const T *from, T *to) const {
        int64_t d = 0;
        for (int64_t width = MAX_DIM; width >= 16; width /= 2) {
            if (!(r.dim & width)) continue;
            const float *signs = r.signs + d;
            switch (width) {
            case 256: block<T, 16>(from + d, to + d, signs, r.last); break;
            case 128: block<T, 8>(from + d, to + d, signs, r.last); break;
            case 64: block<T, 4>(from + d, to + d, signs, r.last); break;
            case 32: block<T, 2>(from + d, to + d, signs, r.last); break;
            default: block<T, 1>(from + d, to + d, signs, r.last);
            }
            d += width;
        }
    }
};

}  // namespace

void rotate(const kvant_rotate_request &request) { Rotating(request).run(); }

}  // namespace kvant::KVANT_TARGET
