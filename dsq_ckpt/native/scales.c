/* Second moments times the scales of their rows and columns, and over these (coding/scales.py). */
#include <float.h>
#include <math.h>

#include "paths.h"

#define ONE (127 << 3)          /* eighths of an octave up to 1.0 */
#define FIRST (1 << 3)          /* those of the smallest scale */
#define FINAL ((255 << 3) - 1)  /* and of the largest one */
#define TILE 512                /* elements */

/* Multiply or divide n elements of one row; `out` may be `values`. `row`: eighths of its own; columns: as many of each
   element; scales: of all sums. */
typedef void apply_row(const any_float *values, size_t n, int row, const int16_t *columns, const float *scales,
                       any_float *out);
/* The same by one scale. */
typedef void apply_scale(const any_float *values, size_t n, float scale, any_float *out);

/* Zero and subnormal numbers become zero. */
static INLINE float quotient_of(float value, float scale)
{
    float quotient = value / scale;
    return fabsf(value) < FLT_MIN ? 0 : quotient;
}

static INLINE int32_t place_of(int32_t number) { return number < FIRST ? FIRST : number > FINAL ? FINAL : number; }

/* Find the scales of up to TILE elements: look-ups by themselves, so that compilers fill vectors with the rest. */
static INLINE void find_scales(size_t n, int row, const int16_t *columns, const float *scales, float *out)
{
    int32_t places[TILE];
    for (size_t i = 0; i < n; i++)
        places[i] = place_of(row + columns[i]);
    for (size_t i = 0; i < n; i++)
        out[i] = scales[places[i]];
}

static INLINE void apply_row_body(const any_float *values, size_t n, int row, const int16_t *columns,
                                  const float *scales, any_float *out, int divides)
{
    float own[TILE];
    for (size_t at = 0; at < n; at += TILE) {
        size_t count = n - at < TILE ? n - at : TILE;
        find_scales(count, row, columns + at, scales, own);
        for (size_t i = 0; i < count; i++)
            out[at + i] = divides ? quotient_of(values[at + i], own[i]) : within(values[at + i] * own[i]);
    }
}

static void multiply_row_plain(const any_float *values, size_t n, int row, const int16_t *columns, const float *scales,
                               any_float *out)
{
    apply_row_body(values, n, row, columns, scales, out, 0);
}

static void divide_row_plain(const any_float *values, size_t n, int row, const int16_t *columns, const float *scales,
                             any_float *out)
{
    apply_row_body(values, n, row, columns, scales, out, 1);
}

static INLINE void multiply_body(const any_float *values, size_t n, float scale, any_float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = within(values[i] * scale);
}

static INLINE void divide_body(const any_float *values, size_t n, float scale, any_float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = quotient_of(values[i], scale);
}

#define PARAMETERS (const any_float *values, size_t n, float scale, any_float *out)
ON_EACH_PATH(void, multiply, PARAMETERS, (values, n, scale, out))
ON_EACH_PATH(void, divide, PARAMETERS, (values, n, scale, out))

#ifdef DSQ_X86
#include <immintrin.h>

/* The scales of eight elements. A scale is one of eight, those of an octave from 1 on, times a power of two. */
__attribute__((target("avx2"))) static inline __m256 scales_of(__m256i own, const int16_t *columns, __m256i eighths)
{
    __m256i number = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)columns));
    number = _mm256_max_epi32(_mm256_add_epi32(number, own), _mm256_set1_epi32(FIRST));
    number = _mm256_min_epi32(number, _mm256_set1_epi32(FINAL));
    __m256i octave = _mm256_slli_epi32(_mm256_srli_epi32(number, 3), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_permutevar8x32_epi32(eighths, number), octave));
}

__attribute__((target("avx2"))) static inline __m256i eighths_of(const float *scales)
{
    return _mm256_sub_epi32(_mm256_loadu_si256((const __m256i *)(scales + ONE)), _mm256_set1_epi32(127 << 23));
}

__attribute__((target("avx2"))) static void multiply_row_avx2(const any_float *values, size_t n, int row,
                                                              const int16_t *columns, const float *scales,
                                                              any_float *out)
{
    const __m256 least = _mm256_set1_ps(-FLT_MAX), most = _mm256_set1_ps(FLT_MAX);
    const __m256i own = _mm256_set1_epi32(row), eighths = eighths_of(scales);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 product = _mm256_mul_ps(_mm256_loadu_ps((const float *)(values + i)),
                                       scales_of(own, columns + i, eighths));
        product = _mm256_min_ps(most, _mm256_max_ps(least, product));  /* of NaN, the second one */
        _mm256_storeu_ps((float *)(out + i), product);
    }
    multiply_row_plain(values + i, n - i, row, columns + i, scales, out + i);
}

__attribute__((target("avx2"))) static void divide_row_avx2(const any_float *values, size_t n, int row,
                                                            const int16_t *columns, const float *scales,
                                                            any_float *out)
{
    const __m256 least = _mm256_set1_ps(FLT_MIN), sign = _mm256_set1_ps(-0.0f);
    const __m256i own = _mm256_set1_epi32(row), eighths = eighths_of(scales);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 value = _mm256_loadu_ps((const float *)(values + i));
        __m256 quotient = _mm256_div_ps(value, scales_of(own, columns + i, eighths));
        __m256 small = _mm256_cmp_ps(_mm256_andnot_ps(sign, value), least, _CMP_LT_OQ);
        _mm256_storeu_ps((float *)(out + i), _mm256_andnot_ps(small, quotient));
    }
    divide_row_plain(values + i, n - i, row, columns + i, scales, out + i);
}

static apply_row *const multiplies[] = {multiply_row_plain, multiply_row_avx2, multiply_row_avx2};
static apply_row *const divides[] = {divide_row_plain, divide_row_avx2, divide_row_avx2};
#else
static apply_row *const multiplies[] = {multiply_row_plain};
static apply_row *const divides[] = {divide_row_plain};
#endif

/* Apply the scales of a matrix to n flat elements of it, from `start` on.
 *
 * by_row, by_column: a number for each, or one for all. scales: 2048, of eighths of an octave from 2**-127 on. Returns
 * BAD_TABLES if a row or a column has no number.
 */
static int apply(apply_row *of_row, apply_scale *of_all, const any_float *values, size_t n, size_t start,
                 size_t columns, const int16_t *by_row, size_t n_rows, const int16_t *by_column, size_t n_columns,
                 const float *scales, any_float *out)
{
    if (!columns || !n_rows || (n_columns != 1 && n_columns != columns) || start + n < n ||
        (n && n_rows != 1 && (start + n - 1) / columns >= n_rows))
        return BAD_TABLES;
    for (size_t at = start, stop = start + n; at < stop;) {
        size_t row = at / columns, column = at % columns, done = at - start;
        size_t count = columns - column < stop - at ? columns - column : stop - at;
        int number = ONE + by_row[n_rows == 1 ? 0 : row];
        if (n_columns == 1)
            of_all(values + done, count, scales[place_of(number + by_column[0])], out + done);
        else
            of_row(values + done, count, number, by_column + column, scales, out + done);
        at += count;
    }
    return 0;
}

/* Multiply in place, see `apply`. */
int dsq_scale(int path, any_float *values, size_t n, size_t start, size_t columns, const int16_t *by_row, size_t n_rows,
              const int16_t *by_column, size_t n_columns, const float *scales)
{
    if (!dsq_has_path(path))
        return BAD_TABLES;
    return apply(multiplies[path], multiply_paths[path], values, n, start, columns, by_row, n_rows, by_column,
                 n_columns, scales, values);
}

/* Set `out` to the quotients of elements and scales, see `apply`. */
int dsq_divide(int path, const any_float *values, size_t n, size_t start, size_t columns, const int16_t *by_row,
               size_t n_rows, const int16_t *by_column, size_t n_columns, const float *scales, any_float *out)
{
    if (!dsq_has_path(path))
        return BAD_TABLES;
    return apply(divides[path], divide_paths[path], values, n, start, columns, by_row, n_rows, by_column, n_columns,
                 scales, out);
}
