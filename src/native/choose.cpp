// Select the sealed pages that a query reads: those with the largest upper bound on the scores of
// their keys, by two bounds per channel (attention/page_selection.py).
//
// The bounds of every page must be read, so they are read in memory order: page by page, and head by
// head. The sum of score bounds over query heads is one product per page: upper bounds times the
// sums of positive query channels, plus lower bounds times the sums of negative ones.
#include "kernels.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "doors.hpp"
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
        scores.reset(new float[batch_queries * r.heads * max_candidates]);
    }

    void run() {
        const int64_t all = r.extent->batch * r.queries;
        for (first = 0; first < all; first += batch_queries) {
            const int64_t count = std::min(batch_queries, all - first);
            tasks.clear();
            int64_t work = 0;
            for (int64_t i = 0; i < count; i++) {
                const Range &here = range(first + i);
                work += (here.stop - here.first) * r.heads;
                for (int64_t begin = here.first; begin < here.stop; begin += TASK_PAGES)
                    tasks.push_back({first + i, begin, std::min(begin + TASK_PAGES, here.stop)});
            }
            const int64_t threads = work < MIN_PARALLEL_WORK ? 1 : r.threads;
            each<&Choose::score>((int64_t)tasks.size(), threads);
            each<&Choose::pick>(count * r.heads, threads);
        }
    }

private:
    const kvant_choose_request &r;
    std::unique_ptr<float[]> scores;  // [query][head][page]
    std::vector<Task> tasks;
    int64_t max_candidates = 0, batch_queries = 0, first = 0, count = 0;
    std::atomic<int64_t> next{0};

    const Range &range(int64_t unit) const { return ((const Range *)r.ranges)[unit]; }

    float *scores_of(int64_t unit, int64_t head) const {
        return scores.get() + ((unit - first) * r.heads + head) * max_candidates;
    }

    // Call DO for every index below `all`.
    template <void (Choose::*DO)(int64_t)> void each(int64_t all, int64_t threads) {
        count = all, next = 0;
        in_parallel((int)std::min(threads, all), [](void *self) {
            Choose &here = *(Choose *)self;
            for (int64_t i; (i = here.next.fetch_add(1)) < here.count;) (here.*DO)(i);
        }, this);
    }

    void score(int64_t i) {
        if (r.dtype == KVANT_F32) score_as<float>(tasks[i]);
        if (r.dtype == KVANT_F16) score_as<Half>(tasks[i]);
        if (r.dtype == KVANT_BF16) score_as<Bfloat>(tasks[i]);
    }

    template <class T> void score_as(const Task &task) {
        const int64_t sequence = task.unit / r.queries, width = 2 * r.dim;
        const std::unique_ptr<float[]> query_sums(new float[r.heads * width]);
        for (int64_t h = 0; h < r.heads; h++) sums(task.unit, h, query_sums.get() + h * width);
        const int64_t *const slots = r.extent->sealed.data + sequence * r.extent->sealed.stride;
        const auto rows = [&](int64_t page, int64_t head) {
            return (const T *)((const char *)r.bounds.data + slots[page] * r.bounds.slot +
                               head * r.bounds.head);
        };
        for (int64_t page = task.begin; page < task.end; page++)
            for (int64_t h = 0; h < r.heads; h++) {
                const float score = product(rows(page, h), query_sums.get() + h * width, width);
                // A NaN says nothing about the scores: read the page.
                scores_of(task.unit, h)[page - range(task.unit).first] =
                    score == score ? score : HUGE_VALF;
            }
    }

    template <class T> static float product(const T *row, const float *q, int64_t width) {
        F even = zero(), odd = zero();
        for (int64_t d = 0; d < width; d += 32) {
            even = fma(load(row + d), load(q + d), even);
            odd = fma(load(row + d + 16), load(q + d + 16), odd);
        }
        return sum(add(even, odd));
    }

    // Sum the positive channels of a head's queries, then the negative ones.
    void sums(int64_t unit, int64_t head, float *to) const {
        float q[MAX_DIM];
        std::fill(to, to + 2 * r.dim, 0.0f);
        for (int64_t g = 0; g < r.group; g++) {
            const char *at = (const char *)r.q.data + unit / r.queries * r.q.batch +
                             (head * r.group + g) * r.q.head + unit % r.queries * r.q.row;
            read_row(r.q_dtype, at, r.dim, q);
            for (int64_t d = 0; d < r.dim; d++) to[q[d] < 0 ? r.dim + d : d] += q[d];
        }
    }

    // Write the pages of a head in ascending order: those always read, and the best candidates.
    void pick(int64_t i) {
        const int64_t unit = first + i / r.heads, head = i % r.heads;
        const Range &here = range(unit);
        const float *const candidates = scores_of(unit, head);
        const int64_t pages = here.stop - here.first;
        float threshold = 0;  // lowest selected score
        int64_t ties = 0;  // pages with exactly this score to select
        if (here.count) {
            std::vector<float> best(candidates, candidates + pages);
            std::nth_element(best.begin(), best.begin() + here.count - 1, best.end(),
                             std::greater<float>());
            threshold = best[here.count - 1];
            ties = std::count(best.begin(), best.begin() + here.count, threshold);
        }
        const int64_t sequence = unit / r.queries, query = unit % r.queries;
        int64_t *to = r.chosen + ((sequence * r.heads + head) * r.queries + query) * r.num_chosen;
        int64_t *const stop = to + r.num_chosen;
        for (int64_t page = here.low; page < here.first; page++) *to++ = page;
        for (int64_t n = 0; n < pages && here.count; n++)
            if (candidates[n] > threshold || (candidates[n] == threshold && ties-- > 0))
                *to++ = here.first + n;
        for (int64_t page = here.stop; page < here.high; page++) *to++ = page;
        std::fill(to, stop, -1);
    }
};

}  // namespace

void choose(const kvant_choose_request &request) { Choose(request).run(); }

}  // namespace kvant::KVANT_TARGET
