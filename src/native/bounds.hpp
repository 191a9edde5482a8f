// Compute the bytes that counts and strides span, with arithmetic that saturates on overflow.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace kvant {

constexpr int64_t ENDLESS = INT64_MAX;  // overflow, or a negative operand: larger than any memory

inline int64_t times(int64_t a, int64_t b) {
    int64_t product;
    if (a == 0 || b == 0) return 0;
    return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product) ? ENDLESS : product;
}

inline int64_t plus(int64_t a, int64_t b) {
    int64_t total;
    return a < 0 || b < 0 || __builtin_add_overflow(a, b, &total) ? ENDLESS : total;
}

inline int64_t product(std::initializer_list<int64_t> factors) {
    int64_t all = 1;
    for (int64_t factor : factors)
        if (factor == 0) return 0;
    for (int64_t factor : factors) all = times(all, factor);
    return all;
}

struct Axis {
    int64_t count, stride;
};

// Bytes up to the end of the last item; an item has `item` bytes.
inline int64_t reach(std::initializer_list<Axis> axes, int64_t item) {
    int64_t all = item;
    for (const Axis &axis : axes) {
        if (axis.count == 0) return 0;
        all = plus(all, axis.count < 0 ? ENDLESS : times(axis.count - 1, axis.stride));
    }
    return all;
}

// Whether memory of `nbytes` holds `need` bytes, aligned for numbers of `unit` bytes.
inline bool holds(const void *data, int64_t nbytes, int64_t need, int64_t unit) {
    if (need == 0) return true;
    return data && (uintptr_t)data % unit == 0 && need <= nbytes && need != ENDLESS;
}

}  // namespace kvant
