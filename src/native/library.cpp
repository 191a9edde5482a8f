// The entry points, which check their requests, and the choice of the instruction set.
#include <cstdlib>
#include <cstring>

#if KVANT_HAS_amx
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "checks.hpp"
#include "kernels.hpp"
#include "store.hpp"

namespace {

using kvant::Kernels;

#if KVANT_HAS_amx
// Whether the processor has tiles of 16-bit floats, and the system permits this process to use them.
bool has_tiles() {
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & BF16) || !(d & TILE)) return false;
    constexpr long PERMIT = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, PERMIT, TILE_DATA) == 0;
}
#endif

const Kernels *best() {
    const char *forced = std::getenv("KVANT_ISA");
    const auto fits = [&](const char *name) {
        return !forced || !*forced || !std::strcmp(forced, name);
    };
#if KVANT_HAS_avx512
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#if KVANT_HAS_amx
    static const Kernels tiles = {"amx", kvant::amx::attend, kvant::avx512::KERNELS.seal_page,
                                  kvant::avx512::KERNELS.rotate, kvant::avx512::KERNELS.norm,
                                  kvant::avx512::KERNELS.choose, kvant::avx512::KERNELS.multiply,
                                  kvant::avx512::KERNELS.map};
    if (wide && fits("amx") && has_tiles()) return &tiles;
#endif
    if (wide && fits("avx512")) return &kvant::avx512::KERNELS;
#endif
#if KVANT_HAS_avx2
    // Every processor with AVX2 and FMA also converts 16-bit floats (F16C).
    const bool middle = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (middle && fits("avx2")) return &kvant::avx2::KERNELS;
#endif
    return fits("plain") ? &kvant::plain::KERNELS : nullptr;
}

const Kernels *kernels() {
    static const Kernels *const selected = best();
    return selected;
}

}  // namespace

extern "C" int kvant_abi(void) { return KVANT_ABI; }

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
