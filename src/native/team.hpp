// Parallel work on OpenMP threads of the process, or on threads of the library.
#pragma once

namespace kvant {

// Call fn(arg) on `threads` threads, including this one; return when all are done.
void in_parallel(int threads, void (*fn)(void *), void *arg);

}  // namespace kvant
