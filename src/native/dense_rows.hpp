// Scores and weighted sums of dense rows, read directly from memory.
//
// Lanes are channels. The lanes of scores of several rows and queries are summed together. If the
// processor has a dot product of 16-bit floats, rows of that type are never widened.
#pragma once

#include "block.hpp"

namespace kvant::KVANT_TARGET {

// Queries [GN][stride] at q, their channels as `split<T>` orders them; scores [GN][PITCH] at s.
// R rows are read together.
template <class T, int GN, int R = DOTS / GN>
void row_scores(const RowBlock &rows, const float *q, int64_t stride, int dim, float *s) {
    static_assert(GN * R <= DOTS, "their sums fit registers");
    for (int first = 0; first < rows.count; first += R) {
        const T *row[R];
        for (int r = 0; r < R; r++) row[r] = (const T *)rows.at(first + r);
        Dot acc[DOTS];
        Ahead ahead = rows.ahead;  // in registers
#pragma GCC unroll 2
        for (int d = 0; d < dim; d += 16) {
            ahead.template fetch_next<R * 16 * sizeof(T)>();
            F k[R];
            for (int r = 0; r < R; r++) k[r] = load_split(row[r] + d);
            for (int g = 0; g < GN; g++) {
                F x = load(q + g * stride + d);
                if (R > 1) in_registers(x);
                for (int r = 0; r < R; r++) dot(acc[g * R + r], k[r], x);
            }
        }
        rows.ahead = ahead;
        float total[DOTS];
        store_dots(total, acc);
        for (int i = 0; i < GN * R; i++) s[i / R * PITCH + first + i % R] = total[i];
    }
}

// acc [GN][stride] += weights [GN][PITCH] times channels [first, first + 16 NC) of the rows.
template <class T, int GN, int NC>
void row_values_part(const RowBlock &rows, const float *p, int first, float *acc, int64_t stride) {
    F sum[GN][NC];
#pragma GCC unroll 4
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < NC; c++) sum[g][c] = split<T>(load(acc + g * stride + first + 16 * c));
    for (int r = 0; r < rows.count; r++) {
        const T *row = (const T *)rows.at(r) + first;
        F v[NC];
        for (int c = 0; c < NC; c++) v[c] = load_split(row + 16 * c);
        rows.ahead.template fetch_next<16 * NC * sizeof(T)>();
#pragma GCC unroll 4
        for (int g = 0; g < GN; g++) {
            const F w = set1(p[g * PITCH + r]);
            for (int c = 0; c < NC; c++) sum[g][c] = fma(w, v[c], sum[g][c]);
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < NC; c++)
            store(acc + g * stride + first + 16 * c, unsplit<T>(sum[g][c]));
}

template <class T, int GN>
void row_values(const RowBlock &rows, const float *p, int dim, float *acc, int64_t stride) {
    constexpr int NC = ROW_CHUNKS<GN>;
    int d = 0;
    for (; d + 16 * NC <= dim; d += 16 * NC) row_values_part<T, GN, NC>(rows, p, d, acc, stride);
    for (; d < dim; d += 16) row_values_part<T, GN, 1>(rows, p, d, acc, stride);
}

#if KVANT_BFLOAT_DOT

// Queries [GN][stride] as Bfloat. REPEATED: this is one of several passes over the rows.
template <int GN, bool REPEATED = false>
void bfloat_scores(const RowBlock &rows, const Bfloat *q, int64_t stride, int dim, float *s) {
    constexpr int R = 16 / GN;
    for (int first = 0; first < rows.count; first += R) {
        const Bfloat *row[R];
        for (int r = 0; r < R; r++) row[r] = (const Bfloat *)rows.at(first + r);
        F acc[16];
        for (F &x : acc) x = zero();
        int d = 0;
        for (; d + 32 <= dim; d += 32) {
            Pairs x[GN];
            for (int g = 0; g < GN; g++) x[g] = load_pairs(q + g * stride + d);
            if (REPEATED) rows.ahead.fetch_share<R * LINE>();
            else rows.ahead.fetch_next<R * LINE>();
            for (int r = 0; r < R; r++) {
                const Pairs k = load_pairs(row[r] + d);
                for (int g = 0; g < GN; g++) acc[g * R + r] = dot2(acc[g * R + r], k, x[g]);
            }
        }
        if (d < dim)  // the last 16 channels
            for (int r = 0; r < R; r++)
                for (int g = 0; g < GN; g++)
                    acc[g * R + r] =
                        fma(load(row[r] + d), load(q + g * stride + d), acc[g * R + r]);
        float total[16];
        store(total, sums(acc));
        for (int i = 0; i < 16; i++) s[i / R * PITCH + first + i % R] = total[i];
    }
}

// Weights [GN][PITCH] as Bfloat, zero after the rows; channels [first, first + 32 NC).
template <int GN, int NC>
void bfloat_values_part(const RowBlock &rows, const Bfloat *w, int first, float *acc,
                        int64_t stride) {
    F sum[GN][2 * NC];
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < 2 * NC; c += 2) {
            const float *at = acc + g * stride + first + 16 * c;
            sum[g][c] = load(at);
            sum[g][c + 1] = load(at + 16);
            crossed(sum[g][c], sum[g][c + 1]);
        }
    for (int r = 0; r < rows.count; r += 2) {
        const Bfloat *a = (const Bfloat *)rows.at(r) + first;
        const Bfloat *b = (const Bfloat *)rows.at(r + 1) + first;
        Pairs v[2 * NC];
        rows.ahead.fetch_next<2 * NC * LINE>();
        for (int c = 0; c < NC; c++) interleaved(a + 32 * c, b + 32 * c, v + 2 * c);
        for (int g = 0; g < GN; g++) {
            uint32_t pair;
            std::memcpy(&pair, w + g * PITCH + r, 4);
            for (int c = 0; c < 2 * NC; c++) sum[g][c] = dot2(sum[g][c], v[c], pair);
        }
    }
    for (int g = 0; g < GN; g++)
        for (int c = 0; c < 2 * NC; c += 2) {
            float *at = acc + g * stride + first + 16 * c;
            straight(sum[g][c], sum[g][c + 1]);
            store(at, sum[g][c]);
            store(at + 16, sum[g][c + 1]);
        }
}

// `p` has the weights `w` in single precision.
template <int GN>
void bfloat_values(const RowBlock &rows, const Bfloat *w, const float *p, int dim, float *acc,
                   int64_t stride) {
    int d = 0;
    for (; d + 64 <= dim; d += 64) bfloat_values_part<GN, 2>(rows, w, d, acc, stride);
    if (d + 32 <= dim) bfloat_values_part<GN, 1>(rows, w, d, acc, stride), d += 32;
    if (d < dim) row_values_part<Bfloat, GN, 1>(rows, p, d, acc, stride);
}

#endif

}  // namespace kvant::KVANT_TARGET
