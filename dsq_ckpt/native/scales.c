/* Second moments times the scales of their rows and columns (quantization/matrix_scales.py). */
#include <float.h>

#include "lanes.h"

#define ONE (127 << 3)          /* eighths of an octave up to 1.0 */
#define FIRST (1 << 3)          /* those of the smallest scale */
#define FINAL ((255 << 3) - 1)  /* and of the largest one */

/* Multiply elements of one row; products past the largest finite number become that number. `row`: eighths of its own;
   columns: as many of each element; scales: of all sums. */
typedef void multiply_row(float *values, size_t n, int row, const int16_t *columns, const float *scales);

static float within(float product)
{
    product = product < -FLT_MAX ? -FLT_MAX : product;
    return product > FLT_MAX ? FLT_MAX : product;
}

static float scale_of(int number, const float *scales)
{
    return scales[number < FIRST ? FIRST : number > FINAL ? FINAL : number];
}

static void multiply_row_plain(float *values, size_t n, int row, const int16_t *columns, const float *scales)
{
    for (size_t i = 0; i < n; i++)
        values[i] = within(values[i] * scale_of(row + columns[i], scales));
}

#ifdef DSQ_X86
#include <immintrin.h>

/* A scale is one of eight, those of an octave from 1 on, times a power of two. */
__attribute__((target("avx2"))) static void multiply_row_avx2(float *values, size_t n, int row, const int16_t *columns,
                                                              const float *scales)
{
    const __m256 least = _mm256_set1_ps(-FLT_MAX), most = _mm256_set1_ps(FLT_MAX);
    const __m256i own = _mm256_set1_epi32(row), first = _mm256_set1_epi32(FIRST), final = _mm256_set1_epi32(FINAL);
    const __m256i eighths = _mm256_sub_epi32(_mm256_loadu_si256((const __m256i *)(scales + ONE)),
                                             _mm256_set1_epi32(127 << 23));
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i number = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(columns + i)));
        number = _mm256_min_epi32(_mm256_max_epi32(_mm256_add_epi32(number, own), first), final);
        __m256i octave = _mm256_slli_epi32(_mm256_srli_epi32(number, 3), 23);
        __m256 scale = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_permutevar8x32_epi32(eighths, number), octave));
        __m256 product = _mm256_mul_ps(_mm256_loadu_ps(values + i), scale);
        product = _mm256_min_ps(most, _mm256_max_ps(least, product));  /* of NaN, the second one */
        _mm256_storeu_ps(values + i, product);
    }
    multiply_row_plain(values + i, n - i, row, columns + i, scales);
}

static multiply_row *const multiplies[] = {multiply_row_plain, multiply_row_avx2, multiply_row_avx2};
#else
static multiply_row *const multiplies[] = {multiply_row_plain};
#endif

/* Multiply n flat elements of a matrix, from `start` on, in place; BAD_TABLES if a row or a column has no number.
 *
 * by_row, by_column: a number for each, or one for all. scales: 2048, of eighths of an octave from 2**-127 on.
 */
int dsq_scale(int path, float *values, size_t n, size_t start, size_t columns, const int16_t *by_row, size_t n_rows,
              const int16_t *by_column, size_t n_columns, const float *scales)
{
    if (!dsq_has_path(path) || !columns || !n_rows || (n_columns != 1 && n_columns != columns) || start + n < n ||
        (n && n_rows != 1 && (start + n - 1) / columns >= n_rows))
        return BAD_TABLES;
    for (size_t at = start, stop = start + n; at < stop;) {
        size_t row = at / columns, column = at % columns;
        size_t count = columns - column < stop - at ? columns - column : stop - at;
        int number = ONE + by_row[n_rows == 1 ? 0 : row];
        float *own = values + (at - start);
        if (n_columns == 1) {
            float scale = scale_of(number + by_column[0], scales);
            for (size_t i = 0; i < count; i++)
                own[i] = within(own[i] * scale);
        } else
            multiplies[path](own, count, number, by_column + column, scales);
        at += count;
    }
    return 0;
}
