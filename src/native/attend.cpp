// Attention over pages, compiled once for each instruction set (KVANT_TARGET, KVANT_LEVEL).
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "decode.hpp"
#include "kernels.hpp"
#include "prompt.hpp"
#include "team.hpp"

namespace kvant::KVANT_TARGET {
namespace {

// The queries at one position of a sequence: they read `blocks`, split into `parts`.
struct Unit {
    int64_t sequence, query, blocks, parts, first;  // first: its first task; a part is a task
};

class Attend {
public:
    // Queries [first, first + count).
    Attend(const kvant_request &r, int64_t first, int64_t count)
        : r(r), keys(*r.keys), values(*r.values), units(r.extent->batch * count),
          left(new std::atomic<int64_t>[units.size()]) {
        width = r.values->dim + 2;
        for (int64_t i = 0; i < count; i++) divide(first + i, i, count);
        for (size_t i = 0; i < units.size(); i++) {
            units[i].first = tasks, tasks += units[i].parts;
            left[i].store(units[i].parts, std::memory_order_relaxed);
        }
        partial.reset(new float[tasks * r.heads * r.group * width]);
    }

    void run() {
        const int64_t threads = busy * r.heads < 2 * MIN_BLOCKS ? 1 : std::min(r.threads, tasks);
        in_parallel((int)threads, [](void *self) { ((Attend *)self)->work(); }, this);
    }

private:
    static constexpr int64_t MIN_BLOCKS = 8;  // of one head: 512 rows, some microseconds

    const kvant_request &r;
    SideTables keys, values;
    std::vector<Unit> units;  // by sequence, then by query
    std::unique_ptr<std::atomic<int64_t>[]> left;  // by unit: parts still to be computed
    int64_t busy = 0, tasks = 0, width;  // busy: total number of blocks
    std::atomic<int64_t> next{0};
    std::unique_ptr<float[]> partial;  // [task][head][group]: largest score, sum of weights, values

    // Split the sequences into parts of about equal size: enough that no thread idles for long, few
    // enough that merging is cheap. The split does not depend on the number of queries, so a query
    // has the same result with and without others.
    void divide(int64_t query, int64_t i, int64_t count) {
        int64_t all = 0;
        for (int64_t b = 0; b < r.extent->batch; b++) {
            const int64_t blocks = Walk(r, b, query).total;
            units[b * count + i] = {b, query, blocks, 1, 0};
            all += blocks;
        }
        busy += all;
        const int64_t wanted = r.threads > 1 ? 4 * r.threads : 1;
        for (int64_t b = 0; b < r.extent->batch; b++) {
            Unit &unit = units[b * count + i];
            // A part has at least MIN_BLOCKS, over all heads.
            const int64_t max_parts = std::min(unit.blocks, unit.blocks * r.heads / MIN_BLOCKS);
            const int64_t share = all ? (wanted * unit.blocks + all - 1) / all : 1;
            unit.parts = std::max<int64_t>(1, std::min(share, max_parts));
        }
    }

    float *part(int64_t task, int64_t head, int64_t g) const {
        return partial.get() + ((task * r.heads + head) * r.group + g) * width;
    }

    void work() {
        const std::unique_ptr<Head[]> heads(new Head[r.heads]);
        alignas(64) Scratch scratch;
        for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
            const auto after = std::upper_bound(units.begin(), units.end(), i,
                                                [](int64_t i, const Unit &u) { return i < u.first; });
            const Unit &unit = *(after - 1);
            const int64_t part = i - unit.first;
            const Walk blocks(r, unit.sequence, unit.query);
            Decode(r, keys, values, scratch, heads.get(), unit.sequence)
                .run(blocks, unit.query, unit.blocks * part / unit.parts,
                     unit.blocks * (part + 1) / unit.parts);
            for (int64_t h = 0; h < r.heads; h++)
                for (int g = 0; g < r.group; g++) save(heads[h], g, this->part(i, h, g));
            // The last thread to finish merges the parts into `out` and `lse`.
            if (left[&unit - units.data()].fetch_sub(1) > 1) continue;
            for (int64_t h = 0; h < r.heads; h++)
                for (int g = 0; g < r.group; g++) merge(unit, h, g);
        }
    }

    void save(const Head &head, int g, float *to) const {
        to[0] = head.top[g], to[1] = sum(load(head.totals[g]));
        std::memcpy(to + 2, head.sums.acc[g], r.values->dim * sizeof(float));
    }

    void merge(const Unit &u, int64_t key_head, int g) const {
        const int64_t head = key_head * r.group + g, dim = r.values->dim;
        const int64_t row = (u.sequence * r.heads * r.group + head) * r.queries + u.query;
        float out[MAX_DIM] = {};
        float top = r.sink_logits ? r.sink_logits[head] : NOTHING;
        // Not std::max, which would drop a NaN.
        for (int64_t p = 0; p < u.parts; p++) {
            const float other = part(u.first + p, key_head, g)[0];
            top = other <= top ? top : other;
        }
        const float finite = top == NOTHING ? 0.0f : top;
        float total = r.sink_logits ? std::exp(r.sink_logits[head] - finite) : 0.0f;
        for (int64_t p = 0; p < u.parts; p++) {
            const float *from = part(u.first + p, key_head, g);
            if (from[0] == NOTHING && from[1] == 0.0f) continue;  // a NaN shows in the weight sum
            const float fade = std::exp(from[0] - finite);
            total += from[1] * fade;
            for (int64_t d = 0; d < dim; d++) out[d] += from[2 + d] * fade;
        }
        const float by = total == 0.0f ? 0.0f : 1.0f / total;
        for (int64_t d = 0; d < dim; d++) out[d] *= by;
        write_out(r, row, out);
        if (r.lse) r.lse[row] = top + std::log(total);
    }
};

// Up to this many positions pass over all rows separately, so verified drafts get the same bits as
// single tokens; decoding the rows once for so few would save little. Positions that select pages
// always do, this many at a time, since they read different pages.
constexpr int64_t MAX_SEPARATE_QUERIES = 16;

}  // namespace

void attend(const kvant_request &request) {
    if (request.queries <= MAX_SEPARATE_QUERIES || request.chosen) {
        for (int64_t first = 0; first < request.queries; first += MAX_SEPARATE_QUERIES)
            Attend(request, first, std::min(MAX_SEPARATE_QUERIES, request.queries - first)).run();
        return;
    }
#if KVANT_BFLOAT_DOT
    if (in_pairs(request)) return AttendMany<uint32_t>(request).run();
#endif
    AttendMany<float>(request).run();
}

}  // namespace kvant::KVANT_TARGET
