// The queries of one key head, in the forms that the kernels take.
#pragma once

#include <algorithm>
#include <cmath>

#include "kvant.h"
#include "convert.hpp"
#include "integer_codes.hpp"

namespace kvant::KVANT_TARGET {

struct Query {
    int group, dim;
    bool exact;  // whether all queries are 16-bit floats
    alignas(64) float rows[MAX_GROUP][MAX_DIM];  // as `split` orders their channels
    alignas(64) Bfloat high[MAX_GROUP][MAX_DIM], low[MAX_GROUP][MAX_DIM];
    alignas(64) uint32_t pairs[MAX_GROUP][MAX_DIM / 2];
    alignas(64) uint32_t fours[MAX_GROUP][MAX_DIM / 2];
    alignas(64) Fine fine[MAX_GROUP][MAX_DIM / 2];
    float step[MAX_GROUP];
    float sums[MAX_GROUP][MAX_GROUPS];  // of the values of pairs; of fours, in units of `step`

    // Read the group of queries at one position that share key head `head`.
    void take(const kvant_request &r, int64_t sequence, int64_t head, int64_t query) {
        const kvant_side &keys = *r.keys;
        group = (int)r.group, dim = (int)keys.dim, exact = true;
        for (int g = 0; g < group; g++) {
            read_query(r, sequence, head * group + g, query, rows[g]);
#if KVANT_BFLOAT_DOT
            if (keys.dtype == KVANT_BF16 || keys.format == KVANT_FP8) halve(g);
#endif
            if (keys.format == KVANT_RAW) continue;
            if (keys.format == KVANT_FP8 && KVANT_INTEGER_CODES)
                make_fine(g);
            else if (in_quads(keys))
                keys.format == KVANT_CODEBOOK ? make_fours<true>(g, (int)keys.group)
                                              : make_fours<false>(g, (int)keys.group);
            else
                make_pairs(g, (int)keys.group);
        }
        if (keys.format == KVANT_FP8 && !KVANT_INTEGER_CODES && !exact)
            for (int g = 0; g < group; g++) make_fine(g);
        if (keys.dtype == KVANT_BF16)
            for (int g = 0; g < group; g++)
                for (int d = 0; d < dim; d += 16)
                    store(rows[g] + d, split<Bfloat>(load(rows[g] + d)));
    }

    const uint32_t *fours_of(int g, uint32_t) const { return fours[g]; }
    const Fine *fours_of(int g, Fine) const { return fine[g]; }

private:
    // Store a query as a 16-bit float and its rounding error.
    void halve(int g) {
        F odd = zero();
        for (int d = 0; d < dim; d += 16) {
            const F x = load(rows[g] + d);
            store(high[g] + d, x);
            const F rest = sub(x, load(high[g] + d));
            store(low[g] + d, rest);
            odd = max(odd, abs(rest));
        }
        exact = exact && !any_above(odd, 0.0f);
    }

    // Call f(u, first, stop) for every group of channels.
    template <class Fn> void by_group(int width, Fn f) const {
        for (int u = 0; u * width < dim; u++) f(u, u * width, std::min(dim, (u + 1) * width));
    }

    // Channels 0 2 1 3 of every four, as key_codes yields them.
    void make_pairs(int g, int width) {
        by_group(width, [&](int u, int first, int stop) {
            F total = zero();
            for (int d = first; d < stop; d += 16) {
                const F x = load(rows[g] + d);
                store((Bfloat *)pairs[g] + d, swapped(x));
                total = add(total, rounded(x));
            }
            sums[g][u] = sum(total);
        });
    }

    void make_fine(int g) {
        step[g] = 1.0f;
        for (int d = 0; d < dim; d += 16) store_fine(fine[g] + d / 2, swapped(load(rows[g] + d)));
    }

    template <bool TABLE> void make_fours(int g, int width) {
        step[g] = kvant::KVANT_TARGET::make_fours<TABLE>(rows[g], dim, width, fours[g], sums[g]);
    }
};

}  // namespace kvant::KVANT_TARGET
