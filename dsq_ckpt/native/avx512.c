/* Groups of 32 lanes in two vectors of AVX-512. */
#include "lanes.h"

#ifdef DSQ_X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt")))
#define INLINE static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512dq,popcnt")))

INLINE __m512i bytes(const void *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }

/* Entries of a table: on AMD's processors faster than a gather of 16, and not slower on Intel's. */
INLINE __m512i lookup(const uint32_t *table, __m512i places)
{
    __m128i four[4] = {_mm512_castsi512_si128(places), _mm512_extracti32x4_epi32(places, 1),
                       _mm512_extracti32x4_epi32(places, 2), _mm512_extracti32x4_epi32(places, 3)};
    for (int i = 0; i < 4; i++) {
        uint64_t a = (uint64_t)_mm_cvtsi128_si64(four[i]), b = (uint64_t)_mm_extract_epi64(four[i], 1);
        four[i] = _mm_cvtsi32_si128((int)table[(uint32_t)a]);
        four[i] = _mm_insert_epi32(four[i], (int)table[a >> 32], 1);
        four[i] = _mm_insert_epi32(four[i], (int)table[(uint32_t)b], 2);
        four[i] = _mm_insert_epi32(four[i], (int)table[b >> 32], 3);
    }
    __m512i low = _mm512_castsi256_si512(_mm256_set_m128i(four[1], four[0]));
    return _mm512_inserti64x4(low, _mm256_set_m128i(four[3], four[2]), 1);
}

/* The symbols of 16 lanes, each in the low 8 bits of its place; x is not refilled. `symbols`, if `skewed`: those that
   the lanes have if each has the first one of its row, which then needs no table. */
INLINE __m512i step(const decoder *d, __m512i info, __m512i *x, int skewed, __m512i symbols)
{
    const __m512i low12 = _mm512_set1_epi32(0xFFF), one = _mm512_set1_epi32(1);
    __m512i bits = _mm512_and_si512(info, _mm512_set1_epi32(15));
    __m512i left = _mm512_and_si512(_mm512_srli_epi32(info, 4), low12);
    __m512i slots = _mm512_sllv_epi32(one, bits), q = _mm512_srlv_epi32(*x, bits);
    __m512i slot = _mm512_and_si512(*x, _mm512_sub_epi32(slots, one)), rest = _mm512_sub_epi32(slots, left);
    __mmask16 others = _mm512_cmplt_epu32_mask(slot, left);
    if (skewed && !others) {
        *x = _mm512_add_epi32(_mm512_mullo_epi32(rest, q), _mm512_sub_epi32(slot, left));
        return symbols;
    }
    __m512i base = _mm512_and_si512(_mm512_srli_epi32(info, 12), _mm512_set1_epi32(0xFFFF0));
    __m512i entry = lookup(d->entries, _mm512_add_epi32(base, _mm512_min_epu32(slot, left)));
    __m512i freq = _mm512_mask_and_epi32(rest, others, _mm512_srli_epi32(entry, 8), low12);
    *x = _mm512_add_epi32(_mm512_mullo_epi32(freq, q), _mm512_sub_epi32(slot, _mm512_srli_epi32(entry, 20)));
    return entry;
}

INLINE __m512i refilled(__m512i x, const uint8_t **p)
{
    __mmask16 needs = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(LOW));
    __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)*p));
    *p += 2 * __builtin_popcount(needs);
    return _mm512_mask_or_epi32(x, needs, _mm512_slli_epi32(x, 16), _mm512_maskz_expand_epi32(needs, words));
}

/* Where the rows of a decoder are: there is one, they fit into two or four vectors, or they are in memory. */
enum { ALONE, FEW, SOME, MANY };

/* Entries of up to 32 rows, or of up to 64 if `some`. */
INLINE __m512i row_of(const __m512i table[4], __m512i i, int some)
{
    __m512i low = _mm512_permutex2var_epi32(table[0], i, table[1]);
    if (!some)
        return low;
    __mmask16 sixth = _mm512_test_epi32_mask(i, _mm512_set1_epi32(32));
    return _mm512_mask_mov_epi32(low, sixth, _mm512_permutex2var_epi32(table[2], i, table[3]));
}

/* `skewed`: all lanes often have the first symbols of their rows, at most 64. */
INLINE int64_t decode(const decoder *d, const uint8_t *parent, uint8_t *out, size_t groups, uint32_t *states,
                      const uint8_t **words, const uint8_t *end, int kind, int skewed)
{
    const uint8_t *p = *words;
    uint32_t copy[2][64] = {{0}};
    for (size_t r = 0; r < d->n_rows && r < 64; r++) {
        copy[0][r] = d->rows[r];
        copy[1][r] = d->entries[(d->rows[r] >> 16 << 4) + (d->rows[r] >> 4 & 0xFFF)];
    }
    __m512i rows[4], firsts[4], x[2], s[2], info = _mm512_set1_epi32((int)d->rows[0]);
    for (int v = 0; v < 4; v++) {
        rows[v] = _mm512_loadu_si512(copy[0] + 16 * v);
        firsts[v] = _mm512_loadu_si512(copy[1] + 16 * v);
    }
    size_t g = 0;
    for (int v = 0; v < 2; v++)
        x[v] = _mm512_loadu_si512(states + 16 * v);
    for (; g < groups && end - p >= 2 * LANES; g++) {
        for (int v = 0; v < 2; v++) {
            __m512i i = kind == ALONE ? info : bytes(parent + LANES * g + 16 * v), first = info;
            if (kind == FEW || kind == SOME)
                info = row_of(rows, i, kind == SOME);
            if (skewed)
                first = row_of(firsts, i, kind == SOME);
            if (kind == MANY)
                info = lookup(d->rows, i);
            s[v] = step(d, info, x + v, skewed, first);
        }
        for (int v = 0; v < 2; v++)
            x[v] = refilled(x[v], &p);
        __m256i symbols = _mm256_set_m128i(_mm512_cvtepi32_epi8(s[1]), _mm512_cvtepi32_epi8(s[0]));
        _mm256_storeu_si256((__m256i *)(out + LANES * g), symbols);
        if (__builtin_expect(_mm256_cmpeq_epi8_mask(symbols, _mm256_set1_epi8(-1)) != 0, 0)) {
            for (int v = 0; v < 2; v++)
                _mm512_storeu_si512(states + 16 * v, x[v]);
            int error = dsq_decode_escapes(d, kind != ALONE ? parent + LANES * g : NULL, out + LANES * g, LANES, states,
                                           &p, end);
            if (error)
                return error;
            for (int v = 0; v < 2; v++)
                x[v] = _mm512_loadu_si512(states + 16 * v);
        }
    }
    for (int v = 0; v < 2; v++)
        _mm512_storeu_si512(states + 16 * v, x[v]);
    *words = p;
    return (int64_t)g;
}

TARGET int64_t dsq_decode_avx512(const decoder *d, const uint8_t *parent, uint8_t *out, size_t groups,
                                 uint32_t *states, const uint8_t **p, const uint8_t *end)
{
    int skewed = (size_t)(end - *p) < groups / 3;  /* a twelfth of a bit per code */
    if (!parent)
        return decode(d, NULL, out, groups, states, p, end, ALONE, 0);
    if (d->n_rows > 64)
        return decode(d, parent, out, groups, states, p, end, MANY, 0);
    if (d->n_rows > 32)
        return skewed ? decode(d, parent, out, groups, states, p, end, SOME, 1)
                      : decode(d, parent, out, groups, states, p, end, SOME, 0);
    return skewed ? decode(d, parent, out, groups, states, p, end, FEW, 1)
                  : decode(d, parent, out, groups, states, p, end, FEW, 0);
}

/* Take 16 entries into their states. */
INLINE __m512i encoded(__m512i x, __m512i entry, uint8_t **p)
{
    const __m512i one = _mm512_set1_epi32(1);
    __m512i freq = _mm512_srli_epi32(entry, 16), bits = _mm512_and_si512(entry, _mm512_set1_epi32(15));
    __m512i start = _mm512_and_si512(_mm512_srli_epi32(entry, 4), _mm512_set1_epi32(0xFFF));
    __mmask16 full = _mm512_cmpge_epu32_mask(
        _mm512_srlv_epi32(x, _mm512_sub_epi32(_mm512_set1_epi32(32), bits)), freq);
    unsigned count = (unsigned)__builtin_popcount(full);
    __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x));
    *p -= 2 * count;
    _mm256_mask_storeu_epi16(*p, (__mmask16)((1u << count) - 1), words);
    x = _mm512_mask_srli_epi32(x, full, x, 16);
    /* x / freq < 2**22: the quotient of floats, of two roundings, is 1 off at most */
    __m512i q = _mm512_cvttps_epi32(_mm512_div_ps(_mm512_cvtepu32_ps(x), _mm512_cvtepi32_ps(freq)));
    __m512i remainder = _mm512_sub_epi32(x, _mm512_mullo_epi32(q, freq));
    q = _mm512_add_epi32(q, _mm512_srai_epi32(remainder, 31));
    q = _mm512_mask_add_epi32(q, _mm512_cmpge_epi32_mask(remainder, freq), q, one);
    __m512i others = _mm512_sub_epi32(_mm512_sllv_epi32(one, bits), freq);
    return _mm512_add_epi32(_mm512_add_epi32(x, start), _mm512_mullo_epi32(q, others));
}

INLINE int encode(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t groups, uint32_t *states,
                  uint8_t **words, int with_parent)
{
    const __m128i shift = _mm_cvtsi32_si128((int)e->shift);
    uint8_t *p = *words;
    __m512i x[2], entry[2];
    for (int v = 0; v < 2; v++)
        x[v] = _mm512_loadu_si512(states + 16 * v);
    for (size_t at = groups * LANES; at > 0;) {
        __mmask16 special = 0;
        at -= LANES;
        for (int v = 0; v < 2; v++) {
            __m512i place = bytes(codes + at + 16 * v);
            if (with_parent)
                place = _mm512_or_si512(place, _mm512_sll_epi32(bytes(parent + at + 16 * v), shift));
            entry[v] = _mm512_i32gather_epi32(place, e->table, 4);
            special |= _mm512_cmplt_epu32_mask(entry[v], _mm512_set1_epi32(1 << 16));
        }
        if (__builtin_expect(special, 0)) {
            for (int v = 0; v < 2; v++)
                _mm512_storeu_si512(states + 16 * v, x[v]);
            int error = dsq_encode_group(e, with_parent ? parent + at : NULL, codes + at, LANES, states, &p);
            if (error)
                return error;
            for (int v = 0; v < 2; v++)
                x[v] = _mm512_loadu_si512(states + 16 * v);
            continue;
        }
        for (int v = 1; v >= 0; v--)
            x[v] = encoded(x[v], entry[v], &p);
    }
    for (int v = 0; v < 2; v++)
        _mm512_storeu_si512(states + 16 * v, x[v]);
    *words = p;
    return 0;
}

TARGET int dsq_encode_avx512(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t groups,
                             uint32_t *states, uint8_t **p)
{
    return parent ? encode(e, parent, codes, groups, states, p, 1) : encode(e, NULL, codes, groups, states, p, 0);
}
#endif
