// Attention of many positions, distributed over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "chunk.hpp"
#include "team.hpp"

namespace kvant::KVANT_TARGET {

// A unit is up to MANY queries of one head. Units of long sequences start first, so that none of
// them runs alone at the end.
template <class Number> class AttendMany {
public:
    explicit AttendMany(const kvant_request &r)
        : r(r), keys(*r.keys), values(*r.values), order(r.extent->batch) {
        step = Chunk<Number>::positions(r);
        pieces = (r.queries + step - 1) / step;
        units = r.extent->batch * r.heads * pieces;
        for (int64_t b = 0; b < r.extent->batch; b++) order[b] = b;
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
            return Reads(r, a).end > Reads(r, b).end;
        });
    }

    void run() {
        const int64_t threads = std::min(r.threads, units);
        in_parallel((int)threads, [](void *self) { ((AttendMany *)self)->work(); }, this);
    }

private:
    const kvant_request &r;
    SideTables keys, values;
    std::vector<int64_t> order;
    int64_t step, pieces, units;
    std::atomic<int64_t> next{0};

    void work() {
        const std::unique_ptr<ChunkScratch<Number>> scratch(new ChunkScratch<Number>);
        Chunk<Number> chunk(r, keys, values, *scratch);
        for (int64_t i; (i = next.fetch_add(1)) < units;) {
            const int64_t pair = i / pieces, first = i % pieces * step;
            chunk.run(order[pair / r.heads], pair % r.heads, first,
                      std::min(first + step, r.queries));
        }
    }
};

}  // namespace kvant::KVANT_TARGET
