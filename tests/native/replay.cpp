// Runs recorded requests (recording.py) on a native library, and compares its outputs.
//
//     replay LIBRARY FILE    # KVANT_ISA selects the instruction set
//
// The exit status is 1 if an output is wrong, 2 if nothing can be run, 3 if the processor does not have
// the instruction set.
//
// Each block of memory has the alignment that it was recorded with, and ends at an inaccessible page
// or less than ALIGNMENT bytes before one.
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int64_t CHUNK = 4096, ALIGNMENT = 64, MAX_BLOCK = 1 << 26;
constexpr unsigned char CANARY = 0xA5;
constexpr int CANNOT_RUN = 2, NO_SUCH_ISA = 3;
constexpr int MAX_SHOWN = 20;  // failures
constexpr const char *FUNCTIONS[] = {"attend", "store",    "rotate", "norm",
                                     "choose", "multiply", "map"};
constexpr double ROW_FACTOR = 25;  // how much larger the error of a single row may be
enum Kind {
    SAME_BYTES, SAME_FLOAT32, SAME_BFLOAT16, SAME_FLOAT16, FLOAT32, BFLOAT16, FLOAT16, LOG_SUM_EXP
};

[[noreturn]] void stop(const std::string &reason) {
    std::fprintf(stderr, "replay: %s\n", reason.c_str());
    std::exit(CANNOT_RUN);
}

struct Pointer {
    int64_t block, offset, target, target_offset;
};

// Memory of a size, in chunks of the file.
struct Content {
    int64_t nbytes;
    const int64_t *chunks;
};

struct Block {
    Content content;
    int64_t phase;
    char *at;
};

struct Check {
    int64_t kind, block, row;
    double bound;  // of the error
    Content expected;
};

struct Request {
    int64_t function;
    std::string name;
    std::vector<Block> blocks;
    std::vector<Pointer> pointers;
    std::vector<Check> checks;
};

class File {
public:
    explicit File(const char *path) {
        const int file = open(path, O_RDONLY);
        struct stat status;
        if (file < 0 || fstat(file, &status)) stop(std::string(path) + " cannot be read");
        void *data = mmap(nullptr, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        if (data == MAP_FAILED || status.st_size < 24 || std::memcmp(data, "KVANTREC", 8))
            stop(std::string(path) + " is not a recording");
        at = (const int64_t *)data + 1;
        end = (const int64_t *)data + status.st_size / 8;
        num_chunks = next();
        sizes = skip(num_chunks);
        int64_t nbytes = 0;
        for (int64_t i = 0; i < num_chunks; i++) {
            if (sizes[i] < 0 || sizes[i] > CHUNK) stop("the recording has a chunk of a wrong size");
            offsets.push_back(nbytes);
            nbytes += sizes[i];
        }
        if (nbytes > status.st_size) stop("the recording is cut off");
        chunks = (const char *)data + status.st_size - nbytes;
    }

    int64_t next() { return *skip(1); }

    Request read_request() {
        Request request;
        request.function = next();
        if (request.function < 0 || request.function >= (int64_t)std::size(FUNCTIONS))
            stop("the recording names an unknown function");
        const int64_t length = next();
        request.name.assign((const char *)skip((length + 7) / 8), length);
        request.blocks.resize(next());
        for (Block &block : request.blocks) {
            const int64_t nbytes = next();
            block.phase = next();
            block.content = read_content(nbytes);
        }
        request.pointers.resize(next());
        for (Pointer &p : request.pointers) p = {next(), next(), next(), next()};
        request.checks.resize(next());
        for (Check &check : request.checks) {
            check.kind = next(), check.block = next();
            std::memcpy(&check.bound, skip(1), 8);
            check.row = next();
            check.expected = read_content(next());
        }
        return request;
    }

    void copy(const Content &content, char *to) const {
        for (int64_t first = 0; first < content.nbytes; first += CHUNK) {
            const int64_t chunk = content.chunks[first / CHUNK];
            std::memcpy(to + first, chunks + offsets[chunk], sizes[chunk]);
        }
    }

private:
    Content read_content(int64_t nbytes) {
        if (nbytes < 0 || nbytes > MAX_BLOCK) stop("the recording has a block of a wrong size");
        const int64_t count = (nbytes + CHUNK - 1) / CHUNK;
        const Content content = {nbytes, skip(count)};
        for (int64_t i = 0; i < count; i++) {
            const int64_t chunk = content.chunks[i];
            if (chunk < 0 || chunk >= num_chunks || sizes[chunk] != std::min(CHUNK, nbytes - i * CHUNK))
                stop("the recording lacks a chunk");
        }
        return content;
    }

    const int64_t *skip(int64_t words) {
        if (words < 0 || words > end - at) stop("the recording is cut off");
        return (at += words) - words;
    }

    const int64_t *at, *end, *sizes;
    std::vector<int64_t> offsets;
    const char *chunks;
    int64_t num_chunks;
};

// Blocks that end at an inaccessible page or less than ALIGNMENT bytes before one.
class Memory {
public:
    void place(Request &request, const File &file) {
        for (size_t i = 0; i < request.blocks.size(); i++) {
            if (i == ends.size()) ends.push_back(make_room());
            Block &block = request.blocks[i];
            block.at = ends[i] - block.content.nbytes;
            block.at -= ((int64_t)block.at - block.phase) % ALIGNMENT;
            std::memset(block.at - ALIGNMENT, CANARY, ALIGNMENT);
            std::memset(block.at + block.content.nbytes, CANARY,
                        ends[i] - block.at - block.content.nbytes);
            file.copy(block.content, block.at);
        }
        for (const Pointer &p : request.pointers) {
            const char *target = request.blocks.at(p.target).at + p.target_offset;
            std::memcpy(request.blocks.at(p.block).at + p.offset, &target, 8);
        }
    }

    // Whether what lies before a block and after it is unchanged.
    bool is_intact(const Request &request, size_t i) const {
        const Block &block = request.blocks[i];
        const auto same = [](char c) { return (unsigned char)c == CANARY; };
        return std::all_of(block.at - ALIGNMENT, block.at, same) &&
               std::all_of(block.at + block.content.nbytes, ends[i], same);
    }

private:
    static char *make_room() {
        const int64_t page = sysconf(_SC_PAGESIZE), room = MAX_BLOCK + page;
        void *begin = mmap(nullptr, room + page, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (begin == MAP_FAILED || mprotect((char *)begin + room, page, PROT_NONE))
            stop("no memory");
        return (char *)begin + room;
    }

    std::vector<char *> ends;
};

float from_float16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1024.f + fraction, exponent - 25)
                                      : std::ldexp((float)fraction, -24);
    return bits >> 15 ? -size : size;
}

int64_t get_size(int64_t kind) {
    switch (kind) {
        case SAME_BYTES: return 1;
        case BFLOAT16: case FLOAT16: case SAME_BFLOAT16: case SAME_FLOAT16: return 2;
    }
    return 4;
}

double get_value(int64_t kind, const char *at) {
    uint32_t bits = 0;
    std::memcpy(&bits, at, get_size(kind));
    if (kind == FLOAT16 || kind == SAME_FLOAT16) return from_float16(bits);
    if (kind == BFLOAT16 || kind == SAME_BFLOAT16) bits <<= 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The number of values that differ, and the first of them. NaN of any bits are the same.
std::pair<int64_t, int64_t> count_differences(int64_t kind, const std::vector<char> &expected,
                                              const char *data) {
    const int64_t size = get_size(kind), nbytes = expected.size();
    int64_t count = 0, first = -1;
    if (!std::memcmp(expected.data(), data, nbytes)) return {count, first};
    for (int64_t i = 0; i < nbytes; i += size) {
        if (!std::memcmp(&expected[i], data + i, size)) continue;
        if (kind != SAME_BYTES && std::isnan(get_value(kind, &expected[i])) &&
            std::isnan(get_value(kind, data + i)))
            continue;
        if (!count++) first = i / size;
    }
    return {count, first};
}

// The error of an output relative to its norm, or what ROW_FACTOR leaves of that of a row. Of a
// log-sum-exp, the largest relative to itself or to one. Infinite where one value is finite and the
// other is not.
double compute_error(const Check &check, const char *data, const double *expected) {
    const int64_t count = check.expected.nbytes / 8, size = get_size(check.kind);
    const bool is_sum = check.kind == LOG_SUM_EXP;
    double worst = 0, all_errors = 0, all_norms = 0;
    const auto relate = [&](double error, double norm) {
        if (is_sum) norm = std::max(norm, 1.0);
        return std::sqrt(norm > 0 ? error / norm : error);
    };
    for (int64_t first = 0; first < count; first += check.row) {
        double error = 0, norm = 0;
        for (int64_t i = first; i < first + check.row; i++) {
            const double value = get_value(check.kind, data + i * size), right = expected[i];
            if (std::isfinite(value) != std::isfinite(right)) return INFINITY;
            if (!std::isfinite(right)) continue;
            error += (value - right) * (value - right);
            norm += right * right;
        }
        all_errors += error;
        all_norms += norm;
        worst = std::max(worst, relate(error, norm) / (is_sum ? 1 : ROW_FACTOR));
    }
    return is_sum ? worst : std::max(worst, relate(all_errors, all_norms));
}

struct Totals {
    int64_t requests = 0, passed = 0;
    double error = 0, bound = 1;  // of the largest share
};

class Replay {
public:
    Replay(const char *library, const char *path) : file(path) {
        void *handle = dlopen(library, RTLD_NOW);
        if (!handle) stop(dlerror());
        const auto isa = (const char *(*)())find(handle, "isa");
        if (!isa()) std::exit(NO_SUCH_ISA);
        std::printf("%s\n", isa());
        for (size_t i = 0; i < std::size(FUNCTIONS); i++)
            functions[i] = (Function)find(handle, FUNCTIONS[i]);
    }

    bool run() {
        const int64_t count = file.next();
        for (int64_t i = 0; i < count; i++) {
            Request request = file.read_request();
            std::snprintf(current, sizeof current, "request %ld, %s, %s", (long)i,
                          FUNCTIONS[request.function], request.name.c_str());
            Totals &total = totals[request.function];
            total.requests++;
            total.passed += run(request, total);
        }
        bool passed = count > 0;
        for (size_t i = 0; i < std::size(FUNCTIONS); i++) passed &= print(FUNCTIONS[i], totals[i]);
        return passed;
    }

    static void report_signal(int signal) {
        const auto print = [](const char *text) { (void)!write(2, text, std::strlen(text)); };
        print("replay: a signal ended ");
        print(current);
        print("\n");
        _exit(128 + signal);
    }

private:
    using Function = const char *(*)(const void *);

    static void *find(void *handle, const char *name) {
        void *symbol = dlsym(handle, (std::string("kvant_") + name).c_str());
        if (!symbol) stop(dlerror());
        return symbol;
    }

    bool run(Request &request, Totals &total) {
        memory.place(request, file);
        if (const char *refusal = functions[request.function](request.blocks.at(0).at))
            return fail(std::string("refused: ") + refusal);
        std::vector<bool> may_change(request.blocks.size());
        bool passed = true;
        for (const Check &check : request.checks) {
            may_change.at(check.block) = true;
            passed &= compare(check, request.blocks[check.block].at, total);
        }
        for (size_t i = 0; i < request.blocks.size(); i++) {
            if (!memory.is_intact(request, i))
                passed = fail("memory beside block " + std::to_string(i) + " is overwritten");
            // Block 0 and others with addresses are compared except for those.
            if (may_change[i]) continue;
            expected.resize(request.blocks[i].content.nbytes);
            file.copy(request.blocks[i].content, expected.data());
            for (const Pointer &p : request.pointers)
                if (p.block == (int64_t)i)
                    std::memcpy(&expected[p.offset], request.blocks[i].at + p.offset, 8);
            if (std::memcmp(expected.data(), request.blocks[i].at, expected.size()))
                passed = fail("input block " + std::to_string(i) + " is overwritten");
        }
        return passed;
    }

    bool compare(const Check &check, const char *data, Totals &total) {
        expected.resize(check.expected.nbytes);
        file.copy(check.expected, expected.data());
        if (check.kind <= SAME_FLOAT16) {
            const auto [count, first] = count_differences(check.kind, expected, data);
            return !count || fail(std::to_string(count) + " values of block " +
                                  std::to_string(check.block) + " differ, the first is number " +
                                  std::to_string(first));
        }
        const double error = compute_error(check, data, (const double *)expected.data());
        if (error * total.bound >= total.error * check.bound)
            total.error = error, total.bound = check.bound;
        if (error <= check.bound) return true;
        char text[99];
        std::snprintf(text, sizeof text, "%s with an error of %.1e: more than %.1e",
                      check.kind == LOG_SUM_EXP ? "log-sum-exp" : "output", error, check.bound);
        return fail(text);
    }

    bool fail(const std::string &reason) {
        if (failures++ < MAX_SHOWN)
            std::fprintf(stderr, "%s: %s\n", current, reason.c_str());
        return false;
    }

    static bool print(const char *name, const Totals &total) {
        if (!total.requests) return true;
        std::printf("%-9s %5ld of %5ld requests passed", name, (long)total.passed,
                    (long)total.requests);
        if (total.error > 0)
            std::printf(", worst error %.1e of at most %.1e", total.error, total.bound);
        std::printf("\n");
        return total.passed == total.requests;
    }

    File file;
    Memory memory;
    Function functions[std::size(FUNCTIONS)];
    Totals totals[std::size(FUNCTIONS)];
    std::vector<char> expected;
    int failures = 0;
    static inline char current[4096];
};

}  // namespace

int main(int argc, char **argv) {
    if (argc != 3) stop("usage: replay LIBRARY FILE");
    for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) signal(number, Replay::report_signal);
    return Replay(argv[1], argv[2]).run() ? 0 : 1;
}
