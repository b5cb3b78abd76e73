/* Values of codes: one table entry for each code and refinement symbol, tile by tile, so that nothing but the values
 * leaves the cache. */
#include "lanes.h"

#define TILE 4096 /* codes; a multiple of 64, as eight symbols of some bits are whole bytes */

enum { BAD_CODE = -1, BAD_SYMBOL = -2 };

/* Unpack n symbols of `bits` bits, of which eight are `bits` bytes; `size` bytes are there. */
typedef void unpack_symbols(const uint8_t *packed, size_t size, unsigned bits, uint8_t *out, size_t n);
/* out[i] = table[codes[i] << bits | symbols[i]]; symbols may be NULL. `last`: nobody reads `out` soon. */
typedef void look_up(const float *table, size_t entries, unsigned bits, const uint8_t *codes, const uint8_t *symbols,
                     size_t n, float *out, int last);

/* How many of n codes, at most a tile, are `wanted`; `largest`: the largest of all. */
typedef int64_t look_at(const uint8_t *codes, size_t n, int wanted, uint8_t *largest);

static int64_t look_at_plain(const uint8_t *codes, size_t n, int wanted, uint8_t *largest)
{
    uint8_t hits[64] = {0}, code = (uint8_t)wanted;  /* of eight bits, so that compilers fill vectors with them */
    int64_t found = 0;
    size_t i = 0;
    *largest = largest_of(codes, n);
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 64; j++)
            hits[j] += codes[i + j] == code;
    for (; i < n; i++)
        found += codes[i] == code;
    for (int j = 0; j < 64; j++)
        found += hits[j];
    return found;
}

/* Fours of symbols are moved apart, then pairs, then symbols: three steps for eight of them. */
static void unpack_plain(const uint8_t *packed, size_t size, unsigned bits, uint8_t *out, size_t n)
{
    const uint64_t one = (1ull << bits) - 1, two = (1ull << 2 * bits) - 1, four = (1ull << 4 * bits) - 1;
    const uint64_t ones = one * 0x0001000100010001ull, twos = two * 0x0000000100000001ull;
    for (size_t i = 0, at = 0; i < n; i += 8, at += bits) {
        uint64_t word = 0;
        if (at + 8 <= size)
            memcpy(&word, packed + at, 8);
        else
            memcpy(&word, packed + at, size - at);
        word = (word & four) | (word >> 4 * bits & four) << 32;
        word = (word & twos) | (word >> 2 * bits & twos) << 16;
        word = (word & ones) | (word >> bits & ones) << 8;
        memcpy(out + i, &word, n - i < 8 ? n - i : 8);
    }
}

static void look_up_plain(const float *table, size_t entries, unsigned bits, const uint8_t *codes,
                          const uint8_t *symbols, size_t n, float *out, int last)
{
    uint16_t places[TILE];  /* compilers make vectors of the loop that fills it, and four loads at once of the next */
    size_t i = 0;
    (void)entries, (void)last;
    if (!symbols) {
        for (; i + 8 <= n; i += 8) {
            uint64_t word;
            memcpy(&word, codes + i, 8);
            for (int j = 0; j < 8; j++)
                out[i + j] = table[word >> 8 * j & 0xFF];
        }
        for (; i < n; i++)
            out[i] = table[codes[i]];
        return;
    }
    for (size_t j = 0; j < n; j++)
        places[j] = (uint16_t)(codes[j] << bits | symbols[j]);
    for (; i + 4 <= n; i += 4) {
        float a = table[places[i]], b = table[places[i + 1]], c = table[places[i + 2]], d = table[places[i + 3]];
        out[i] = a, out[i + 1] = b, out[i + 2] = c, out[i + 3] = d;
    }
    for (; i < n; i++)
        out[i] = table[places[i]];
}

#ifdef DSQ_X86
#include <immintrin.h>

#define WIDE "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi"

__attribute__((target("avx2,popcnt"))) static int64_t look_at_avx2(const uint8_t *codes, size_t n, int wanted,
                                                                   uint8_t *largest)
{
    const __m256i code = _mm256_set1_epi8((char)wanted);
    __m256i most = _mm256_setzero_si256();
    uint8_t each[32];
    int64_t found = 0;
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i own = _mm256_loadu_si256((const __m256i *)(codes + i));
        found += __builtin_popcount((unsigned)_mm256_movemask_epi8(_mm256_cmpeq_epi8(own, code)));
        most = _mm256_max_epu8(most, own);
    }
    found += look_at_plain(codes + i, n - i, wanted, largest);
    _mm256_storeu_si256((__m256i *)each, most);
    for (int j = 0; j < 32; j++)
        *largest = each[j] > *largest ? each[j] : *largest;
    return found;
}

__attribute__((target("avx2,bmi2"))) static void unpack_avx2(const uint8_t *packed, size_t size, unsigned bits,
                                                             uint8_t *out, size_t n)
{
    const uint64_t places = ((1ull << bits) - 1) * 0x0101010101010101ull;
    size_t i = 0;
    for (; i + 8 <= n && i / 8 * bits + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, packed + i / 8 * bits, 8);
        word = _pdep_u64(word, places);
        memcpy(out + i, &word, 8);
    }
    unpack_plain(packed + i / 8 * bits, size - i / 8 * bits, bits, out + i, n - i);
}

/* 64 symbols: eight bytes are moved to each group of eight symbols, then each symbol is shifted to its byte. */
__attribute__((target(WIDE))) static void unpack_avx512(const uint8_t *packed, size_t size, unsigned bits,
                                                        uint8_t *out, size_t n)
{
    uint8_t bytes[64], shifts[64];
    for (unsigned i = 0; i < 64; i++) {
        bytes[i] = (uint8_t)((i / 8 * bits + i % 8) & 63);
        shifts[i] = (uint8_t)(i % 8 * bits);
    }
    const __m512i from = _mm512_loadu_si512(bytes), by = _mm512_loadu_si512(shifts);
    const __m512i symbol = _mm512_set1_epi8((char)((1u << bits) - 1));
    const __mmask64 read = ~0ull >> (64 - 8 * bits);
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __m512i words = _mm512_maskz_loadu_epi8(read, packed + i / 8 * bits);
        words = _mm512_multishift_epi64_epi8(by, _mm512_permutexvar_epi8(from, words));
        _mm512_storeu_si512(out + i, _mm512_and_si512(words, symbol));
    }
    unpack_plain(packed + i / 8 * bits, size - i / 8 * bits, bits, out + i, n - i);
}

/* Up to 64 entries lie in four vectors. */
__attribute__((target(WIDE))) static void look_up_avx512(const float *table, size_t entries, unsigned bits,
                                                         const uint8_t *codes, const uint8_t *symbols, size_t n,
                                                         float *out, int last)
{
    const __m128i shift = _mm_cvtsi32_si128((int)bits);
    const int streams = last && (uintptr_t)out % 64 == 0;
    float copy[64] = {0};
    __m512 all[4];
    size_t i = 0;
    memcpy(copy, table, sizeof *table * (entries < 64 ? entries : 64));
    for (int v = 0; v < 4; v++)
        all[v] = _mm512_loadu_ps(copy + 16 * v);
    for (; i + 16 <= n; i += 16) {
        __m512i place = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + i)));
        __m512 values;
        if (symbols) {
            __m512i symbol = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(symbols + i)));
            place = _mm512_or_si512(_mm512_sll_epi32(place, shift), symbol);
        }
        if (entries <= 64) {
            __mmask16 upper = _mm512_test_epi32_mask(place, _mm512_set1_epi32(32));
            values = _mm512_mask_mov_ps(_mm512_permutex2var_ps(all[0], place, all[1]), upper,
                                        _mm512_permutex2var_ps(all[2], place, all[3]));
        } else
            values = _mm512_i32gather_ps(place, table, 4);
        if (streams)
            _mm512_stream_ps(out + i, values);
        else
            _mm512_storeu_ps(out + i, values);
    }
    look_up_plain(table, entries, bits, codes + i, symbols ? symbols + i : NULL, n - i, out + i, last);
    if (streams)
        _mm_sfence();
}

static look_at *const looks[] = {look_at_plain, look_at_avx2, look_at_avx2};
static unpack_symbols *const unpacks[] = {unpack_plain, unpack_avx2, unpack_avx512};
static look_up *const look_ups[] = {look_up_plain, look_up_plain, look_up_avx512};

/* The passes of a path: Intel's first processors with AVX-512 lack VBMI. */
static int passes(int path)
{
    __builtin_cpu_init();
    if (path > 1 && !__builtin_cpu_supports("avx512vbmi"))
        path = 1;
    return path == 1 && !dsq_fast_bits() ? 0 : path;
}
#else
static look_at *const looks[] = {look_at_plain};
static unpack_symbols *const unpacks[] = {unpack_plain};
static look_up *const look_ups[] = {look_up_plain};

static int passes(int path) { (void)path; return 0; }
#endif

/* Write the values of n codes; return how many codes are `wanted`, or an error: a code or a symbol is none of the table.
 *
 * table: of each of `rows` codes, 2**bits entries. symbols: `size` bytes, n or, if packed, as many as n symbols of
 * `bits` bits take; NULL without, and then bits is 0. last: nobody reads the values soon.
 */
int64_t dsq_values(int path, const float *table, size_t rows, unsigned bits, const uint8_t *codes, size_t n,
                   const uint8_t *symbols, size_t size, int packed, int wanted, float *out, int last)
{
    uint8_t tile[TILE];
    int64_t found = 0;
    if (!dsq_has_path(path) || bits > 8 || (symbols != NULL) != (bits > 0) ||
        size != (!symbols ? 0 : packed ? n / 8 * bits + (n % 8 * bits + 7) / 8 : n))
        return BAD_SYMBOL;
    int way = passes(path);
    for (size_t at = 0; at < n; at += TILE) {
        size_t count = n - at < TILE ? n - at : TILE;
        const uint8_t *own = codes + at, *given = NULL;
        uint8_t largest;
        found += looks[way](own, count, wanted, &largest);
        if (largest >= rows)
            return BAD_CODE;
        if (packed && symbols) {
            unpacks[way](symbols + at / 8 * bits, size - at / 8 * bits, bits, tile, count);
            given = tile;
        } else if (symbols) {
            given = symbols + at;
            if (largest_of(given, count) >> bits)
                return BAD_SYMBOL;
        }
        look_ups[way](table, rows << bits, bits, own, given, count, out + at, last);
    }
    return found;
}

/* Unpack n symbols of `bits` bits, 1 to 8, which have `size` bytes; return 0 or an error. */
int dsq_unpack(int path, const uint8_t *packed, size_t size, unsigned bits, uint8_t *out, size_t n)
{
    if (!dsq_has_path(path) || !bits || bits > 8 || size != n / 8 * bits + (n % 8 * bits + 7) / 8)
        return BAD_SYMBOL;
    unpacks[passes(path)](packed, size, bits, out, n);
    return 0;
}
