// Which sealed pages a query reads: those whose keys can score most with the query heads that share
// them, by two bounds of each channel (attention/page_selection.py).
//
// What must move is the bounds of every page, in the order of memory: so page by page, the heads of
// a page one after another. A sum over query heads of what they can score is one product: that of
// the bounds and the sums of what is positive, and of what is negative, in each channel.
#include "choose.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "doors.hpp"
#include "team.hpp"

namespace kvant::KVANT_TARGET {
namespace {

constexpr int64_t AT_ONCE = 64;  // queries whose scores are held at a time
constexpr int64_t PAGES = 64;    // of a task
constexpr int64_t ALONE = 1024;  // pages and heads: some microseconds

struct Range {
    int64_t low, first, stop, high, count;
};

// Pages [begin, end) of those that a query chooses among.
struct Task {
    int64_t unit, begin, end;
};

class Choose {
public:
    explicit Choose(const kvant_choose_request &r) : r(r) {
        for (int64_t i = 0; i < r.extent->batch * r.queries; i++)
            most = std::max(most, range(i).stop - range(i).first);
        held = std::min(AT_ONCE, r.extent->batch * r.queries);
        scores.reset(new float[held * r.heads * most]);
    }

    void run() {
        const int64_t all = r.extent->batch * r.queries;
        for (first = 0; first < all; first += held) {
            const int64_t count = std::min(held, all - first);
            tasks.clear();
            int64_t work = 0;
            for (int64_t i = 0; i < count; i++) {
                const Range &here = range(first + i);
                work += (here.stop - here.first) * r.heads;
                for (int64_t begin = here.first; begin < here.stop; begin += PAGES)
                    tasks.push_back({first + i, begin, std::min(begin + PAGES, here.stop)});
            }
            const int64_t threads = work < ALONE ? 1 : r.threads;
            each<&Choose::score>((int64_t)tasks.size(), threads);
            each<&Choose::pick>(count * r.heads, threads);
        }
    }

private:
    const kvant_choose_request &r;
    std::unique_ptr<float[]> scores;  // [query][head][page]
    std::vector<Task> tasks;
    int64_t most = 0, held = 0, first = 0, count = 0;
    std::atomic<int64_t> next{0};

    const Range &range(int64_t unit) const { return ((const Range *)r.ranges)[unit]; }

    float *scores_of(int64_t unit, int64_t head) const {
        return scores.get() + ((unit - first) * r.heads + head) * most;
    }

    // Done for every number below `all`.
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
        const int64_t sequence = task.unit / r.queries, wide = 2 * r.dim;
        const std::unique_ptr<float[]> asked(new float[r.heads * wide]);
        for (int64_t h = 0; h < r.heads; h++) sums(task.unit, h, asked.get() + h * wide);
        const int64_t *const slots = r.extent->sealed.data + sequence * r.extent->sealed.stride;
        const auto rows = [&](int64_t page, int64_t head) {
            return (const T *)((const char *)r.bounds.data + slots[page] * r.bounds.slot +
                               head * r.bounds.head);
        };
        for (int64_t page = task.begin; page < task.end; page++)
            for (int64_t h = 0; h < r.heads; h++) {
                const float found = product(rows(page, h), asked.get() + h * wide, wide);
                // What is no number may be anything: it is read.
                scores_of(task.unit, h)[page - range(task.unit).first] =
                    found == found ? found : HUGE_VALF;
            }
    }

    template <class T> static float product(const T *row, const float *q, int64_t wide) {
        F one = zero(), other = zero();
        for (int64_t d = 0; d < wide; d += 32) {
            one = fma(load(row + d), load(q + d), one);
            other = fma(load(row + d + 16), load(q + d + 16), other);
        }
        return sum(add(one, other));
    }

    // Of the queries of a head's group: the sum of what is positive of each channel, then that of
    // what is negative.
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

    // The pages of a head, in order: those that are read anyway, and the best of the others.
    void pick(int64_t i) {
        const int64_t unit = first + i / r.heads, head = i % r.heads;
        const Range &here = range(unit);
        const float *const found = scores_of(unit, head);
        const int64_t pages = here.stop - here.first;
        float least = 0;  // of the scores that are chosen
        int64_t ties = 0;  // and how many of those that score just that
        if (here.count) {
            std::vector<float> best(found, found + pages);
            std::nth_element(best.begin(), best.begin() + here.count - 1, best.end(),
                             std::greater<float>());
            least = best[here.count - 1];
            ties = std::count(best.begin(), best.begin() + here.count, least);
        }
        const int64_t sequence = unit / r.queries, query = unit % r.queries;
        int64_t *to = r.chosen + ((sequence * r.heads + head) * r.queries + query) * r.num_chosen;
        int64_t *const stop = to + r.num_chosen;
        for (int64_t page = here.low; page < here.first; page++) *to++ = page;
        for (int64_t n = 0; n < pages && here.count; n++)
            if (found[n] > least || (found[n] == least && ties-- > 0)) *to++ = here.first + n;
        for (int64_t page = here.stop; page < here.high; page++) *to++ = page;
        std::fill(to, stop, -1);
    }
};

}  // namespace

void choose(const kvant_choose_request &request) { Choose(request).run(); }

}  // namespace kvant::KVANT_TARGET
