// Attention of one query position: all query heads of a key head in one pass over its rows.
//
// What must move is every stored byte once; so the work is split over (sequence, key head, range of
// blocks), and each block is fetched while the one before it is computed. Parts of one head are
// merged by their log-sum-exp.
//
// For a row of 128 channels and 4 queries, in vector instructions: raw bf16 16 products + 11 to sum
// lanes for the key, 32 products + 4 shuffles for the value (of two rows: half); codes of 4 bits
// 7 to unpack + 16 products each way; codes of 8 bits 2 loads + 16 products each way; 4 for the
// softmax. At two a cycle all of it stays below the time that 256, 80 and 136 bytes a side take
// from memory.
#pragma once

#include <vector>

#include "softmax.hpp"
#include "walk.hpp"

namespace kvant::KVANT_TARGET {

// What one thread needs, on its stack.
struct Scratch {
    Query query;
    float top[MAX_GROUP];
    alignas(64) float totals[MAX_GROUP][16];  // of weights, a sum a lane
    Sums sums;
    Weights weights;
    alignas(64) float scores[MAX_GROUP * PITCH];
};

class Decode {
public:
    Decode(const kvant_request &r, const SideTables &keys, const SideTables &values, Scratch &s)
        : r(r), keys(keys), values(values), s(s) {}

    // Blocks [first, stop) of a walk; the result is in the scratch.
    void run(const Walk &walk, int64_t sequence, int64_t head, int64_t query, int64_t first,
             int64_t stop) {
        const int group = (int)r.group;
        s.query.take(r, sequence, head, query);
        for (int g = 0; g < group; g++) s.top[g] = NOTHING, store(s.totals[g], zero());
        s.sums.clear(group, r.values);
        if (first >= stop) return;
        Span now = walk.at(first);
        for (int64_t i = first; i < stop; i++) {
            const Span next = i + 1 < stop ? walk.at(i + 1) : now;
            block(now, next, sequence, head);
            now = next;
        }
        for (int g = 0; g < group; g++) s.sums.finish(g, r.values.group);
    }

private:
    const kvant_request &r;
    const SideTables &keys, &values;
    Scratch &s;

    RowBlock rows(const kvant_side &side, const Span &now, const Span &next, int64_t b, int64_t h) {
        RowBlock block = row_block(side, now, b, h);
        block.ahead = ahead(side, now, next, b, h);
        return block;
    }

    SealedBlock coded(const kvant_side &side, const Span &now, const Span &next, int64_t b,
                      int64_t h) {
        SealedBlock block = sealed_block(side, now, h);
        block.ahead = ahead(side, now, next, b, h);
        if (is_coded(side, next))
            block.scale_ahead =
                (const char *)sealed_block(side, next, h).scale - (const char *)block.scale;
        return block;
    }

    // The bytes of the next block, which is this one where there is none.
    Ahead ahead(const kvant_side &side, const Span &now, const Span &next, int64_t b, int64_t h) {
        if (next.begin == now.begin && next.part == now.part) return {};
        if (is_coded(side, next)) {
            const SealedBlock block = sealed_block(side, next, h);
            return {(const char *)block.codes, (const char *)block.codes + BLOCK * block.width};
        }
        const RowBlock block = row_block(side, next, b, h);
        return {block.data, block.data + block.count * block.stride};
    }

    void block(const Span &now, const Span &next, int64_t b, int64_t h) {
        const int group = s.query.group;
        const int lead = now.part == Part::sealed ? now.first : 0;
        const int stop = now.part == Part::sealed ? now.stop : now.stop - now.first;
        if (is_coded(r.keys, now))
            sealed_scores(coded(r.keys, now, next, b, h), (int)r.keys.bits, keys, s.query, s.scores);
        else
            dense_scores(rows(r.keys, now, next, b, h), r.keys.dtype, s.query, s.scores + lead);
        const bool dense = !is_coded(r.values, now);
        const bool halves = dense && r.values.dtype == KVANT_BF16 && KVANT_BFLOAT_DOT;
        for (int g = 0; g < group; g++) {
            float *at = s.scores + g * PITCH;
            cap(at, (float)r.scale, (float)r.softcap);
            for (int i = 0; i < lead; i++) at[i] = NOTHING;
            for (int i = stop; i < BLOCK; i++) at[i] = NOTHING;
            soften(s.top[g], s.totals[g], at, halves ? s.weights.rows[g] : nullptr,
                   [&](float by) { s.sums.fade(g, by); });
        }
        if (dense) {
            const RowBlock block = rows(r.values, now, next, b, h);
            dense_values(block, r.values.dtype, group, s.scores, s.weights, lead, s.sums);
            return;
        }
        const SealedBlock block = coded(r.values, now, next, b, h);
        const int bits = (int)r.values.bits;
        make_weights(block, bits, values.list.middle, s.scores, group, lead || stop < BLOCK,
                     s.weights, s.sums);
        sealed_values(block, bits, values, group, s.weights, s.sums);
    }
};

}  // namespace kvant::KVANT_TARGET
