/* K-means on a line (codebooks/algorithms/exact_kmeans.py) and tables of codes (quantization/codebook/table.py), with
 * the operations of Numba's kernels, in their order. */
#include <math.h>

#include "paths.h"

#define TILE 512   /* candidates whose costs are computed at once */
#define PENDING 128 /* ranges that wait: at most two for each time that a range is halved */

/* Prefix sums of weights, and of weights times points and their squares. */
typedef struct { const double *w, *wx, *wxx; } sums;

/* candidates[i] = before[i] + weighted sum of squared distances of points from + i .. last to their mean */
static INLINE void find_costs_body(const sums *s, const double *before, size_t from, size_t last, size_t n,
                                   double *candidates)
{
    const double *w = s->w + from, *wx = s->wx + from, *wxx = s->wxx + from;
    const double end = s->w[last + 1], end_x = s->wx[last + 1], end_xx = s->wxx[last + 1];
    for (size_t i = 0; i < n; i++) {
        double weight = end - w[i], first = end_x - wx[i], spread = (end_xx - wxx[i]) - first * first / weight;
        spread = spread > 0 ? spread : 0;
        candidates[i] = before[i] + (weight <= 0 ? 0 : spread);  /* below the last digit of the sum before them */
    }
}

#define PARAMETERS (const sums *s, const double *before, size_t from, size_t last, size_t n, double *candidates)
ON_EACH_PATH(void, find_costs, PARAMETERS, (s, before, from, last, n, candidates))
#undef PARAMETERS

/* Fill row k (of k + 1 clusters) of the program, and the starts of its last clusters. */
static void fill_row(int path, const sums *s, size_t n, size_t k, const double *before, double *row, int32_t *starts)
{
    struct { size_t left, right, low, high; } stack[PENDING];
    double candidates[TILE];
    int depth = 1;
    stack[0].left = stack[0].low = k, stack[0].right = stack[0].high = n - 1;
    while (depth--) {
        const size_t left = stack[depth].left, right = stack[depth].right, low = stack[depth].low;
        const size_t high = stack[depth].high, j = left + (right - left) / 2, stop = (high < j ? high : j) + 1;
        double best = INFINITY;
        size_t best_i = low;
        for (size_t from = low; from < stop; from += TILE) {
            size_t count = stop - from < TILE ? stop - from : TILE;
            find_costs_paths[path](s, before + from - 1, from, j, count, candidates);
            for (size_t i = 0; i < count; i++)
                if (candidates[i] < best)
                    best = candidates[i], best_i = from + i;
        }
        row[j] = best, starts[j] = (int32_t)best_i;
        if (left < j)
            stack[depth].left = left, stack[depth].right = j - 1, stack[depth].low = low, stack[depth].high = best_i,
            depth++;
        if (j < right)
            stack[depth].left = j + 1, stack[depth].right = right, stack[depth].low = best_i, stack[depth].high = high,
            depth++;
    }
}

/* Set the start of the last cluster for every (clusters - 1, last point), int32[k_max][n], zeros before; BAD_TABLES if
 * there are more clusters than points, or more points than starts can name. prefixes: double[3 (n + 1)], rows:
 * double[2 n], of any contents. */
int dsq_kmeans(int path, const double *points, const double *weights, size_t n, size_t k_max, double *prefixes,
               double *rows, int32_t *starts)
{
    if (!dsq_has_path(path) || !n || n > INT32_MAX || !k_max || k_max > n)
        return BAD_TABLES;
    double *w = prefixes, *wx = w + n + 1, *wxx = wx + n + 1, *before = rows, *row = rows + n;
    w[0] = wx[0] = wxx[0] = 0;
    for (size_t i = 0; i < n; i++) {
        w[i + 1] = w[i] + weights[i];
        wx[i + 1] = wx[i] + weights[i] * points[i];
        wxx[i + 1] = wxx[i] + weights[i] * points[i] * points[i];
    }
    const sums all = {w, wx, wxx};
    const double nothing = 0;
    for (size_t j = 0; j < n; j++)
        find_costs_plain(&all, &nothing, 0, j, 1, before + j);
    for (size_t k = 1; k < k_max; k++) {
        fill_row(path, &all, n, k, before, row, starts + k * n);
        double *other = before;
        before = row, row = other;
    }
    return 0;
}

/* Set table[row][column] of n entries to the code of least distortion + price * bits, of the nearest level and its two
 * neighbours; BAD_TABLES if an entry or a code is outside the tables.
 *
 * points, base, movable: of each of `n_columns` columns. positions, codes: of `n_levels` levels. rank_of: of 256 codes.
 * bits: of each of `n_rows` rows and `n_symbols` codes. table: uint8[n_rows][n_columns].
 */
int dsq_choose(const int64_t *rows, const int64_t *columns, size_t n, const double *points, const uint8_t *base,
               const uint8_t *movable, size_t n_columns, const double *positions, const uint8_t *codes, size_t n_levels,
               const int64_t *rank_of, const double *bits, size_t n_rows, size_t n_symbols, double price,
               uint8_t *table)
{
    if (!n_levels || n_levels > 256)
        return BAD_TABLES;
    for (size_t rank = 0; rank < n_levels; rank++)
        if (codes[rank] >= n_symbols)
            return BAD_TABLES;
    for (size_t code = 0; code < 256; code++)
        if (rank_of[code] < 0 || (size_t)rank_of[code] >= n_levels)
            return BAD_TABLES;
    for (size_t i = 0; i < n; i++) {
        size_t row = (size_t)rows[i], column = (size_t)columns[i];
        if (row >= n_rows || column >= n_columns)
            return BAD_TABLES;
        if (!movable[column])
            continue;
        size_t middle = (size_t)rank_of[base[column]], last = middle + 1 < n_levels ? middle + 1 : n_levels - 1;
        uint8_t best = base[column];
        double best_cost = INFINITY;
        for (size_t rank = middle ? middle - 1 : 0; rank <= last; rank++) {
            double gap = points[column] - positions[rank];
            double cost = gap * gap + price * bits[row * n_symbols + codes[rank]];
            if (cost < best_cost)
                best_cost = cost, best = codes[rank];
        }
        table[row * n_columns + column] = best;
    }
    return 0;
}
