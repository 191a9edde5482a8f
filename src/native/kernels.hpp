// What one instruction set offers, for requests that were checked.
#pragma once

#include "kvant.h"

namespace kvant {

struct Kernels {
    const char *name;
    void (*attend)(const kvant_request &);
    void (*seal)(const kvant_seal_request &);
    void (*rotate)(const kvant_rotate_request &);
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
