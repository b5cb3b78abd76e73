/* Groups of two blocks in turns, those of one in the waits of the other, or of one. A state is two words, in a vector
 * each, so that one vector has a half of all 32 lanes, and four places of a table are 64 bits. */
#include "lanes.h"

#ifdef DSQ_X86
#include <immintrin.h>

#define FEATURES "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,popcnt,bmi"
#define TARGET __attribute__((target(FEATURES)))
#define INLINE static inline __attribute__((always_inline, target(FEATURES)))
#define OPAQUE(v) __asm__("" : "+v"(v)) /* compilers are not to know what is in it */

/* Where symbols are looked up: of one row with few entries, in registers; of one row, or of up to 64. */
enum { SMALL, ALONE, FEW, NEITHER };
#define PLACES 1024

/* A row of up to 64 symbols: which of them has each place of its entries, and what belongs to them. */
typedef struct {
    _Alignas(64) uint8_t which[PLACES];
    uint8_t symbols[64];
    uint16_t freqs[64], starts[64];
} small_row;

/* What a block has in registers. `rows`: bits and number of entries of each row; `bases`: their first entries. */
typedef struct {
    __m512i high, low, rows[2], bases[2], freqs[2], starts[2], symbols, codes;
    const uint8_t *p;
} one;

static int make_small(const decoder *d, small_row *row)
{
    uint32_t info = d->rows[0], left = info >> 4 & 0xFFF, symbol = 0;
    const uint32_t *entries = d->entries + (size_t)(info >> 16 << 4);
    if (left >= PLACES)
        return 0;
    memset(row, 0, sizeof *row);
    for (uint32_t at = 0; at <= left; at++) {
        symbol += at && (at == left || entries[at] != entries[at - 1]);
        if (symbol >= 64)
            return 0;
        row->which[at] = (uint8_t)symbol;
        row->symbols[symbol] = (uint8_t)entries[at];
        row->freqs[symbol] = (uint16_t)(at == left ? (1u << (info & 15)) - left : entries[at] >> 8 & 0xFFF);
        row->starts[symbol] = (uint16_t)(entries[at] >> 20);
    }
    return 1;
}

static int kind_of(const opened *s, small_row *row)
{
    if (s->parent && (s->d.n_rows > 64 || (size_t)(s->end - s->p) < s->n / LANES / 3))
        return NEITHER;  /* or most groups have the first symbols of their rows, which dsq_decode_avx512 is fast at */
    for (size_t r = 0; r < (s->parent ? s->d.n_rows : 1); r++)
        if ((s->d.rows[r] >> 16 << 4) + (s->d.rows[r] >> 4 & 0xFFF) > 0xFFFF)
            return NEITHER;
    return s->parent ? FEW : make_small(&s->d, row) ? SMALL : ALONE;
}

INLINE void begin(one *x, const opened *s, const small_row *row, int kind)
{
    uint16_t rows[64] = {0}, bases[64] = {0}, highs[LANES], lows[LANES];
    for (int j = 0; j < LANES; j++)
        highs[j] = (uint16_t)(s->states[j] >> 16), lows[j] = (uint16_t)s->states[j];
    for (size_t r = 0; r < (kind == FEW ? s->d.n_rows : 1); r++)
        rows[r] = (uint16_t)s->d.rows[r], bases[r] = (uint16_t)(s->d.rows[r] >> 16 << 4);
    x->high = _mm512_loadu_si512(highs), x->low = _mm512_loadu_si512(lows);
    for (int v = 0; v < 2; v++) {
        x->rows[v] = kind == FEW ? _mm512_loadu_si512(rows + 32 * v) : _mm512_set1_epi16((short)rows[0]);
        x->bases[v] = kind == FEW ? _mm512_loadu_si512(bases + 32 * v) : _mm512_set1_epi16((short)bases[0]);
        if (kind == SMALL) {
            x->freqs[v] = _mm512_loadu_si512(row->freqs + 32 * v);
            x->starts[v] = _mm512_loadu_si512(row->starts + 32 * v);
        }
    }
    if (kind == SMALL)
        x->symbols = _mm512_loadu_si512(row->symbols);
    x->p = s->p;
}

INLINE void end(const one *x, opened *s)
{
    uint16_t highs[LANES], lows[LANES];
    _mm512_storeu_si512(highs, x->high);
    _mm512_storeu_si512(lows, x->low);
    for (int j = 0; j < LANES; j++)
        s->states[j] = (uint32_t)highs[j] << 16 | lows[j];
    s->p = x->p;
}

INLINE __m128i four(const uint32_t *table, long long places)
{
    uint64_t at = (uint64_t)places;
    __m128i found = _mm_cvtsi32_si128((int)table[at & 0xFFFF]);
    found = _mm_insert_epi32(found, (int)table[at >> 16 & 0xFFFF], 1);
    found = _mm_insert_epi32(found, (int)table[at >> 32 & 0xFFFF], 2);
    return _mm_insert_epi32(found, (int)table[at >> 48], 3);
}

/* Entries of a table: faster than two gathers. */
INLINE __m512i sixteen(const uint32_t *table, __m128i low, __m128i high)
{
    __m128i a = four(table, _mm_cvtsi128_si64(low)), b = four(table, _mm_extract_epi64(low, 1));
    __m128i c = four(table, _mm_cvtsi128_si64(high)), d = four(table, _mm_extract_epi64(high, 1));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set_m128i(b, a)), _mm256_set_m128i(d, c), 1);
}

/* The bytes at the places of a table of 1024, in the low byte of each word. */
INLINE __m512i bytes_at(const uint8_t *table, __m512i places)
{
    __m512i t[8];
    for (int i = 0; i < 8; i++)
        t[i] = _mm512_permutex2var_epi8(_mm512_load_si512(table + 128 * i), places,
                                        _mm512_load_si512(table + 128 * i + 64));
    for (int bit = 7, n = 4; n > 0; bit++, n /= 2) {
        __mmask32 upper = _mm512_test_epi16_mask(places, _mm512_set1_epi16((short)(1 << bit)));
        for (int i = 0; i < n; i++)
            t[i] = _mm512_mask_mov_epi16(t[2 * i], upper, t[2 * i + 1]);
    }
    return t[0];
}

/* Decode a group: codes in the low bytes of words. */
INLINE void step(one *x, const decoder *d, const small_row *small, const uint8_t *parent, int kind)
{
    const __m512i all = _mm512_set1_epi16(-1), low4 = _mm512_set1_epi16(15), low12 = _mm512_set1_epi16(0xFFF);
    __m512i info = x->rows[0], base = x->bases[0], freq, start;
    if (kind == FEW) {
        __m512i row = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)parent));
        info = _mm512_permutex2var_epi16(x->rows[0], row, x->rows[1]);
        base = _mm512_permutex2var_epi16(x->bases[0], row, x->bases[1]);
    }
    __m512i bits = _mm512_and_si512(info, low4), left = _mm512_srli_epi16(info, 4);
    __m512i outside = _mm512_sllv_epi16(all, bits), slot = _mm512_andnot_si512(outside, x->low);
    __m512i at = _mm512_min_epu16(slot, left);
    if (kind == SMALL) {
        __m512i which = _mm512_and_si512(bytes_at(small->which, at), _mm512_set1_epi16(0xFF));
        freq = _mm512_permutex2var_epi16(x->freqs[0], which, x->freqs[1]);
        start = _mm512_permutex2var_epi16(x->starts[0], which, x->starts[1]);
        x->codes = _mm512_permutexvar_epi8(which, x->symbols);
    } else {
        __mmask32 others = _mm512_cmplt_epu16_mask(slot, left);
        __m512i rest = _mm512_sub_epi16(_mm512_sub_epi16(_mm512_setzero_si512(), outside), left), lower, upper, odd, even;
        at = _mm512_add_epi16(at, base);
        lower = sixteen(d->entries, _mm512_castsi512_si128(at), _mm512_extracti32x4_epi32(at, 1));
        upper = sixteen(d->entries, _mm512_extracti32x4_epi32(at, 2), _mm512_extracti32x4_epi32(at, 3));
        even = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24, 22, 20, 18,
                                16, 14, 12, 10, 8, 6, 4, 2, 0);
        odd = _mm512_sub_epi16(even, all);
        x->codes = _mm512_permutex2var_epi16(lower, even, upper);
        start = _mm512_permutex2var_epi16(lower, odd, upper);
        freq = _mm512_and_si512(_mm512_shldi_epi16(start, x->codes, 8), low12);
        freq = _mm512_mask_mov_epi16(rest, others, freq);
        start = _mm512_srli_epi16(start, 4);
    }
    /* frequency * (state >> bits) + slot - start, of 32 bits */
    __m512i more = _mm512_sub_epi16(slot, start);
    __m512i low = _mm512_shrdv_epi16(x->low, x->high, bits), high = _mm512_srlv_epi16(x->high, bits);
    high = _mm512_add_epi16(_mm512_mullo_epi16(freq, high), _mm512_mulhi_epu16(freq, low));
    low = _mm512_add_epi16(_mm512_mullo_epi16(freq, low), more);
    __mmask32 carry = _mm512_cmplt_epu16_mask(low, more);
    __mmask32 needs = _kandn_mask32(carry, _mm512_testn_epi16_mask(high, high));
    high = _mm512_mask_sub_epi16(high, carry, high, all);
    __m512i words = _mm512_loadu_si512(x->p);
    OPAQUE(words); /* AMD's processors are slow to expand what is in memory */
    x->p += 2 * (size_t)__builtin_popcount(needs);
    x->high = _mm512_mask_mov_epi16(high, needs, low);
    x->low = _mm512_mask_mov_epi16(low, needs, _mm512_maskz_expand_epi16(needs, words));
}

/* Store the codes of a group; those that are escaped are decoded. */
INLINE int finish(one *x, const opened *s, size_t at)
{
    __m256i codes = _mm512_cvtepi16_epi8(x->codes);
    uint32_t escapes = _mm256_cmpeq_epi8_mask(codes, _mm256_set1_epi8(-1));
    _mm256_storeu_si256((__m256i *)(s->out + at), codes);
    if (__builtin_expect(!escapes, 1))
        return 0;
    uint16_t highs[LANES], lows[LANES];
    _mm512_storeu_si512(highs, x->high);
    _mm512_storeu_si512(lows, x->low);
    for (; escapes; escapes &= escapes - 1) {
        int j = __builtin_ctz(escapes);
        uint32_t state = (uint32_t)highs[j] << 16 | lows[j];
        const uint8_t *p = x->p;
        int error = decode_escaped(&s->d, s->parent ? s->parent[at + j] : 0, &state, &p, s->end, s->out + at + j);
        if (error)
            return error;
        x->p = p;
        x->high = _mm512_mask_set1_epi16(x->high, 1u << j, (short)(state >> 16));
        x->low = _mm512_mask_set1_epi16(x->low, 1u << j, (short)state);
    }
    return 0;
}

/* Decode groups of a block, and of another one if there is one. */
INLINE void decode(opened *s, opened *t, const small_row *small, int kind)
{
    one x, y;
    size_t at = 0, n = (!t || s->n < t->n ? s->n : t->n) / LANES * LANES;
    begin(&x, s, small, kind);
    if (t)
        begin(&y, t, small + 1, kind);
    for (; at < n && s->end - x.p >= 2 * LANES && (!t || t->end - y.p >= 2 * LANES); at += LANES) {
        step(&x, &s->d, small, kind == FEW ? s->parent + at : NULL, kind);
        if (t)
            step(&y, &t->d, small + 1, kind == FEW ? t->parent + at : NULL, kind);
        if (__builtin_expect(s->error = finish(&x, s, at), 0))
            n = 0;
        if (t && __builtin_expect(t->error = finish(&y, t, at), 0))
            n = 0;
    }
    end(&x, s);
    s->done = at;
    if (t) {
        end(&y, t);
        t->done = at;
    }
}

TARGET void dsq_decode_in_words(opened *s, opened *t)
{
    small_row small[2];
    int kind = kind_of(s, small), other = t ? kind_of(t, small + 1) : kind;
    if (!t && kind == SMALL)
        decode(s, NULL, small, SMALL);
    else if (t && kind == SMALL && other == SMALL)
        decode(s, t, small, SMALL);
    else if (t && kind <= ALONE && other <= ALONE)
        decode(s, t, small, ALONE);
    else if (t && kind == FEW && other == FEW)
        decode(s, t, small, FEW);
}
#endif
