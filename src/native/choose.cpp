// Select the sealed pages that a query reads: those with the largest upper bound on the scores of
// their keys, by two bounds per channel (attention/page_selection.py).
//
// The bounds of every page must be read, so they are read in memory order: page by page, and head by
// head. The sum of score bounds over query heads is one product per page: upper bounds times the
// sums of positive query channels, plus lower bounds times the sums of negative ones.
#include "kernels.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "block.hpp"
#include "convert.hpp"
#include "team.hpp"

namespace kvant::KVANT_TARGET {
namespace {

constexpr int64_t MAX_SCORED_QUERIES = 64;  // queries whose scores are in memory at once
constexpr int64_t TASK_PAGES = 64;
constexpr int64_t MIN_PARALLEL_WORK = 1024;  // pages times heads: some microseconds

struct Range {
    int64_t low, first, stop, high, count;
};

// Candidate pages [begin, end) of one query.
struct Task {
    int64_t unit, begin, end;
};

class Choose {
public:
    explicit Choose(const kvant_choose_request &r) : r(r) {
        for (int64_t i = 0; i < r.extent->batch * r.queries; i++)
            max_candidates = std::max(max_candidates, range(i).stop - range(i).first);
        batch_queries = std::min(MAX_SCORED_QUERIES, r.extent->batch * r.queries);
        scores.reset(new int32_t[batch_queries * r.heads * max_candidates]);
        left.reset(new std::atomic<int64_t>[batch_queries]);
    }

    void run() {
        const int64_t all = r.extent->batch * r.queries;
        for (first = 0; first < all; first += batch_queries) {
            const int64_t work = divide(std::min(batch_queries, all - first));
            const int64_t threads = work < MIN_PARALLEL_WORK ? 1 : r.threads;
            in_parallel((int)std::min(threads, (int64_t)tasks.size()),
                        [](void *self) { ((Choose *)self)->work(); }, this);
        }
    }

private:
    const kvant_choose_request &r;
    std::unique_ptr<int32_t[]> scores;  // [query][head][page], as `ordered` gives them
    std::vector<Task> tasks;
    std::unique_ptr<std::atomic<int64_t>[]> left;  // by query: tasks still to be computed
    int64_t max_candidates = 0, batch_queries = 0, first = 0;
    std::atomic<int64_t> next{0};

    const Range &range(int64_t unit) const { return ((const Range *)r.ranges)[unit]; }

    int32_t *scores_of(int64_t unit, int64_t head) const {
        return scores.get() + ((unit - first) * r.heads + head) * max_candidates;
    }

    // Split queries [first, first + count) into tasks, at least one each; return pages times heads.
    int64_t divide(int64_t count) {
        tasks.clear(), next = 0;
        int64_t work = 0;
        for (int64_t i = 0; i < count; i++) {
            const Range &here = range(first + i);
            const int64_t num_tasks = tasks.size();
            int64_t begin = here.first;
            do {
                tasks.push_back({first + i, begin, std::min(begin + TASK_PAGES, here.stop)});
                begin += TASK_PAGES;
            } while (begin < here.stop);
            left[i] = tasks.size() - num_tasks;
            work += (here.stop - here.first) * r.heads;
        }
        return work;
    }

    // Score pages. The thread that finishes the last task of a query selects its pages.
    void work() {
        for (int64_t i; (i = next.fetch_add(1)) < (int64_t)tasks.size();) {
            const Task &task = tasks[i];
            if (r.dtype == KVANT_F32) score<float>(task);
            if (r.dtype == KVANT_F16) score<Half>(task);
            if (r.dtype == KVANT_BF16) score<Bfloat>(task);
            if (left[task.unit - first].fetch_sub(1) > 1) continue;
            for (int64_t h = 0; h < r.heads; h++) pick(task.unit, h);
        }
    }

    template <class T> void score(const Task &task) {
        const int64_t sequence = task.unit / r.queries, width = 2 * r.dim;
        const std::unique_ptr<float[]> query_sums(new float[r.heads * width]);
        for (int64_t h = 0; h < r.heads; h++) sums<T>(task.unit, h, query_sums.get() + h * width);
        const int64_t *const slots = r.extent->sealed.data + sequence * r.extent->sealed.stride;
        const auto rows = [&](int64_t page, int64_t head) {
            return (const T *)((const char *)r.bounds.data + slots[page] * r.bounds.slot +
                               head * r.bounds.head);
        };
        for (int64_t page = task.begin; page < task.end; page++)
            for (int64_t h = 0; h < r.heads; h++) {
                const T *const after = rows(std::min(page + 1, task.end - 1), h);
                const float score =
                    product(rows(page, h), after, query_sums.get() + h * width, width);
                // A NaN says nothing about the scores: read the page.
                scores_of(task.unit, h)[page - range(task.unit).first] =
                    ordered(score == score ? score : HUGE_VALF);
            }
    }

    // Return an integer whose order is that of floats; both zeros are the same.
    static int32_t ordered(float x) {
        const int32_t bits = (int32_t)bits_of(x + 0.0f);
        return bits ^ ((bits >> 31) & INT32_MAX);
    }

    // `after` is prefetched: processors do not prefetch beyond a page of memory.
    template <class T>
    static float product(const T *row, const T *after, const float *q, int64_t width) {
        F even = zero(), odd = zero();
        for (int64_t d = 0; d < width; d += 32) {
            for (int64_t i = 0; i < 32; i += LINE / (int64_t)sizeof(T)) fetch(after + d + i);
            even = fma(load_split(row + d), load(q + d), even);
            odd = fma(load_split(row + d + 16), load(q + d + 16), odd);
        }
        return sum(unsplit<T>(add(even, odd)));
    }

    // Sum the positive channels of a head's queries, then the negative ones, in the order of
    // load_split.
    template <class T> void sums(int64_t unit, int64_t head, float *to) const {
        float q[MAX_DIM];
        std::fill(to, to + 2 * r.dim, 0.0f);
        for (int64_t g = 0; g < r.group; g++) {
            const char *at = (const char *)r.q.data + unit / r.queries * r.q.batch +
                             (head * r.group + g) * r.q.head + unit % r.queries * r.q.row;
            read_row(r.q_dtype, at, r.dim, q);
            for (int64_t d = 0; d < r.dim; d += 16) {
                const F x = split<T>(load(q + d));
                float *const negative = to + r.dim + d;
                store(to + d, add(load(to + d), max(zero(), x)));
                store(negative, sub(load(negative), max(zero(), sub(zero(), x))));
            }
        }
    }

    // Write the pages that a head reads in ascending order: those always read and the best candidates.
    void pick(int64_t unit, int64_t head) const {
        const Range &here = range(unit);
        const int64_t sequence = unit / r.queries, query = unit % r.queries;
        int64_t *to = r.chosen + ((sequence * r.heads + head) * r.queries + query) * r.num_chosen;
        int64_t *const stop = to + r.num_chosen;
        for (int64_t page = here.low; page < here.first; page++) *to++ = page;
        if (here.count) pick_best(scores_of(unit, head), here, to), to += here.count;
        for (int64_t page = here.stop; page < here.high; page++) *to++ = page;
        std::fill(to, stop, -1);
    }

    static void pick_best(const int32_t *candidates, const Range &here, int64_t *to) {
        const int64_t pages = here.stop - here.first;
        const int32_t threshold = find_threshold(candidates, pages, here.count);
        // Pages to select of those with exactly this score: the first ones.
        int64_t ties = here.count - count_from(candidates, pages, threshold + 1);
        int64_t *const stop = to + here.count;
        for (int64_t n = 0; to < stop; n++) {
            const bool tie = candidates[n] == threshold;
            *to = here.first + n;  // written again unless selected: a branch would be mispredicted
            to += (candidates[n] > threshold) | (tie & (ties > 0));
            ties -= tie;
        }
    }

    // Return the highest score that at least `count` candidates reach, bit by bit, or a lower one
    // that exactly `count` reach.
    static int32_t find_threshold(const int32_t *candidates, int64_t pages, int64_t count) {
        uint32_t threshold = (uint32_t)INT32_MIN;
        int64_t found = pages;
        for (uint32_t bit = 1u << 31; bit && found != count; bit >>= 1) {
            const int64_t higher = count_from(candidates, pages, (int32_t)(threshold + bit));
            if (higher >= count) threshold += bit, found = higher;
        }
        return (int32_t)threshold;
    }

    static int64_t count_from(const int32_t *candidates, int64_t pages, int32_t least) {
        int32_t found = 0;
        for (int64_t n = 0; n < pages; n++) found += candidates[n] >= least;
        return found;
    }
};

}  // namespace

void choose(const kvant_choose_request &request) { Choose(request).run(); }

}  // namespace kvant::KVANT_TARGET
