// What one instruction set offers.
#pragma once

#include "kvant.h"

namespace kvant {

struct Kernels {
    const char *name;
    int (*attend)(const kvant_request &);
    int (*seal)(const kvant_seal_request &);
    int (*rotate)(const kvant_rotate_request &);
};

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
