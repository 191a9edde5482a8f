// The kernels of each instruction set; they take checked requests.
#pragma once

#include "kvant.h"

namespace kvant {

// The dense rows of a page of one head, and its sealed fields (`bias` is null unless affine).
struct PageSeal {
    const char *rows;
    int64_t row;  // stride in bytes
    int64_t count;
    uint8_t *codes;
    uint16_t *scale, *bias;
};

struct Kernels {
    const char *name;
    void (*attend)(const kvant_request &);
    void (*seal_page)(const kvant_side &, const PageSeal &);
    void (*rotate)(const kvant_rotate_request &);
    void (*norm)(const kvant_norm_request &);
    void (*choose)(const kvant_choose_request &);
    void (*multiply)(const kvant_multiply_request &);
    void (*map)(const kvant_map_request &);
};

// Kernels are compiled once for each instruction set, in a namespace of its name (CMakeLists.txt).
#define KVANT_DECLARE_KERNELS(isa)                              \
    namespace isa {                                             \
    void attend(const kvant_request &request);                  \
    void seal_page(const kvant_side &side, const PageSeal &page); \
    void rotate(const kvant_rotate_request &request);           \
    void norm(const kvant_norm_request &request);               \
    void choose(const kvant_choose_request &request);           \
    void multiply(const kvant_multiply_request &request);       \
    void map(const kvant_map_request &request);                 \
    }

KVANT_DECLARE_KERNELS(plain)
KVANT_DECLARE_KERNELS(avx2)
KVANT_DECLARE_KERNELS(avx512)
KVANT_DECLARE_KERNELS(neon)

// Instruction sets with products of their own; their other kernels are those of another.
#define KVANT_DECLARE_PRODUCTS(isa)                       \
    namespace isa {                                       \
    void attend(const kvant_request &request);            \
    void multiply(const kvant_multiply_request &request); \
    }

KVANT_DECLARE_PRODUCTS(avxvnni)
KVANT_DECLARE_PRODUCTS(amx)
KVANT_DECLARE_PRODUCTS(neon_dotprod)
KVANT_DECLARE_PRODUCTS(neon_dotprod_i8mm)

void store(const kvant_store_request &request, const Kernels &kernels);

}  // namespace kvant
