/* Codes and refinement symbols of values, tile by tile, so that nothing but the results leaves the cache. What
 * kernels/cpu.py and kernels/cpu_pack.py do in four passes, with the same results bit for bit. */
#include "bins.h"

#define TILE 4096 /* values; a multiple of 8, as eight symbols of some bits are whole bytes */

enum { BAD_PARENT = -1, BAD_CELL = -2 };

/* Cells of codes: refinement symbols are clip(floor((u - low) * steps), 0, top). */
typedef struct { double low, steps; } cell;

typedef struct {
    const cell *of_code;  /* 256 of them */
    double top;
    int of_bits;          /* u is the magnitude bits of a value, not the value */
} cells;

typedef void scale(const uint8_t *x, size_t n, float inv_scale, float *scaled);
typedef void find_places(const bins *t, const uint8_t *x, float inv_scale, const uint8_t *parent, size_t n,
                         uint32_t *index);
/* codes[i] = table[index[i]] */
typedef void look_up(const uint8_t *table, const uint32_t *index, size_t n, uint8_t *codes);
typedef void refine_values(const cells *t, const float *x, const uint8_t *codes, unsigned largest, size_t n,
                           uint8_t *symbols);
/* Pack n symbols of `bits` bits; n is a multiple of 8, and `out` has 8 bytes more than they take. */
typedef void pack_symbols(const uint8_t *symbols, unsigned bits, size_t n, uint8_t *out);

static inline __attribute__((always_inline)) void find_places_body(const bins *t, const uint8_t *x, float inv_scale,
                                                                   const uint8_t *parent, size_t n, uint32_t *index)
{
    const int32_t under = t->under, top = t->top, per_sign = t->per_sign, size = 2 * per_sign;
    for (size_t i = 0; i < n; i++) {
        uint32_t own = load32(x + 4 * i);
        if (inv_scale != 1)  /* as flushed subnormal numbers would differ */
            own = bits_of(float_of(own) * inv_scale);
        int32_t key = (int32_t)(own >> KEY_SHIFT), magnitude = key & MAGNITUDE, inside = magnitude - under;
        inside = inside < 0 ? 0 : inside;
        inside = inside > top ? top : inside;
        inside += (magnitude >= NON_FINITE) + (key > MAGNITUDE ? per_sign : 0);
        index[i] = (uint32_t)(parent ? inside + parent[i] * size : inside);
    }
}

static inline __attribute__((always_inline)) void refine_body(const cells *t, const float *x,
                                                              const uint8_t *codes, size_t n, uint8_t *symbols)
{
    const cell *const of_code = t->of_code;
    const double top = t->top;
    const int of_bits = t->of_bits;
    double places[64];  /* look-ups first, so that compilers fill vectors with the rest */
    for (size_t at = 0; at < n; at += 64) {
        size_t count = n - at < 64 ? n - at : 64;
        for (size_t i = 0; i < count; i++) {
            double u = of_bits ? (double)(int32_t)(bits_of(x[at + i]) & 0x7FFFFFFF) : (double)x[at + i];
            places[i] = (u - of_code[codes[at + i]].low) * of_code[codes[at + i]].steps;
        }
        for (size_t i = 0; i < count; i++) {
            double place = places[i] > 0 ? places[i] : 0;  /* 0 for NaN, too */
            symbols[at + i] = (uint8_t)(int32_t)(place < top ? place : top);
        }
    }
}

static inline __attribute__((always_inline)) void scale_body(const uint8_t *x, size_t n, float inv_scale, float *scaled)
{
    for (size_t i = 0; i < n; i++) {
        float own;
        memcpy(&own, x + i * sizeof own, sizeof own);
        scaled[i] = own * inv_scale;
    }
}

static void scale_plain(const uint8_t *x, size_t n, float inv_scale, float *scaled)
{
    scale_body(x, n, inv_scale, scaled);
}

static void find_places_plain(const bins *t, const uint8_t *x, float inv_scale, const uint8_t *parent, size_t n,
                              uint32_t *index)
{
    find_places_body(t, x, inv_scale, parent, n, index);
}

static void look_up_plain(const uint8_t *table, const uint32_t *index, size_t n, uint8_t *codes)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t pairs[4], word = 0;  /* two places in one load: the loop is bound by the number of loads and stores */
        memcpy(pairs, index + i, sizeof pairs);
        for (int j = 0; j < 4; j++)
            word |= (uint64_t)(table[(uint32_t)pairs[j]] | table[pairs[j] >> 32] << 8) << 16 * j;
        memcpy(codes + i, &word, 8);
    }
    for (; i < n; i++)
        codes[i] = table[index[i]];
}

static void refine_plain(const cells *t, const float *x, const uint8_t *codes, unsigned largest, size_t n,
                         uint8_t *symbols)
{
    (void)largest;
    refine_body(t, x, codes, n, symbols);
}

/* Symbols are joined to pairs, then pairs to fours, then fours: three steps for eight of them. */
static void pack_plain(const uint8_t *symbols, unsigned bits, size_t n, uint8_t *out)
{
    const uint64_t one = (1ull << bits) - 1, two = (1ull << 2 * bits) - 1, four = (1ull << 4 * bits) - 1;
    const uint64_t ones = one * 0x0001000100010001ull, twos = two * 0x0000000100000001ull;
    for (size_t i = 0; i < n; i += 8, out += bits) {
        uint64_t word;
        memcpy(&word, symbols + i, 8);
        word = (word & ones) | (word >> 8 & ones) << bits;
        word = (word & twos) | (word >> 16 & twos) << 2 * bits;
        word = (word & four) | (word >> 32 & four) << 4 * bits;
        memcpy(out, &word, 8);
    }
}

#ifdef DSQ_X86
#include <immintrin.h>

__attribute__((target("avx2"))) static void scale_avx2(const uint8_t *x, size_t n, float inv_scale, float *scaled)
{
    scale_body(x, n, inv_scale, scaled);
}

/* Rows have fewer than 2**15 places, so that a product of halves is the whole one. */
__attribute__((target("avx2"))) static void find_places_avx2(const bins *t, const uint8_t *x, float inv_scale,
                                                             const uint8_t *parent, size_t n, uint32_t *index)
{
    const __m256i under = _mm256_set1_epi32(t->under), top = _mm256_set1_epi32(t->top);
    const __m256i per_sign = _mm256_set1_epi32(t->per_sign), size = _mm256_set1_epi32(2 * t->per_sign);
    const __m256i magnitude_bits = _mm256_set1_epi32(MAGNITUDE), finite = _mm256_set1_epi32(NON_FINITE - 1);
    const __m256 factor = _mm256_set1_ps(inv_scale);
    const int scales = inv_scale != 1;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i own = _mm256_loadu_si256((const __m256i *)(x + 4 * i));
        if (scales)
            own = _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(own), factor));
        __m256i magnitude = _mm256_and_si256(_mm256_srli_epi32(own, KEY_SHIFT), magnitude_bits);
        __m256i place = _mm256_max_epi32(_mm256_sub_epi32(magnitude, under), _mm256_setzero_si256());
        place = _mm256_sub_epi32(_mm256_min_epi32(place, top), _mm256_cmpgt_epi32(magnitude, finite));
        place = _mm256_add_epi32(place, _mm256_and_si256(_mm256_srai_epi32(own, 31), per_sign));
        if (parent) {
            __m256i row = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(parent + i)));
            place = _mm256_add_epi32(place, _mm256_madd_epi16(row, size));
        }
        _mm256_storeu_si256((__m256i *)(index + i), place);
    }
    find_places_body(t, x + 4 * i, inv_scale, parent ? parent + i : NULL, n - i, index + i);
}

__attribute__((target(ALL_OF_AVX512))) static void find_places_avx512(const bins *t, const uint8_t *x, float inv_scale,
                                                             const uint8_t *parent, size_t n, uint32_t *index)
{
    const __m512i under = _mm512_set1_epi32(t->under), top = _mm512_set1_epi32(t->top);
    const __m512i per_sign = _mm512_set1_epi32(t->per_sign), size = _mm512_set1_epi32(2 * t->per_sign);
    const __m512i magnitude_bits = _mm512_set1_epi32(MAGNITUDE), one = _mm512_set1_epi32(1);
    const __m512i non_finite = _mm512_set1_epi32(NON_FINITE);
    const __m512 factor = _mm512_set1_ps(inv_scale);
    const int scales = inv_scale != 1;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i own = _mm512_loadu_si512(x + 4 * i);
        if (scales)
            own = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(own), factor));
        __m512i magnitude = _mm512_and_si512(_mm512_srli_epi32(own, KEY_SHIFT), magnitude_bits);
        __m512i place = _mm512_max_epi32(_mm512_sub_epi32(magnitude, under), _mm512_setzero_si512());
        place = _mm512_min_epi32(place, top);
        place = _mm512_mask_add_epi32(place, _mm512_cmpge_epi32_mask(magnitude, non_finite), place, one);
        place = _mm512_mask_add_epi32(place, _mm512_movepi32_mask(own), place, per_sign);
        if (parent) {
            __m512i row = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(parent + i)));
            place = _mm512_add_epi32(place, _mm512_mullo_epi32(row, size));
        }
        _mm512_storeu_si512(index + i, place);
    }
    find_places_body(t, x + 4 * i, inv_scale, parent ? parent + i : NULL, n - i, index + i);
}

/* A code moves from memory to its place in a vector in one instruction, with which stores of single codes go. */
__attribute__((target("avx2"))) static void look_up_avx2(const uint8_t *table, const uint32_t *index, size_t n,
                                                         uint8_t *codes)
{
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i found = _mm_setzero_si128();
        uint64_t pair;
#define INSERT(j) \
    memcpy(&pair, index + i + 2 * j, 8); \
    found = _mm_insert_epi8(found, table[(uint32_t)pair], 2 * j); \
    found = _mm_insert_epi8(found, table[pair >> 32], 2 * j + 1);
        INSERT(0) INSERT(1) INSERT(2) INSERT(3) INSERT(4) INSERT(5) INSERT(6) INSERT(7)
#undef INSERT
        _mm_storeu_si128((__m128i *)(codes + i), found);
    }
    look_up_plain(table, index + i, n - i, codes + i);
}

__attribute__((target("avx2"))) static void refine_avx2(const cells *t, const float *x, const uint8_t *codes,
                                                        unsigned largest, size_t n, uint8_t *symbols)
{
    const double *of_code = (const double *)t->of_code;
    const __m256d top = _mm256_set1_pd(t->top), zero = _mm256_setzero_pd();
    const __m128i magnitude = _mm_set1_epi32(0x7FFFFFFF);
    const int of_bits = t->of_bits;
    size_t i = 0;
    (void)largest;
    for (; i + 16 <= n; i += 16) {
        __m128i parts[4];
        for (int j = 0; j < 4; j++) {
            const uint8_t *code = codes + i + 4 * j;
            const float *own = x + i + 4 * j;
            __m256d even = _mm256_set_m128d(_mm_loadu_pd(of_code + 2 * code[2]), _mm_loadu_pd(of_code + 2 * code[0]));
            __m256d odd = _mm256_set_m128d(_mm_loadu_pd(of_code + 2 * code[3]), _mm_loadu_pd(of_code + 2 * code[1]));
            __m256d low = _mm256_unpacklo_pd(even, odd), steps = _mm256_unpackhi_pd(even, odd);
            __m256d u = of_bits ? _mm256_cvtepi32_pd(_mm_and_si128(_mm_loadu_si128((const __m128i *)own), magnitude))
                                : _mm256_cvtps_pd(_mm_loadu_ps(own));
            /* Of NaN and a number, the second operand. */
            __m256d place = _mm256_max_pd(_mm256_mul_pd(_mm256_sub_pd(u, low), steps), zero);
            parts[j] = _mm256_cvttpd_epi32(_mm256_min_pd(place, top));
        }
        parts[0] = _mm_packus_epi16(_mm_packs_epi32(parts[0], parts[1]), _mm_packs_epi32(parts[2], parts[3]));
        _mm_storeu_si128((__m128i *)(symbols + i), parts[0]);
    }
    refine_body(t, x + i, codes + i, n - i, symbols + i);
}

/* Up to 32 cells lie in four vectors. */
__attribute__((target(ALL_OF_AVX512))) static void refine_avx512(const cells *t, const float *x, const uint8_t *codes,
                                                        unsigned largest, size_t n, uint8_t *symbols)
{
    double lows[32], all_steps[32];
    __m512d low[4], steps[4];
    const __m512d top = _mm512_set1_pd(t->top), zero = _mm512_setzero_pd();
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    const int many = largest >= 16, of_bits = t->of_bits;
    size_t i = 0;
    if (largest >= 32) {
        refine_avx2(t, x, codes, largest, n, symbols);
        return;
    }
    for (int v = 0; v < 32; v++)
        lows[v] = t->of_code[v].low, all_steps[v] = t->of_code[v].steps;
    for (int v = 0; v < 4; v++)
        low[v] = _mm512_loadu_pd(lows + 8 * v), steps[v] = _mm512_loadu_pd(all_steps + 8 * v);
    for (; i + 8 <= n; i += 8) {
        __m512i code = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(codes + i)));
        __m256i own = _mm256_loadu_si256((const __m256i *)(x + i));
        __m512d u = of_bits ? _mm512_cvtepi32_pd(_mm256_and_si256(own, magnitude))
                            : _mm512_cvtps_pd(_mm256_castsi256_ps(own));
        __m512d from = _mm512_permutex2var_pd(low[0], code, low[1]);
        __m512d by = _mm512_permutex2var_pd(steps[0], code, steps[1]);
        if (many) {
            __mmask8 upper = _mm512_test_epi64_mask(code, _mm512_set1_epi64(16));
            from = _mm512_mask_mov_pd(from, upper, _mm512_permutex2var_pd(low[2], code, low[3]));
            by = _mm512_mask_mov_pd(by, upper, _mm512_permutex2var_pd(steps[2], code, steps[3]));
        }
        __m512d place = _mm512_max_pd(_mm512_mul_pd(_mm512_sub_pd(u, from), by), zero);
        __m256i symbol = _mm512_cvttpd_epi32(_mm512_min_pd(place, top));
        _mm_storel_epi64((__m128i *)(symbols + i), _mm256_cvtepi32_epi8(symbol));
    }
    refine_body(t, x + i, codes + i, n - i, symbols + i);
}

__attribute__((target("avx2,bmi2"))) static void pack_bmi2(const uint8_t *symbols, unsigned bits, size_t n,
                                                           uint8_t *out)
{
    const uint64_t places = ((1ull << bits) - 1) * 0x0101010101010101ull;
    for (size_t i = 0; i < n; i += 8, out += bits) {
        uint64_t word;
        memcpy(&word, symbols + i, 8);
        word = _pext_u64(word, places);
        memcpy(out, &word, 8);
    }
}

static scale *const scales[] = {scale_plain, scale_avx2, scale_avx2};
static find_places *const finds[] = {find_places_plain, find_places_avx2, find_places_avx512};
static look_up *const look_ups[] = {look_up_plain, look_up_avx2, look_up_avx2};
static refine_values *const refines[] = {refine_plain, refine_avx2, refine_avx512};
static pack_symbols *const packs[] = {pack_plain, pack_bmi2, pack_bmi2};

#else
static scale *const scales[] = {scale_plain};
static find_places *const finds[] = {find_places_plain};
static look_up *const look_ups[] = {look_up_plain};
static refine_values *const refines[] = {refine_plain};
static pack_symbols *const packs[] = {pack_plain};
#endif

const float *dsq_scale_values(int path, const void *given, size_t n, float inv_scale, float *scaled)
{
    if (inv_scale == 1 && (uintptr_t)given % sizeof(float) == 0)
        return given;
    scales[path](given, n, inv_scale, scaled);
    return scaled;
}

void dsq_find_places(int path, const bins *t, const void *x, float inv_scale, const uint8_t *parent, size_t n,
                     uint32_t *index)
{
    finds[path](t, x, inv_scale, parent, n, index);
}

/* Set the codes of n values and, if bits is not 0, pack their refinement symbols; return 0 or an error: a previous code
 * is no row of the table, or a code has no cell.
 *
 * x: float32, at any address. inv_scale: multiplies values first. [lo, hi): window of keys. table: of each of `rows`
 * previous codes, 2 * (hi - lo + 3) codes. parent: previous codes; NULL: all values have the table's row `row`.
 * cells_of: of 256 codes, of which `n_cells` may occur, the lower bound and one over the width of a part, in units of
 * the value or, if of_bits, of its magnitude bits. packed: (n * bits + 7) / 8 bytes.
 */
int dsq_quantize(int path, const void *x, size_t n, float inv_scale, int lo, int hi, const uint8_t *table,
                 size_t rows, const uint8_t *parent, size_t row, uint8_t *codes, unsigned bits, int of_bits,
                 const cell *cells_of, size_t n_cells, uint8_t *packed)
{
    uint32_t index[TILE];
    float scaled[TILE];
    uint8_t symbols[TILE], stream[TILE + 8];
    if (!dsq_has_path(path) || !is_window(lo, hi) || (!parent && row >= rows))
        return BAD_PARENT;
    if (bits > 8 || n_cells > 256)
        return BAD_CELL;
    const bins of_row = bins_of(lo, hi);
    const cells own_cells = {cells_of, (double)((1u << bits) - 1), of_bits};
    const int packing = dsq_fast_bits() ? path : 0;
    const uint8_t *first = table + (parent ? 0 : row * 2 * (size_t)of_row.per_sign);
    for (size_t at = 0; at < n; at += TILE) {
        size_t count = n - at < TILE ? n - at : TILE;
        const uint8_t *before = parent ? parent + at : NULL;
        if (before && largest_of(before, count) >= rows)
            return BAD_PARENT;
        const uint8_t *given = (const uint8_t *)x + at * sizeof(float);
        finds[path](&of_row, given, inv_scale, before, count, index);
        look_ups[path](first, index, count, codes + at);
        if (!bits)
            continue;
        const float *own = dsq_scale_values(path, given, count, inv_scale, scaled);
        unsigned largest = largest_of(codes + at, count);
        if (largest >= n_cells)
            return BAD_CELL;
        refines[path](&own_cells, own, codes + at, largest, count, symbols);
        size_t padded = (count + 7) / 8 * 8, size = (count * bits + 7) / 8;
        memset(symbols + count, 0, padded - count);
        packs[packing](symbols, bits, padded, stream);
        memcpy(packed + at / 8 * bits, stream, size);
    }
    return 0;
}

/* Set the refinement symbols of n values, float32 at any address, whose codes are known; BAD_CELL if one has no cell.
 * The arguments are those of dsq_quantize. */
int dsq_refine(int path, const void *x, size_t n, float inv_scale, const uint8_t *codes, unsigned bits, int of_bits,
               const cell *cells_of, size_t n_cells, uint8_t *symbols)
{
    float scaled[TILE];
    if (!dsq_has_path(path) || !bits || bits > 8 || n_cells > 256)
        return BAD_CELL;
    const cells own_cells = {cells_of, (double)((1u << bits) - 1), of_bits};
    for (size_t at = 0; at < n; at += TILE) {
        size_t count = n - at < TILE ? n - at : TILE;
        unsigned largest = largest_of(codes + at, count);
        if (largest >= n_cells)
            return BAD_CELL;
        const float *own = dsq_scale_values(path, (const uint8_t *)x + at * sizeof(float), count, inv_scale, scaled);
        refines[path](&own_cells, own, codes + at, largest, count, symbols + at);
    }
    return 0;
}

/* Pack the low `bits` bits, 1 to 8, of n symbols into (n * bits + 7) / 8 bytes. */
int dsq_pack(int path, const uint8_t *symbols, size_t n, unsigned bits, uint8_t *packed)
{
    uint8_t last[TILE], stream[TILE + 8];
    if (!dsq_has_path(path) || !bits || bits > 8)
        return BAD_CELL;
    const int packing = dsq_fast_bits() ? path : 0;
    for (size_t at = 0; at < n; at += TILE) {
        size_t count = n - at < TILE ? n - at : TILE, padded = (count + 7) / 8 * 8;
        const uint8_t *own = symbols + at;
        if (padded > count) {
            memcpy(last, own, count);
            memset(last + count, 0, padded - count);
            own = last;
        }
        packs[packing](own, bits, padded, stream);
        memcpy(packed + at / 8 * bits, stream, (count * bits + 7) / 8);
    }
    return 0;
}
