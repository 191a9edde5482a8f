// Run parallel work, on torch's OpenMP threads if possible. They spin for a while after each loop,
// so a second team would compete with them for the cores. Threads of the library wait without
// spinning, for the same reason.
#include "team.hpp"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "kvant.h"

namespace kvant {
namespace {

using Gomp = void (*)(void (*)(void *), void *, unsigned, unsigned);
std::atomic<Gomp> gomp{nullptr};

// Threads that live as long as the process. It runs one loop at a time: a second caller runs alone.
class Team {
public:
    void run(int threads, void (*fn)(void *), void *arg) {
        std::unique_lock<std::mutex> mine(busy, std::try_to_lock);
        if (threads < 2 || !mine.owns_lock()) return fn(arg);
        {
            std::lock_guard<std::mutex> lock(mutex);
            while ((int)helpers < threads - 1) std::thread(&Team::help, this, helpers++).detach();
            task = fn, argument = arg, wanted = left = threads - 1, round++;
        }
        wake.notify_all();
        fn(arg);
        std::unique_lock<std::mutex> lock(mutex);
        done.wait(lock, [this] { return left == 0; });
    }

private:
    std::mutex busy, mutex;
    std::condition_variable wake, done;
    void (*task)(void *) = nullptr;
    void *argument = nullptr;
    unsigned long round = 0;
    int helpers = 0, wanted = 0, left = 0;

    void help(int number) {
        unsigned long seen = 0;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return round != seen && left > 0; });
            seen = round;
            if (number >= wanted) continue;
            const auto fn = task;
            void *arg = argument;
            lock.unlock();
            fn(arg);
            lock.lock();
            if (--left == 0) done.notify_one();
        }
    }
};

Team &team() {
    static Team *const one = new Team;  // never destroyed: helpers may outlive main
    return *one;
}

}  // namespace

void in_parallel(int threads, void (*fn)(void *), void *arg) {
    if (threads < 2) return fn(arg);
    if (const Gomp run = gomp.load()) return run(fn, arg, (unsigned)threads, 0);
    team().run(threads, fn, arg);
}

}  // namespace kvant

extern "C" void kvant_share_team(void *gomp_parallel) {
    kvant::gomp = (kvant::Gomp)gomp_parallel;
}
