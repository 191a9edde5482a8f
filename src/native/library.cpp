// The entry points, which check their requests, and the choice of the instruction set.
#include <cstdlib>
#include <cstring>
#include <vector>

#if KVANT_HAS_avx2
#include <cpuid.h>
#endif
#if KVANT_HAS_amx
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if KVANT_HAS_neon && defined(__APPLE__)
#include <sys/sysctl.h>
#elif KVANT_HAS_neon && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "checks.hpp"
#include "kernels.hpp"

namespace {

using kvant::Kernels;

#if KVANT_HAS_avxvnni
// Whether the processor multiplies and adds integers in one instruction of 256 bits.
bool has_vnni() {
    constexpr unsigned AVX_VNNI = 1u << 4;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI);
}
#endif

#if KVANT_HAS_amx
// Whether the processor has tiles of 16-bit floats, and the system permits this process to use them.
// The permission changes the process, so it is requested only if the tiles may be selected.
bool has_tiles() {
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
    unsigned a, b, c, d;
    const char *forced = std::getenv("KVANT_ISA");
    if (forced && *forced && std::strcmp(forced, "amx")) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & BF16) || !(d & TILE)) return false;
    constexpr long PERMIT = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, PERMIT, TILE_DATA) == 0;
}
#endif

#if KVANT_HAS_neon && defined(__APPLE__)
bool has_feature(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(name, &value, &size, nullptr, 0) && value;
}
[[maybe_unused]] bool has_dot_products() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
[[maybe_unused]] bool has_byte_matrices() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#elif KVANT_HAS_neon && defined(__linux__)
[[maybe_unused]] bool has_dot_products() {
    constexpr unsigned long DOT_PRODUCTS = 1ul << 20;  // HWCAP_ASIMDDP
    return getauxval(AT_HWCAP) & DOT_PRODUCTS;
}
[[maybe_unused]] bool has_byte_matrices() {
    constexpr unsigned long BYTE_MATRICES = 1ul << 13;  // HWCAP2_I8MM
    return getauxval(AT_HWCAP2) & BYTE_MATRICES;
}
#elif KVANT_HAS_neon
[[maybe_unused]] bool has_dot_products() { return false; }
[[maybe_unused]] bool has_byte_matrices() { return false; }
#endif

// The kernels of `isa`, with products of `products`.
#define KVANT_KERNELS(name, products, isa)                                                        \
    {name, kvant::products::attend, kvant::isa::seal_page, kvant::isa::rotate, kvant::isa::norm, \
     kvant::isa::choose, kvant::products::multiply, kvant::isa::map}

// The kernels that the processor has instructions for, the fastest first.
std::vector<Kernels> list_kernels() {
    std::vector<Kernels> list;
#if KVANT_HAS_avx512
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#if KVANT_HAS_amx
    if (wide && has_vnni() && has_tiles()) list.push_back(KVANT_KERNELS("amx", amx, avx512));
#endif
    if (wide) list.push_back(KVANT_KERNELS("avx512", avx512, avx512));
#endif
#if KVANT_HAS_avx2
    // Every processor with AVX2 and FMA also converts 16-bit floats (F16C).
    const bool middle = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if KVANT_HAS_avxvnni
    if (middle && has_vnni()) list.push_back(KVANT_KERNELS("avxvnni", avxvnni, avx2));
#endif
    if (middle) list.push_back(KVANT_KERNELS("avx2", avx2, avx2));
#endif
#if KVANT_HAS_neon_dotprod_i8mm
    if (has_dot_products() && has_byte_matrices())
        list.push_back(KVANT_KERNELS("neon+dotprod+i8mm", neon_dotprod_i8mm, neon));
#endif
#if KVANT_HAS_neon_dotprod
    if (has_dot_products()) list.push_back(KVANT_KERNELS("neon+dotprod", neon_dotprod, neon));
#endif
#if KVANT_HAS_neon
    list.push_back(KVANT_KERNELS("neon", neon, neon));
#endif
    list.push_back(KVANT_KERNELS("plain", plain, plain));
    return list;
}

// The fastest kernels, or those that KVANT_ISA names; null if the processor does not have them.
const Kernels *best() {
    static const std::vector<Kernels> list = list_kernels();
    const char *forced = std::getenv("KVANT_ISA");
    if (!forced || !*forced) return &list.front();
    for (const Kernels &kernels : list)
        if (!std::strcmp(forced, kernels.name)) return &kernels;
    return nullptr;
}

const Kernels *kernels() {
    static const Kernels *const selected = best();
    return selected;
}

}  // namespace

extern "C" int kvant_abi(void) { return KVANT_ABI; }

extern "C" void kvant_spin(int64_t cycles) {
    uint64_t x = 1;
    for (; cycles > 0; cycles -= 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            x += x;
            asm volatile("" : "+r"(x));  // keep each addition
        }
    }
}

extern "C" const char *kvant_isa(void) { return kernels() ? kernels()->name : nullptr; }

namespace {

constexpr const char *NO_KERNELS = "all: this processor does not support KVANT_ISA";

template <class Request>
const char *run(const Request *request, void (*Kernels::*kernel)(const Request &)) {
    if (!kernels()) return NO_KERNELS;
    const char *refusal = kvant::check(*request);
    if (!refusal && !kvant::is_empty(*request)) (kernels()->*kernel)(*request);
    return refusal;
}

}  // namespace

extern "C" const char *kvant_attend(const kvant_request *request) {
    return run(request, &Kernels::attend);
}

extern "C" const char *kvant_store(const kvant_store_request *request) {
    if (!kernels()) return NO_KERNELS;
    const char *refusal = kvant::check(*request);
    if (!refusal && !kvant::is_empty(*request)) kvant::store(*request, *kernels());
    return refusal;
}

extern "C" const char *kvant_rotate(const kvant_rotate_request *request) {
    return run(request, &Kernels::rotate);
}

extern "C" const char *kvant_norm(const kvant_norm_request *request) {
    return run(request, &Kernels::norm);
}

extern "C" const char *kvant_choose(const kvant_choose_request *request) {
    return run(request, &Kernels::choose);
}

extern "C" const char *kvant_multiply(const kvant_multiply_request *request) {
    return run(request, &Kernels::multiply);
}

extern "C" const char *kvant_map(const kvant_map_request *request) {
    return run(request, &Kernels::map);
}

namespace {

template <class Request>
const char *take(const kvant_step &step, const char *(*function)(const Request *)) {
    const int64_t nbytes = sizeof(Request);
    if (!step.request || (uintptr_t)step.request % 8 || step.request_nbytes < nbytes)
        return "request: less than the function takes";
    return function((const Request *)step.request);
}

const char *take(const kvant_step &step) {
    switch (step.function) {
        case KVANT_ATTEND: return take(step, kvant_attend);
        case KVANT_STORE: return take(step, kvant_store);
        case KVANT_ROTATE: return take(step, kvant_rotate);
        case KVANT_NORM: return take(step, kvant_norm);
        case KVANT_CHOOSE: return take(step, kvant_choose);
        case KVANT_MULTIPLY: return take(step, kvant_multiply);
        case KVANT_MAP: return take(step, kvant_map);
    }
    return "function: unknown";
}

}  // namespace

extern "C" const char *kvant_run(const kvant_run_request *request) {
    const char *refusal = kvant::check(*request);
    for (int64_t i = 0; !refusal && i < request->num_steps; i++) refusal = take(request->steps[i]);
    return refusal;
}
