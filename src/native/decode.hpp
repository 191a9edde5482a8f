// Attention of one query position: all key heads, each with all of its query heads, in one pass.
//
// Every stored byte is read once, in memory order: page by page, head by head, with the next block
// prefetched. Work is split by (sequence, position, range of blocks); attend.cpp merges the ranges
// by their log-sum-exp.
//
// With AVX-512, vector instructions for a row of 128 channels and 4 queries, plus 4 for the softmax:
//
//   format     bytes per side    key                         value
//   raw bf16   256               16 products + 11 sums       32 products + 4 shuffles, per 2 rows
//   4 bits     80                7 to unpack + 16 products   the same
//   8 bits     136               2 loads + 16 products       the same
//   fp8                          26 to look up + 16          26 to look up + 32
//
// At two instructions per cycle this is faster than reading the bytes from memory; fp8 takes about
// as long as reading. With AVX2 the products take two to three times as many instructions.
#pragma once

#include "softmax.hpp"
#include "visible_blocks.hpp"
#include "weighted_values.hpp"

namespace kvant::KVANT_TARGET {

// Running results of one key head's queries.
struct Head {
    Query query;
    float top[MAX_GROUP];
    alignas(64) float totals[MAX_GROUP][16];  // weight sums, by lane
    Sums sums;
};

// Scratch of one thread.
struct Scratch {
    Weights weights;
    alignas(64) float scores[MAX_GROUP * PITCH];
};

struct HeadBlock {
    Span span;
    int64_t head;
};

class Decode {
public:
    Decode(const kvant_request &r, const SideTables &keys, const SideTables &values, Scratch &s,
           Head *heads, int64_t sequence)
        : r(r), keys(keys), values(values), s(s), heads(heads), sequence(sequence) {}

    // Compute blocks [first, stop) of a walk for all heads; the results are in `heads`.
    void run(const Walk &walk, int64_t query, int64_t first, int64_t stop) {
        for (int64_t h = 0; h < r.heads; h++) begin(h, query);
        HeadBlock blocks[2];  // the current one and the next one, in turn
        int now = 0;
        if (first < stop) blocks[now] = {walk.at(first), 0};
        for (int64_t i = first, end; i < stop; i = end) {
            end = std::min(stop, i + walk.together(i));
            for (int64_t h = 0; h < r.heads; h++)
                for (int64_t j = i; j < end; j++, now ^= 1) {
                    HeadBlock *next = &blocks[now ^ 1];
                    if (j + 1 < end) *next = {walk.at(j + 1, h), h};
                    else if (h + 1 < r.heads) *next = {walk.at(i, h + 1), h + 1};
                    else if (end < stop) *next = {walk.at(end), 0};
                    else next = nullptr;
                    block(blocks[now], next);
                }
        }
        for (int64_t h = 0; h < r.heads; h++)
            for (int g = 0; g < r.group; g++) heads[h].sums.finish(g, r.values->group);
    }

private:
    const kvant_request &r;
    const SideTables &keys, &values;
    Scratch &s;
    Head *heads;
    int64_t sequence;

    void begin(int64_t h, int64_t query) {
        Head &head = heads[h];
        head.query.take(r, sequence, h, query);
        for (int g = 0; g < r.group; g++) head.top[g] = NOTHING, store(head.totals[g], zero());
        head.sums.clear((int)r.group, *r.values);
    }

    Source key_rows() const { return {*r.keys, keys, r.own_keys}; }
    Source value_rows() const { return {*r.values, values, r.own_values}; }

    Ahead ahead(const Source &from, const HeadBlock &next) const {
        return kvant::KVANT_TARGET::ahead(from, next.span, sequence, next.head);
    }

    // `next` is null for the last block.
    RowBlock rows(const Source &from, const HeadBlock &now, const HeadBlock *next) const {
        RowBlock block = row_block(from, now.span, sequence, now.head);
        if (next) block.ahead = ahead(from, *next);
        return block;
    }

    SealedBlock coded(const Source &from, const HeadBlock &now, const HeadBlock *next) const {
        SealedBlock block = sealed_block(from, now.span, now.head);
        if (next) block.ahead = ahead(from, *next);
        if (next && is_coded(from.side, next->span))
            block.to_next_scale = (const char *)sealed_block(from, next->span, next->head).scale -
                                  (const char *)block.scale;
        return block;
    }

    void block(const HeadBlock &place, const HeadBlock *next) {
        Head &head = heads[place.head];
        const Span &now = place.span;
        const int group = (int)r.group;
        const int lead = now.first, stop = now.stop;
        if (lead == stop) return;
        if (is_coded(*r.keys, now))
            sealed_scores(coded(key_rows(), place, next), keys, head.query, s.scores);
        else
            dense_scores(rows(key_rows(), place, next), r.keys->dtype, head.query, s.scores + lead);
        const bool dense = !is_coded(*r.values, now);
        const bool halves = dense && r.values->dtype == KVANT_BF16 && KVANT_BFLOAT_DOT;
        for (int g = 0; g < group; g++) {
            float *at = s.scores + g * PITCH;
            cap(at, (float)r.scale, (float)r.softcap);
            for (int i = 0; i < lead; i++) at[i] = NOTHING;
            for (int i = stop; i < BLOCK; i++) at[i] = NOTHING;
            soften(head.top[g], head.totals[g], at, halves ? s.weights.rows[g] : nullptr,
                   [&](float by) { head.sums.fade(g, by); });
        }
        if (dense) {
            const RowBlock block = rows(value_rows(), place, next);
            dense_values(block, r.values->dtype, group, s.scores, s.weights, lead, head.sums);
            return;
        }
        const SealedBlock block = coded(value_rows(), place, next);
        make_weights(block, values, s.scores, group, lead || stop < BLOCK, s.weights, head.sums);
        sealed_values(block, values, group, s.weights, head.sums);
    }
};

}  // namespace kvant::KVANT_TARGET
