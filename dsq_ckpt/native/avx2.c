/* Groups of 32 lanes in four vectors of AVX2. */
#include "lanes.h"

#ifdef DSQ_X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,popcnt")))
#define INLINE static inline __attribute__((always_inline, target("avx2,fma,popcnt")))

/* spread[m]: for each lane in m, how many lanes of m are below it: the place of its word. */
/* pack[m]: the lanes of m, in order, at the end. */
static uint64_t spread[256], pack[256];

__attribute__((constructor)) static void fill(void)
{
    for (int m = 0; m < 256; m++) {
        uint64_t below = 0, last = 0;
        for (int j = 0, k = 0; j < 8; j++) {
            below |= (uint64_t)k << (8 * j);
            k += m >> j & 1;
        }
        for (int j = 7, k = 7; j >= 0; j--)
            if (m >> j & 1)
                last |= (uint64_t)j << (8 * k--);
        spread[m] = below, pack[m] = last;
    }
}

INLINE __m256i bytes(const void *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }

/* The symbols of 8 lanes, each in a 32-bit place; x is not refilled. */
INLINE __m256i step(const decoder *d, __m256i info, __m256i *x)
{
    const __m256i low12 = _mm256_set1_epi32(0xFFF), one = _mm256_set1_epi32(1);
    __m256i bits = _mm256_and_si256(info, _mm256_set1_epi32(15));
    __m256i left = _mm256_and_si256(_mm256_srli_epi32(info, 4), low12);
    __m256i base = _mm256_and_si256(_mm256_srli_epi32(info, 12), _mm256_set1_epi32(0xFFFF0));
    __m256i slots = _mm256_sllv_epi32(one, bits), q = _mm256_srlv_epi32(*x, bits);
    __m256i slot = _mm256_and_si256(*x, _mm256_sub_epi32(slots, one));
    __m256i at = _mm256_min_epu32(slot, left), first = _mm256_cmpeq_epi32(at, left);
    __m256i entry = _mm256_i32gather_epi32((const int *)d->entries, _mm256_add_epi32(base, at), 4);
    __m256i freq = _mm256_and_si256(_mm256_srli_epi32(entry, 8), low12), start = _mm256_srli_epi32(entry, 20);
    freq = _mm256_blendv_epi8(freq, _mm256_sub_epi32(slots, left), first);
    *x = _mm256_add_epi32(_mm256_mullo_epi32(freq, q), _mm256_sub_epi32(slot, start));
    return _mm256_and_si256(entry, _mm256_set1_epi32(0xFF));
}

INLINE __m256i refilled(__m256i x, const uint8_t **p)
{
    __m256i needs = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
    unsigned mask = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(needs));
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)*p));
    words = _mm256_permutevar8x32_epi32(words, bytes(spread + mask));
    *p += 2 * __builtin_popcount(mask);
    return _mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, 16), words), needs);
}

/* Where the rows of a decoder are: there is one, they fit into two, four or eight vectors, or they are in memory. */
enum { ALONE, FEW, SOME, MORE, MANY };

/* A where bit `bit` of i is not set, B where it is. */
INLINE __m256i either(__m256i a, __m256i b, __m256i i, int bit)
{
    __m256 mask = _mm256_castsi256_ps(_mm256_slli_epi32(i, 31 - bit));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), mask));
}

INLINE __m256i row_of_16(const __m256i *rows, __m256i i)
{
    return either(_mm256_permutevar8x32_epi32(rows[0], i), _mm256_permutevar8x32_epi32(rows[1], i), i, 3);
}

/* Row `i` of `count` rows (16, 32 or 64) in vectors of 8. */
INLINE __m256i row_of(const __m256i *rows, __m256i i, int count)
{
    __m256i row = row_of_16(rows, i);
    if (count > 16)
        row = either(row, row_of_16(rows + 2, i), i, 4);
    if (count > 32)
        row = either(row, either(row_of_16(rows + 4, i), row_of_16(rows + 6, i), i, 4), i, 5);
    return row;
}

INLINE int64_t decode(const decoder *d, const uint8_t *parent, uint8_t *out, size_t groups, uint32_t *states,
                      const uint8_t **words, const uint8_t *end, int kind)
{
    uint32_t copy[64] = {0};
    __m256i rows[8];
    memcpy(copy, d->rows, 4 * (d->n_rows < 64 ? d->n_rows : 64));
    for (int v = 0; v < 8; v++)
        rows[v] = _mm256_loadu_si256((const __m256i *)(copy + 8 * v));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const uint8_t *p = *words;
    __m256i x[4], s[4], info = _mm256_set1_epi32((int)d->rows[0]);
    size_t g = 0;
    for (int v = 0; v < 4; v++)
        x[v] = _mm256_loadu_si256((const __m256i *)(states + 8 * v));
    for (; g < groups && end - p >= 2 * LANES; g++) {
        for (int v = 0; v < 4; v++) {
            __m256i i = kind == ALONE ? _mm256_setzero_si256() : bytes(parent + LANES * g + 8 * v);
            if (kind != ALONE && kind != MANY)
                info = row_of(rows, i, kind == FEW ? 16 : kind == SOME ? 32 : 64);
            if (kind == MANY)
                info = _mm256_i32gather_epi32((const int *)d->rows, i, 4);
            s[v] = step(d, info, x + v);
        }
        for (int v = 0; v < 4; v++)
            x[v] = refilled(x[v], &p);
        __m256i symbols = _mm256_packus_epi16(_mm256_packus_epi32(s[0], s[1]), _mm256_packus_epi32(s[2], s[3]));
        symbols = _mm256_permutevar8x32_epi32(symbols, order);
        _mm256_storeu_si256((__m256i *)(out + LANES * g), symbols);
        if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpeq_epi8(symbols, _mm256_set1_epi8(-1))), 0)) {
            for (int v = 0; v < 4; v++)
                _mm256_storeu_si256((__m256i *)(states + 8 * v), x[v]);
            int error = dsq_decode_escapes(d, kind != ALONE ? parent + LANES * g : NULL, out + LANES * g, LANES, states,
                                           &p, end);
            if (error)
                return error;
            for (int v = 0; v < 4; v++)
                x[v] = _mm256_loadu_si256((const __m256i *)(states + 8 * v));
        }
    }
    for (int v = 0; v < 4; v++)
        _mm256_storeu_si256((__m256i *)(states + 8 * v), x[v]);
    *words = p;
    return (int64_t)g;
}

TARGET int64_t dsq_decode_avx2(const decoder *d, const uint8_t *parent, uint8_t *out, size_t groups, uint32_t *states,
                               const uint8_t **p, const uint8_t *end)
{
    if (!parent)
        return decode(d, NULL, out, groups, states, p, end, ALONE);
    if (d->n_rows <= 16)
        return decode(d, parent, out, groups, states, p, end, FEW);
    if (d->n_rows <= 32)
        return decode(d, parent, out, groups, states, p, end, SOME);
    return d->n_rows <= 64 ? decode(d, parent, out, groups, states, p, end, MORE)
                           : decode(d, parent, out, groups, states, p, end, MANY);
}

/* Take 8 entries into their states. */
INLINE __m256i encoded(__m256i x, __m256i entry, uint8_t **p)
{
    const __m256i one = _mm256_set1_epi32(1), order = _mm256_setr_epi32(0, 1, 4, 5, 0, 1, 4, 5);
    __m256i freq = _mm256_srli_epi32(entry, 16), bits = _mm256_and_si256(entry, _mm256_set1_epi32(15));
    __m256i start = _mm256_and_si256(_mm256_srli_epi32(entry, 4), _mm256_set1_epi32(0xFFF));
    __m256i high = _mm256_srlv_epi32(x, _mm256_sub_epi32(_mm256_set1_epi32(32), bits));
    __m256i fits = _mm256_cmpgt_epi32(freq, high);
    unsigned mask = 0xFF ^ (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(fits));
    __m256i words = _mm256_permutevar8x32_epi32(_mm256_blend_epi16(x, _mm256_setzero_si256(), 0xAA), bytes(pack + mask));
    words = _mm256_permutevar8x32_epi32(_mm256_packus_epi32(words, words), order);
    _mm_storeu_si128((__m128i *)(*p - 16), _mm256_castsi256_si128(words));
    *p -= 2 * __builtin_popcount(mask);
    x = _mm256_blendv_epi8(_mm256_srli_epi32(x, 16), x, fits);
    /* x / freq < 2**22: the quotient of floats, of three roundings, is 1 off at most */
    __m256 upper = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
    __m256 lower = _mm256_cvtepi32_ps(_mm256_blend_epi16(x, _mm256_setzero_si256(), 0xAA));
    __m256 value = _mm256_fmadd_ps(upper, _mm256_set1_ps(65536.0f), lower);
    __m256i q = _mm256_cvttps_epi32(_mm256_div_ps(value, _mm256_cvtepi32_ps(freq)));
    __m256i remainder = _mm256_sub_epi32(x, _mm256_mullo_epi32(q, freq));
    q = _mm256_add_epi32(q, _mm256_srai_epi32(remainder, 31));
    q = _mm256_sub_epi32(q, _mm256_cmpgt_epi32(remainder, _mm256_sub_epi32(freq, one)));
    __m256i others = _mm256_sub_epi32(_mm256_sllv_epi32(one, bits), freq);
    return _mm256_add_epi32(_mm256_add_epi32(x, start), _mm256_mullo_epi32(q, others));
}

INLINE int encode(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t groups, uint32_t *states,
                  uint8_t **words, int with_parent)
{
    const __m128i shift = _mm_cvtsi32_si128((int)e->shift);
    uint8_t *p = *words;
    __m256i x[4], entry[4];
    for (int v = 0; v < 4; v++)
        x[v] = _mm256_loadu_si256((const __m256i *)(states + 8 * v));
    for (size_t at = groups * LANES; at > 0;) {
        __m256i special = _mm256_setzero_si256();
        at -= LANES;
        for (int v = 0; v < 4; v++) {
            __m256i place = bytes(codes + at + 8 * v);
            if (with_parent)
                place = _mm256_or_si256(place, _mm256_sll_epi32(bytes(parent + at + 8 * v), shift));
            entry[v] = _mm256_i32gather_epi32((const int *)e->table, place, 4);
            __m256i none = _mm256_cmpeq_epi32(_mm256_srli_epi32(entry[v], 16), _mm256_setzero_si256());
            special = _mm256_or_si256(special, none);
        }
        if (__builtin_expect(_mm256_movemask_epi8(special), 0)) {
            for (int v = 0; v < 4; v++)
                _mm256_storeu_si256((__m256i *)(states + 8 * v), x[v]);
            int error = dsq_encode_group(e, with_parent ? parent + at : NULL, codes + at, LANES, states, &p);
            if (error)
                return error;
            for (int v = 0; v < 4; v++)
                x[v] = _mm256_loadu_si256((const __m256i *)(states + 8 * v));
            continue;
        }
        for (int v = 3; v >= 0; v--)
            x[v] = encoded(x[v], entry[v], &p);
    }
    for (int v = 0; v < 4; v++)
        _mm256_storeu_si256((__m256i *)(states + 8 * v), x[v]);
    *words = p;
    return 0;
}

TARGET int dsq_encode_avx2(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t groups,
                           uint32_t *states, uint8_t **p)
{
    return parent ? encode(e, parent, codes, groups, states, p, 1) : encode(e, NULL, codes, groups, states, p, 0);
}
#endif
