// What a layer does to its rows in a forward: copies of open pages, rows written to them, pages
// sealed; each once the one before is done. One unit of work is what one head of a side has of one.
#include "store.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "limits.hpp"
#include "team.hpp"

namespace kvant {
namespace {

// Units whose memory is on its way while others are written, and the bytes that come together.
constexpr int64_t AHEAD = 4, LINE = 64;

// What is not worth to wake another thread for: some hundreds of microseconds, and some tens.
constexpr double FEW_PAGES = 32, FEW_BYTES = 1 << 19;

class Storing {
public:
    Storing(const kvant_store_request &r, const Kernels &kernels)
        : r(r), steps(*r.steps), kernels(kernels) {}

    void run() {
        double row = 0, rows = 0, coded = 0;  // none of them overflows
        for (int64_t i = 0; i < r.sides; i++) {
            const kvant_side &side = *r.side[i].stored;
            row += (double)(bytes(side) * r.heads);
            coded += side.format != KVANT_RAW;
        }
        for (int64_t i = 0; i < steps.num_writes; i++) rows += (double)steps.writes[5 * i + 3];
        const double page = (double)r.page * row;
        each(&Storing::copy, steps.num_copies, (double)steps.num_copies * page / FEW_BYTES);
        each(&Storing::write, steps.num_writes, rows * row / FEW_BYTES);
        const double effort = coded ? coded * (double)r.heads / FEW_PAGES : page / FEW_BYTES;
        each(&Storing::seal, steps.num_seals, (double)steps.num_seals * effort);
    }

private:
    using Step = void (Storing::*)(const kvant_store_side &, int64_t, int64_t) const;

    const kvant_store_request &r;
    const kvant_steps &steps;
    const Kernels &kernels;
    Step step = nullptr;
    int64_t units = 0, together = 1;
    std::atomic<int64_t> next{0};

    // A step for each head of each side of so many; on that many more threads than this one.
    void each(Step todo, int64_t count, double helpers) {
        step = todo, units = count * r.sides * r.heads;
        next.store(0, std::memory_order_relaxed);
        if (units == 0) return;
        const int64_t most = std::min(r.threads, units);
        const int threads = (int)std::min((double)most, helpers + 1);
        together = threads < 2 ? units : std::max((int64_t)1, units / (8 * threads));
        in_parallel(threads, [](void *self) { ((Storing *)self)->work(); }, this);
    }

    // Several units at once: who counts waits for all that was written before.
    void work() {
        for (int64_t first; (first = next.fetch_add(together)) < units;) {
            const int64_t stop = std::min(first + together, units);
            if (step == &Storing::write)
                for (int64_t i = first; i < std::min(first + AHEAD, stop); i++) expect(i);
            for (int64_t i = first; i < stop; i++) {
                if (step == &Storing::write && i + AHEAD < stop) expect(i + AHEAD);
                const int64_t which = i / r.heads;
                (this->*step)(r.side[which % r.sides], i % r.heads, which / r.sides);
            }
        }
    }

    // Rows of single tokens lie far apart: let their lines be on their way.
    void expect(int64_t i) const {
        const int64_t which = i / r.heads;
        const kvant_side &own = *r.side[which % r.sides].stored;
        const int64_t *to = steps.writes + 5 * (which / r.sides);
        if (to[3] != 1) return;
        const char *row = open_page(own, to[1], i % r.heads) + to[2] * own.open.row;
        for (int64_t at = 0; at < bytes(own); at += LINE) __builtin_prefetch(row + at, 1);
    }

    static char *open_page(const kvant_side &side, int64_t slot, int64_t head) {
        return (char *)side.open.data + slot * side.open.slot + head * side.open.head;
    }

    static const char *came(const kvant_store_side &side, int64_t sequence, int64_t head, int64_t column) {
        const kvant_rows &rows = side.rows;
        return (const char *)rows.data + sequence * rows.batch + head * rows.head + column * rows.row;
    }

    // Not memcpy: rows may be some of those that the pages hold.
    static void move(char *to, int64_t to_row, const char *from, int64_t from_row, int64_t count,
                     int64_t bytes) {
        if (count == 0) return;  // then there may be no memory at all
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
        const kvant_side &own = *side.stored;
        move(open_page(own, slots[1], head), own.open.row, open_page(own, slots[0], head),
             own.open.row, r.page, bytes(own));
    }

    void write(const kvant_store_side &side, int64_t head, int64_t i) const {
        const int64_t *to = steps.writes + 5 * i;  // sequence, slot, row, rows, column
        const kvant_side &own = *side.stored;
        move(open_page(own, to[1], head) + to[2] * own.open.row, own.open.row,
             came(side, to[0], head, to[4]), side.rows.row, to[3], bytes(own));
    }

    void seal(const kvant_store_side &side, int64_t head, int64_t i) const {
        const int64_t *to = steps.seals + 4 * i;  // sequence, slot, open slot, column
        const kvant_side &own = *side.stored;
        const bool open = to[2] >= 0;
        const char *rows = open ? open_page(own, to[2], head) : came(side, to[0], head, to[3]);
        const int64_t row = open ? own.open.row : side.rows.row;
        const auto place = [&](const kvant_pages &field) {
            return (char *)field.data + to[1] * field.slot + head * field.head;
        };
        if (own.format == KVANT_RAW)
            return move(place(own.codes), bytes(own), rows, row, r.page, bytes(own));
        kernels.seal_page(own, {rows, row, r.page, (uint8_t *)place(own.codes),
                                (uint16_t *)place(own.scale),
                                own.bias.data ? (uint16_t *)place(own.bias) : nullptr});
    }
};

}  // namespace

void store(const kvant_store_request &request, const Kernels &kernels) {
    Storing(request, kernels).run();
}

}  // namespace kvant
