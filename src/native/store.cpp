// Apply an append plan to a layer: copy open pages, then write new rows, then seal pages. A unit of
// work is one head of one side of a copy, a write or a seal.
#include "kernels.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "limits.hpp"
#include "team.hpp"

namespace kvant {
namespace {

// Units to prefetch ahead, and the bytes of a cache line.
constexpr int64_t AHEAD = 4, LINE = 64;

// Work per thread: hundreds of microseconds of sealing, tens of copying. For less, waking a thread
// costs more than it saves.
constexpr double PAGES_PER_THREAD = 32, BYTES_PER_THREAD = 1 << 19;

class Storing {
public:
    Storing(const kvant_store_request &r, const Kernels &kernels)
        : r(r), steps(*r.steps), kernels(kernels) {}

    void run() {
        double row = 0, rows = 0, coded = 0;  // floating point: cannot overflow
        for (int64_t i = 0; i < r.sides; i++) {
            const kvant_side &side = *r.side[i].stored;
            row += (double)bytes(side) * (double)r.heads;
            coded += side.format != KVANT_RAW;
        }
        for (int64_t i = 0; i < steps.num_writes; i++)
            rows += (double)steps.writes[WRITE_WIDTH * i + WRITE_ROWS];
        const double page = (double)r.page * row;
        each(&Storing::copy, steps.num_copies, (double)steps.num_copies * page / BYTES_PER_THREAD);
        each(&Storing::write, steps.num_writes, rows * row / BYTES_PER_THREAD);
        const double effort =
            coded ? coded * (double)r.heads / PAGES_PER_THREAD : page / BYTES_PER_THREAD;
        each(&Storing::seal, steps.num_seals, (double)steps.num_seals * effort);
    }

private:
    using Step = void (Storing::*)(const kvant_store_side &, int64_t, int64_t) const;

    const kvant_store_request &r;
    const kvant_steps &steps;
    const Kernels &kernels;
    Step step = nullptr;
    int64_t units = 0, chunk = 1;
    std::atomic<int64_t> next{0};

    // Run `todo` for each head and side of `count` items, on `helpers` more threads than this one.
    void each(Step todo, int64_t count, double helpers) {
        step = todo, units = count * r.sides * r.heads;
        next.store(0, std::memory_order_relaxed);
        if (units == 0) return;
        const int64_t max_threads = std::min(r.threads, units);
        const int threads = (int)std::min((double)max_threads, helpers + 1);
        chunk = threads < 2 ? units : std::max((int64_t)1, units / (8 * threads));
        in_parallel(threads, [](void *self) { ((Storing *)self)->work(); }, this);
    }

    // Take several units at once: the atomic counter waits for all earlier stores.
    void work() {
        for (int64_t first; (first = next.fetch_add(chunk)) < units;) {
            const int64_t stop = std::min(first + chunk, units);
            if (step == &Storing::write)
                for (int64_t i = first; i < std::min(first + AHEAD, stop); i++) prefetch(i);
            for (int64_t i = first; i < stop; i++) {
                if (step == &Storing::write && i + AHEAD < stop) prefetch(i + AHEAD);
                const int64_t item = i / r.heads;
                (this->*step)(r.side[item % r.sides], i % r.heads, item / r.sides);
            }
        }
    }

    // Prefetch the lines of a single row for writing: rows of single tokens are far apart.
    void prefetch(int64_t i) const {
        const int64_t item = i / r.heads;
        const kvant_side &stored = *r.side[item % r.sides].stored;
        const int64_t *write = steps.writes + WRITE_WIDTH * (item / r.sides);
        if (write[WRITE_ROWS] != 1) return;
        const char *row =
            open_page(stored, write[WRITE_SLOT], i % r.heads) + write[WRITE_ROW] * stored.open.row;
        for (int64_t at = 0; at < bytes(stored); at += LINE) __builtin_prefetch(row + at, 1);
    }

    static char *open_page(const kvant_side &side, int64_t slot, int64_t head) {
        return (char *)side.open.data + slot * side.open.slot + head * side.open.head;
    }

    static const char *new_row(const kvant_store_side &side, int64_t sequence, int64_t head,
                               int64_t column) {
        const kvant_rows &rows = side.rows;
        if (!rows.data) return nullptr;  // no rows, and columns are unchecked
        return (const char *)rows.data + sequence * rows.batch + head * rows.head + column * rows.row;
    }

    // Not memcpy: new rows may overlap the pages.
    static void move(char *to, int64_t to_row, const char *from, int64_t from_row, int64_t count,
                     int64_t bytes) {
        if (count == 0) return;  // the pointers may be null
        if (to_row == bytes && from_row == bytes) {
            std::memmove(to, from, (size_t)(count * bytes));
            return;
        }
        for (int64_t n = 0; n < count; n++)
            std::memmove(to + n * to_row, from + n * from_row, (size_t)bytes);
    }

    static int64_t bytes(const kvant_side &side) { return side.dim * size_of(side.dtype); }

    void copy(const kvant_store_side &side, int64_t head, int64_t i) const {
        const int64_t *slots = steps.copies + 2 * i;
        const kvant_side &stored = *side.stored;
        move(open_page(stored, slots[1], head), stored.open.row, open_page(stored, slots[0], head),
             stored.open.row, r.page, bytes(stored));
    }

    void write(const kvant_store_side &side, int64_t head, int64_t i) const {
        const int64_t *write = steps.writes + WRITE_WIDTH * i;
        const kvant_side &stored = *side.stored;
        move(open_page(stored, write[WRITE_SLOT], head) + write[WRITE_ROW] * stored.open.row,
             stored.open.row, new_row(side, write[WRITE_SEQUENCE], head, write[WRITE_COLUMN]),
             side.rows.row, write[WRITE_ROWS], bytes(stored));
    }

    void seal(const kvant_store_side &side, int64_t head, int64_t i) const {
        const int64_t *seal = steps.seals + SEAL_WIDTH * i;
        const kvant_side &stored = *side.stored;
        const bool open = seal[SEAL_SOURCE] >= 0;
        const char *rows = open ? open_page(stored, seal[SEAL_SOURCE], head)
                                : new_row(side, seal[SEAL_SEQUENCE], head, seal[SEAL_COLUMN]);
        const int64_t row = open ? stored.open.row : side.rows.row;
        const auto place = [&](const kvant_pages &field) {
            return (char *)field.data + seal[SEAL_SLOT] * field.slot + head * field.head;
        };
        if (stored.format == KVANT_RAW)
            return move(place(stored.codes), bytes(stored), rows, row, r.page, bytes(stored));
        kernels.seal_page(stored, {rows, row, r.page, (uint8_t *)place(stored.codes),
                                (uint16_t *)place(stored.scale),
                                stored.bias.data ? (uint16_t *)place(stored.bias) : nullptr});
    }
};

}  // namespace

void store(const kvant_store_request &request, const Kernels &kernels) {
    Storing(request, kernels).run();
}

}  // namespace kvant
