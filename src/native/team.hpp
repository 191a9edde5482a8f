// Threads: those of the host's OpenMP where it has some, else a team of our own.
#pragma once

namespace kvant {

// fn(arg) on `threads` threads, this one among them; returns when all are done.
void in_parallel(int threads, void (*fn)(void *), void *arg);

}  // namespace kvant
