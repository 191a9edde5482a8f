// The kernels of one instruction set; they take checked requests.
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

namespace amx {
void attend(const kvant_request &);  // all other kernels are those of avx512
}
namespace avx512 {
extern const Kernels KERNELS;
}
namespace avx2 {
extern const Kernels KERNELS;
}
namespace plain {
extern const Kernels KERNELS;
}

}  // namespace kvant
