// Elementwise operations on one or two tensors, with the bits of PyTorch's operators: computed in
// single precision and rounded once. Compiled without fused operations.
#include "kernels.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "limits.hpp"
#include "team.hpp"
#include "vec.hpp"

namespace kvant::KVANT_TARGET {
namespace {

constexpr int64_t VALUES_PER_THREAD = 1 << 15;  // some microseconds

struct Add {
    static F of(F a, F b) { return add(a, b); }
};
struct Multiply {
    static F of(F a, F b) { return mul(a, b); }
};

template <class T> T opposite(T x) { return {(uint16_t)(x.bits ^ 0x8000)}; }
template <> float opposite(float x) { return -x; }

// Load up to 16 values; a step of zero repeats one value.
template <class T> F load_some(const T *p, int64_t step, int64_t count) {
    if (step == 1 && count == 16) return load(p);
    T values[16] = {};
    for (int64_t i = 0; i < count; i++) values[i] = p[i * step];
    return load(values);
}
template <class T> void put(T *p, int64_t step, int64_t count, F x) {
    if (step == 1 && count == 16) return store_nearest(p, x);
    T values[16];
    store_nearest(values, x);
    for (int64_t i = 0; i < count; i++) p[i * step] = values[i];
}

class Mapping {
public:
    explicit Mapping(const kvant_map_request &r) : r(r), rows(r.shape.first * r.shape.second * r.shape.third) {}

    void run() {
        const int64_t helpers = rows * r.shape.last / VALUES_PER_THREAD;
        const int64_t threads = std::min({r.threads, rows, helpers + 1});
        const auto fn = r.dtype == KVANT_F32    ? work<float>
                        : r.dtype == KVANT_BF16 ? work<Bfloat>
                                                : work<Half>;
        chunk_rows = (rows + threads - 1) / threads;
        in_parallel((int)threads, fn, this);
    }

private:
    const kvant_map_request &r;
    const int64_t rows;
    int64_t chunk_rows = 1;
    std::atomic<int64_t> next{0};

    template <class T> static void work(void *self) { ((Mapping *)self)->take<T>(); }

    template <class T> void take() {
        for (int64_t n; (n = next.fetch_add(chunk_rows)) < rows;)
            for (const int64_t stop = std::min(n + chunk_rows, rows); n < stop; n++) row<T>(n);
    }

    static char *at(const kvant_numbers &x, int64_t i, int64_t j, int64_t k) {
        return (char *)x.data + i * x.stride.first + j * x.stride.second + k * x.stride.third;
    }

    template <class T> void row(int64_t n) {
        const int64_t k = n % r.shape.third, j = n / r.shape.third % r.shape.second;
        const int64_t i = n / r.shape.third / r.shape.second, size = sizeof(T), count = r.shape.last;
        const T *a = (const T *)at(r.a, i, j, k);
        T *out = (T *)at(r.out, i, j, k);
        const int64_t sa = r.a.stride.last / size, so = r.out.stride.last / size;
        switch (r.operation) {
            case KVANT_MAP_COPY:
                if (sa == 1 && so == 1) return (void)std::memcpy(out, a, count * size);
                for (int64_t x = 0; x < count; x++) out[x * so] = a[x * sa];
                return;
            case KVANT_MAP_NEGATE:
                for (int64_t x = 0; x < count; x++) out[x * so] = opposite(a[x * sa]);
                return;
            case KVANT_MAP_LOOK_UP: return look_up(a, sa, out, so, count);
        }
        const T *b = (const T *)at(r.b, i, j, k);
        const int64_t sb = r.b.stride.last / size;
        if (r.operation == KVANT_MAP_ADD) return each<Add>(a, sa, b, sb, out, so, count);
        each<Multiply>(a, sa, b, sb, out, so, count);
    }

    template <class Op, class T>
    static void each(const T *a, int64_t sa, const T *b, int64_t sb, T *out, int64_t so, int64_t count) {
        for (int64_t x = 0; x < count; x += 16) {
            const int64_t values = std::min<int64_t>(16, count - x);
            const F left = load_some(a + x * sa, sa, values);
            put(out + x * so, so, values, Op::of(left, load_some(b + x * sb, sb, values)));
        }
    }

    // Look up each value by its 16 bits.
    template <class T> void look_up(const T *a, int64_t sa, T *out, int64_t so, int64_t count) const {
        const T *const table = (const T *)r.b.data;
        if constexpr (sizeof(T) == 2)
            for (int64_t x = 0; x < count; x++) out[x * so] = table[a[x * sa].bits];
    }
};

}  // namespace

void map(const kvant_map_request &request) { Mapping(request).run(); }

}  // namespace kvant::KVANT_TARGET
