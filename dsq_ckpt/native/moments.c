/* Passes over Adam's moments: coordinates of first moments (quantization/moments.py), lengths of steps
 * (step_lengths.py), scales of second moments (matrix_scales.py), and places in parts of cells (restored_values.py).
 * Sums are in the order of the kernels there, so that all bits are the same. */
#include <float.h>
#include <math.h>

#include "paths.h"

#define SUMS 16           /* that take turns, so that no element waits for the sum before it */
#define TILE 1024         /* elements of a row; a multiple of SUMS */
#define ONE (127 << 3)    /* eighths of an octave up to 1.0 (scales.c) */
#define EIGHTH 20         /* bits of a float below an eighth of its octave */
#define AROUND_ZERO 2     /* parts on each side of the part around zero that are ignored */

static INLINE void over_roots_body(const any_float *values, const any_float *squares, size_t n, float least,
                                   any_float *out)
{
    for (size_t i = 0; i < n; i++) {
        float square = squares[i], root = sqrtf(square);
        float quotient = values[i] / (fabsf(square) < FLT_MIN ? least : root);
        out[i] = (square >= 0) & (square <= FLT_MAX) ? quotient : NAN;
    }
}

static INLINE void times_roots_body(any_float *values, const any_float *squares, size_t n, float least)
{
    for (size_t i = 0; i < n; i++) {
        float square = fabsf(squares[i]), root = sqrtf(square);
        values[i] = within(values[i] * (square < FLT_MIN ? least : root));
    }
}

static INLINE void times_octaves_body(any_float *values, const any_float *squares, size_t n, const float *units)
{
    const uint32_t even = bits_of(units[0]), odd = bits_of(units[1]);
    for (size_t i = 0; i < n; i++) {
        uint32_t octave = bits_of(squares[i]) >> 23 & 255;
        values[i] = within(values[i] * float_of((octave & 1 ? odd : even) + (octave >> 1 << 23)));
    }
}

#define PARAMETERS (const any_float *values, const any_float *squares, size_t n, float least, any_float *out)
ON_EACH_PATH(void, over_roots, PARAMETERS, (values, squares, n, least, out))
#undef PARAMETERS
#define PARAMETERS (any_float *values, const any_float *squares, size_t n, float least)
ON_EACH_PATH(void, times_roots, PARAMETERS, (values, squares, n, least))
#undef PARAMETERS
#define PARAMETERS (any_float *values, const any_float *squares, size_t n, const float *units)
ON_EACH_PATH(void, times_octaves, PARAMETERS, (values, squares, n, units))
#undef PARAMETERS

/* Set `out` to values over the roots of their squares, of which the least is `least`; NaN where there is no root. */
int dsq_over_roots(int path, const any_float *values, const any_float *squares, size_t n, float least, any_float *out)
{
    if (!dsq_has_path(path))
        return BAD_TABLES;
    over_roots_paths[path](values, squares, n, least, out);
    return 0;
}

/* Multiply values by the roots of their squares, in place; products past the largest finite number become it. */
int dsq_times_roots(int path, any_float *values, const any_float *squares, size_t n, float least)
{
    if (!dsq_has_path(path))
        return BAD_TABLES;
    times_roots_paths[path](values, squares, n, least);
    return 0;
}

/* Multiply values by the units of the octaves of their squares, in place, like `dsq_times_roots`.
 *
 * units: of the first two octaves; each is half of that two octaves on.
 */
int dsq_times_octaves(int path, any_float *values, const any_float *squares, size_t n, const float *units)
{
    if (!dsq_has_path(path))
        return BAD_TABLES;
    times_octaves_paths[path](values, squares, n, units);
    return 0;
}

/* The sum of all lanes, in their order. */
static INLINE double total_of(const double *lanes)
{
    double total = 0;
    for (int j = 0; j < SUMS; j++)
        total += lanes[j];
    return total;
}

/* Write the lengths of n elements, 0 for those that do not count, and return how many do. */
static INLINE size_t write_lengths(const any_float *values, const uint8_t *codes, size_t n, const float *inverse,
                                   float *out)
{
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++)
        out[i] = inverse[codes[i]];
    for (size_t i = 0; i < n; i++) {
        float length = sqrtf(values[i]) * out[i];
        int counts = length > 0;  /* no NaN, of values that are stored exactly */
        out[i] = counts ? length : 0;
        count += (uint32_t)counts;
    }
    return count;
}

/* Write the lengths of a row, and return how many count; their sum is in *total. */
static INLINE size_t lengths_of_row_body(const any_float *values, const uint8_t *codes, size_t n, const float *inverse,
                                         float *out, double *total)
{
    double lanes[SUMS] = {0};
    size_t count = 0, whole = n / SUMS * SUMS;
    for (size_t at = 0; at < whole; at += TILE) {
        size_t size = whole - at < TILE ? whole - at : TILE;
        count += write_lengths(values + at, codes + at, size, inverse, out + at);
        for (size_t i = 0; i < size; i += SUMS)
            for (int j = 0; j < SUMS; j++)
                lanes[j] += out[at + i + j];
    }
    count += write_lengths(values + whole, codes + whole, n - whole, inverse, out + whole);
    double sum = total_of(lanes);
    for (size_t i = whole; i < n; i++)
        sum += out[i];
    *total = sum;
    return count;
}

/* Add the lengths of a row, times `share`, to those of its columns. */
static INLINE void add_lengths_body(const float *lengths, size_t n, double share, double *sums)
{
    for (size_t i = 0; i < n; i++)
        sums[i] += lengths[i] * share;
}

static INLINE void count_lengths_body(const float *lengths, size_t n, double *counts)
{
    for (size_t i = 0; i < n; i++)
        counts[i] += lengths[i] > 0 ? 1.0 : 0.0;
}

#define PARAMETERS (const any_float *values, const uint8_t *codes, size_t n, const float *inverse, float *out, \
                    double *total)
ON_EACH_PATH(size_t, lengths_of_row, PARAMETERS, (values, codes, n, inverse, out, total))
#undef PARAMETERS
ON_EACH_PATH(void, add_lengths, (const float *lengths, size_t n, double share, double *sums), (lengths, n, share, sums))
ON_EACH_PATH(void, count_lengths, (const float *lengths, size_t n, double *counts), (lengths, n, counts))

/* Add the lengths of the steps of n elements to the sums of their rows and columns (`_add_rows`).
 *
 * inverse: one over the root of the level of each of 256 codes. offset: column of the first element. by_row, by_column:
 * whether rows and columns have sums of their own. rows: 2 n_rows sums, then numbers; one of all rows unless by_row.
 * sums: 2 width, of columns, where there are as many as `columns`, or, of a block in one or two rows, of its elements.
 * space: for the elements of a row, as many as the block has at most. BAD_TABLES if an array is too small.
 */
int dsq_step_lengths(int path, const any_float *values, const uint8_t *codes, size_t n, const float *inverse,
                     size_t offset, size_t columns, int by_row, int by_column, double *rows, size_t n_rows,
                     double *sums, size_t width, float *space, size_t room)
{
    if (!dsq_has_path(path) || offset >= columns || offset + n < n || !n_rows ||
        (by_row && n && (offset + n - 1) / columns >= n_rows) || (by_column && width != columns && width < n) ||
        room < (columns < n ? columns : n))
        return BAD_TABLES;
    double full = 0;
    for (size_t at = 0, row = 0, column = offset; at < n; row += by_row ? 1 : 0, column = 0) {
        size_t size = columns - column < n - at ? columns - column : n - at;
        double total;
        size_t count = lengths_of_row_paths[path](values + at, codes + at, size, inverse, space, &total);
        rows[row] += total;
        rows[n_rows + row] += (double)count;
        if (by_column && total > 0) {
            size_t place = width == columns ? column : at;
            add_lengths_paths[path](space, size, by_row ? (double)count / total : 1.0, sums + place);
            if (count == width)
                full += 1;
            else
                count_lengths_paths[path](space, size, sums + width + place);
        }
        at += size;
    }
    for (size_t i = 0; full && i < width; i++)
        sums[width + i] += full;
    return 0;
}

/* Whether a second moment, by its bits, is positive, normal and finite. */
static INLINE int is_held(int32_t bits) { return (bits >= 1 << 23) & (bits < 255 << 23); }

/* Bits of values that are held: how many of these there are, and the sum, the least and the most of their bits. */
typedef struct { size_t count; int64_t sum; int32_t least, most; } held_bits;

static INLINE void look_at_bits_body(const any_float *values, size_t n, held_bits *row)
{
    int32_t least = INT32_MAX, most = 0;
    row->count = 0, row->sum = 0;
    for (size_t at = 0; at < n; at += 1 << 15) {  /* sums of halves of so many do not overflow */
        size_t size = n - at < 1 << 15 ? n - at : 1 << 15;
        uint32_t count = 0, low = 0, high = 0;
        for (size_t i = 0; i < size; i++) {
            uint32_t bits = bits_of(values[at + i]), held = (uint32_t)is_held((int32_t)bits), mask = 0 - held;
            int32_t own = (int32_t)(bits & mask), other = (int32_t)((bits & mask) | (~mask & INT32_MAX));
            count += held, low += (uint32_t)own & 0xFFFF, high += (uint32_t)own >> 16;
            most = own > most ? own : most;
            least = other < least ? other : least;
        }
        row->count += count;
        row->sum += (int64_t)low + ((int64_t)high << 16);
    }
    row->least = least, row->most = most;
}

static INLINE double ratio_of(float value, double inverse)
{
    return (double)(is_held((int32_t)bits_of(value)) ? value : 0) * inverse;
}

static INLINE void add_ratios_body(const any_float *values, size_t n, double inverse, double *sums)
{
    for (size_t i = 0; i < n; i++)
        sums[i] += ratio_of(values[i], inverse);
}

static INLINE void count_held_body(const any_float *values, size_t n, double *counts)
{
    for (size_t i = 0; i < n; i++)
        counts[i] += is_held((int32_t)bits_of(values[i])) ? 1.0 : 0.0;
}

static INLINE double sum_ratios_body(const any_float *values, size_t n, double inverse)
{
    double lanes[SUMS] = {0};
    size_t whole = n / SUMS * SUMS;
    for (size_t i = 0; i < whole; i += SUMS)
        for (int j = 0; j < SUMS; j++)
            lanes[j] += ratio_of(values[i + j], inverse);
    double total = total_of(lanes);
    for (size_t i = whole; i < n; i++)
        total += ratio_of(values[i], inverse);
    return total;
}

ON_EACH_PATH(void, look_at_bits, (const any_float *values, size_t n, held_bits *row), (values, n, row))
ON_EACH_PATH(void, add_ratios, (const any_float *values, size_t n, double inverse, double *sums),
             (values, n, inverse, sums))
ON_EACH_PATH(void, count_held, (const any_float *values, size_t n, double *counts), (values, n, counts))
ON_EACH_PATH(double, sum_ratios, (const any_float *values, size_t n, double inverse), (values, n, inverse))

/* Find the numbers of rows, and add ratios to the sums of columns (`_add_sums`).
 *
 * values: rows x columns. inverses: one over the scale of each of 2048 eighths of an octave from 2**-127 on.
 * numbers: of rows, if by_row. sums: 2 columns, or 2 without by_column: ratios, then numbers of values. reach: 2.
 */
int dsq_row_sums(int path, const any_float *values, size_t rows, size_t columns, int by_row, int by_column,
                 const double *inverses, double *numbers, double *sums, int32_t *reach)
{
    if (!dsq_has_path(path))
        return BAD_TABLES;
    double full = 0;
    int32_t low = 0, high = 0;
    for (size_t i = 0; i < rows; i++, values += columns) {
        held_bits row;
        look_at_bits_paths[path](values, columns, &row);
        int32_t number = ONE;  /* of values from the first normal one to the last finite one, so 8 to 2040 */
        if (by_row) {
            if (row.count)
                number = (int32_t)rint((double)row.sum * (1.0 / (1 << EIGHTH)) / (double)row.count);
            numbers[i] = number - ONE;
        }
        if (row.count) {
            int32_t middle = (int32_t)((uint32_t)number << EIGHTH), least = row.least - middle;
            int32_t most = row.most - middle;
            low = least < low ? least : low;
            high = most > high ? most : high;
        }
        if (!by_column) {
            sums[0] += sum_ratios_paths[path](values, columns, inverses[number]);
            sums[1] += (double)row.count;
            continue;
        }
        add_ratios_paths[path](values, columns, inverses[number], sums);
        if (row.count == columns)
            full += 1;
        else
            count_held_paths[path](values, columns, sums + columns);
    }
    for (size_t i = 0; full && i < columns; i++)
        sums[columns + i] += full;
    reach[0] = low, reach[1] = high;
    return 0;
}

/* Sum waves with the length of a part of a cell over the values in each part (`measure_part_waves`).
 *
 * low, steps: lower edge and parts per unit of the cell of each of 256 codes. waves: two, of n_places. space: 768 parts
 * zeros. out: 3 sums.
 */
int dsq_part_waves(const any_float *values, const uint8_t *codes, size_t n, double inverse, const double *low,
                   const double *steps, size_t parts, const double *waves, size_t n_places, double *space, double *out)
{
    if (!parts || parts > 256 || !n_places)
        return BAD_TABLES;
    const double edge = parts > 2 ? 1 : 0, last = (double)parts - edge;
    double zero[256];  /* the part around zero */
    for (int code = 0; code < 256; code++)
        zero[code] = floor(-low[code] * steps[code]);
    double *counts = space, *first = space + 256 * parts, *second = first + 256 * parts;
    for (size_t i = 0; i < n; i++) {
        double step = steps[codes[i]], position = ((double)values[i] * inverse - low[codes[i]]) * step;
        if (!(step > 0 && edge <= position && position < last))
            continue;
        int32_t part = (int32_t)position;
        if (fabs(part - zero[codes[i]]) <= AROUND_ZERO)
            continue;
        size_t place = (size_t)(int64_t)((position - part) * (double)n_places), index = codes[i] * parts + (size_t)part;
        place = place < n_places ? place : n_places - 1;
        first[index] += waves[place];
        second[index] += waves[n_places + place];
        counts[index] += 1;
    }
    double total = 0, pairs = 0, elements = 0;
    for (size_t i = 0; i < 256 * parts; i++) {
        total += (first[i] * first[i] + second[i] * second[i]) / 2 - counts[i];
        pairs += counts[i] * counts[i];
        elements += counts[i];
    }
    out[0] = total, out[1] = pairs, out[2] = elements;
    return 0;
}
