// Attention over a view, compiled once for each instruction set (KVANT_TARGET, KVANT_LEVEL).
#include <atomic>
#include <memory>

#include "chunk.hpp"
#include "decode.hpp"
#include "kernels.hpp"
#include "rotate.hpp"
#include "seal.hpp"
#include "team.hpp"

namespace kvant::KVANT_TARGET {
namespace {

// The queries at one position of a sequence; `parts` of it are computed apart.
struct Unit {
    int64_t sequence, query;
};

class Attend {
public:
    explicit Attend(const kvant_request &r) : r(r), keys(r.keys), values(r.values) {
        // Enough parts that no thread idles for long; few enough that merging costs nothing. They
        // do not depend on how many queries there are, so that none changes another's result.
        wanted = r.threads > 1 ? (4 * r.threads + r.batch - 1) / r.batch : 1;
        for (int64_t i = 0; i < r.batch * r.queries; i++) most = std::max(most, walk(unit(i)).total);
        parts = parts_of(most);
        tasks = r.batch * r.queries * parts;
        width = r.values.dim + 2;
        partial.reset(new float[tasks * r.heads * r.group * width]);
    }

    void run() {
        const int64_t busy = most * r.heads * tasks / parts;
        const int64_t threads = busy < 2 * MIN_BLOCKS ? 1 : std::min(r.threads, tasks);
        in_parallel((int)threads, [](void *self) { ((Attend *)self)->work(); }, this);
    }

private:
    static constexpr int64_t MIN_BLOCKS = 8;  // of a head, 512 rows: some microseconds

    const kvant_request &r;
    SideTables keys, values;
    int64_t most = 0;  // blocks that a unit goes through
    int64_t wanted, parts, tasks, width;  // parts: the most that a unit has
    std::atomic<int64_t> next{0};
    std::unique_ptr<float[]> partial;  // [task][head][group]: largest score, sum of weights, values

    int64_t parts_of(int64_t blocks) const {
        // A part is worth it from MIN_BLOCKS on, over all heads.
        const int64_t worth = std::min(blocks, blocks * r.heads / MIN_BLOCKS);
        return std::max<int64_t>(1, std::min(wanted, worth));
    }

    Unit unit(int64_t index) const { return {index / r.queries, index % r.queries}; }

    Walk walk(const Unit &u) const { return Walk(r, u.sequence, u.query, u.query + 1); }

    float *part(int64_t task, int64_t head, int64_t g) const {
        return partial.get() + ((task * r.heads + head) * r.group + g) * width;
    }

    void work() {
        const std::unique_ptr<Head[]> heads(new Head[r.heads]);
        alignas(64) Scratch scratch;
        for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
            const Unit u = unit(i / parts);
            const Walk blocks = walk(u);
            const int64_t own = parts_of(blocks.total), first = std::min(i % parts, own);
            Decode(r, keys, values, scratch, heads.get(), u.sequence)
                .run(blocks, u.query, blocks.total * first / own,
                     blocks.total * std::min(first + 1, own) / own);
            for (int64_t h = 0; h < r.heads; h++)
                for (int g = 0; g < r.group; g++) keep(heads[h], g, part(i, h, g));
        }
    }

    void keep(const Head &head, int g, float *to) const {
        to[0] = head.top[g], to[1] = sum(load(head.totals[g]));
        std::memcpy(to + 2, head.sums.acc[g], r.values.dim * sizeof(float));
    }

public:
    // The parts of every query as one: what stands in `out` and `lse`.
    void merge() const {
        for (int64_t i = 0; i < tasks / parts; i++)
            for (int64_t h = 0; h < r.heads; h++)
                for (int g = 0; g < r.group; g++) merge(unit(i), i, h, g);
    }

private:
    void merge(const Unit &u, int64_t index, int64_t key_head, int g) const {
        const int64_t head = key_head * r.group + g, dim = r.values.dim;
        const int64_t row = (u.sequence * r.heads * r.group + head) * r.queries + u.query;
        float out[MAX_DIM] = {};
        float top = r.sink_logits ? r.sink_logits[head] : NOTHING;
        // Not std::max: a NaN must come through.
        for (int64_t p = 0; p < parts; p++) {
            const float other = part(index * parts + p, key_head, g)[0];
            top = other <= top ? top : other;
        }
        const float finite = top == NOTHING ? 0.0f : top;
        float total = r.sink_logits ? std::exp(r.sink_logits[head] - finite) : 0.0f;
        for (int64_t p = 0; p < parts; p++) {
            const float *from = part(index * parts + p, key_head, g);
            if (from[0] == NOTHING && from[1] == 0.0f) continue;  // a NaN is in the sum alone
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

// Many positions: each unit is up to MANY queries of one head.
class AttendMany {
public:
    explicit AttendMany(const kvant_request &r) : r(r), keys(r.keys), values(r.values) {
        step = Chunk::positions(r);
        pieces = (r.queries + step - 1) / step;
        units = r.batch * r.heads * pieces;
    }

    void run() {
        const int64_t threads = std::min(r.threads, units);
        in_parallel((int)threads, [](void *self) { ((AttendMany *)self)->work(); }, this);
    }

private:
    const kvant_request &r;
    SideTables keys, values;
    int64_t step, pieces, units;
    std::atomic<int64_t> next{0};

    void work() {
        const std::unique_ptr<ChunkScratch> scratch(new ChunkScratch);
        Chunk chunk(r, keys, values, *scratch);
        for (int64_t i; (i = next.fetch_add(1)) < units;) {
            const int64_t pair = i / pieces, first = i % pieces * step;
            chunk.run(pair / r.heads, pair % r.heads, first, std::min(first + step, r.queries));
        }
    }
};

// Positions that each pass over all rows alone: so drafts that are verified together get, to the bit,
// what they would get one by one. For so few, opening the rows once would save next to nothing.
constexpr int64_t FEW = 16;

void attend(const kvant_request &request) {
    if (request.queries > FEW) return AttendMany(request).run();
    Attend attend(request);
    attend.run();
    attend.merge();
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS = {KVANT_NAME, attend, seal, rotate};

}  // namespace kvant::KVANT_TARGET
