/* Counts of keys, bins, octaves and pairs, positions of a code, and bf16: what kernels/cpu.py, kernels/cpu_decode.py
 * and coding/pairs.py do in Numba, with the same results.
 *
 * Counting is bound by loads and stores, so two places are read in one load. An increment waits for an earlier one of
 * the same place; tables in turn break most of these chains. Of keys, two tables and eight elements a turn, of which no
 * more than four wait in registers, took the least time.
 */
#include "bins.h"

#define TILE 4096             /* elements whose places wait to be counted */
#define KEYS (1u << 15)       /* keys with a sign */
#define OCTAVES 512
#define PIECE ((size_t)1 << 31) /* elements counted before counters of 32 bits are emptied */
#define TABLES 4              /* of pairs */
#define TABLE_GAP 16          /* entries between them, so that their distance is no multiple of a page */

static inline uint64_t load64(const void *p) { uint64_t v; memcpy(&v, p, 8); return v; }

/* Add values to the bins of a window, int64[rows * size]; BAD_TABLES if a previous code has no row, or the window is
 * none. `parent` may be NULL: all values are of the first row. x: float32, at any address. */
int dsq_count_bins(int path, const void *x, size_t n, float inv_scale, int lo, int hi, const uint8_t *parent,
                   size_t rows, int64_t *counts)
{
    uint32_t index[TILE];
    if (!dsq_has_path(path) || !is_window(lo, hi) || !rows)
        return BAD_TABLES;
    const bins of_row = bins_of(lo, hi);
    for (size_t at = 0; at < n; at += TILE) {
        size_t count = n - at < TILE ? n - at : TILE, i = 0;
        const uint8_t *before = parent ? parent + at : NULL;
        if (before && largest_of(before, count) >= rows)
            return BAD_TABLES;
        dsq_find_places(path, &of_row, (const uint8_t *)x + at * sizeof(float), inv_scale, before, count, index);
        for (; i + 4 <= count; i += 4) {
            uint64_t first = load64(index + i), second = load64(index + i + 2);
            counts[(uint32_t)first]++, counts[first >> 32]++;
            counts[(uint32_t)second]++, counts[second >> 32]++;
        }
        for (; i < count; i++)
            counts[index[i]]++;
    }
    return 0;
}

static void count_keys(const uint8_t *bits, size_t n, uint32_t *even, uint32_t *odd)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8, bits += 32) {
        uint64_t first = load64(bits), second = load64(bits + 8);
        even[(uint32_t)first >> KEY_SHIFT]++, odd[first >> (KEY_SHIFT + 32)]++;
        even[(uint32_t)second >> KEY_SHIFT]++, odd[second >> (KEY_SHIFT + 32)]++;
        first = load64(bits + 16), second = load64(bits + 24);
        even[(uint32_t)first >> KEY_SHIFT]++, odd[first >> (KEY_SHIFT + 32)]++;
        even[(uint32_t)second >> KEY_SHIFT]++, odd[second >> (KEY_SHIFT + 32)]++;
    }
    for (; i < n; i++, bits += 4)
        even[load32(bits) >> KEY_SHIFT]++;
}

/* Add the keys from `from` to `to`, those of one sign, to a counter. */
static int64_t sum_keys(const uint32_t *even, const uint32_t *odd, int from, int to)
{
    uint64_t sum = 0;
    for (int key = from; key < to; key++)
        sum += (uint64_t)even[key] + odd[key];
    return (int64_t)sum;
}

/* Add values to the bins of a window, int64[size], as dsq_count_bins does, by a count of all keys in `ways`,
 * uint32[2][KEYS], of any contents: faster for many values. */
int dsq_count_keys(int path, const void *x, size_t n, float inv_scale, int lo, int hi, uint32_t *ways,
                   int64_t *counts)
{
    float scaled[TILE];
    if (!dsq_has_path(path) || !is_window(lo, hi))
        return BAD_TABLES;
    for (size_t start = 0; start < n; start += PIECE) {
        size_t stop = n - start < PIECE ? n : start + PIECE;
        memset(ways, 0, 2 * KEYS * sizeof *ways);
        for (size_t at = start; at < stop; at += TILE) {
            size_t count = stop - at < TILE ? stop - at : TILE;
            const void *given = (const uint8_t *)x + at * sizeof(float);
            count_keys(inv_scale == 1 ? given : (const void *)dsq_scale_values(path, given, count, inv_scale, scaled),
                       count, ways, ways + KEYS);
        }
        for (int sign = 0; sign < 2; sign++) {
            const uint32_t *even = ways + sign * (MAGNITUDE + 1), *odd = even + KEYS;
            int64_t *own = counts + sign * (hi - lo + 3);
            own[0] += sum_keys(even, odd, 0, lo);
            for (int key = lo; key < hi; key++)
                own[1 + key - lo] += (int64_t)even[key] + odd[key];
            own[1 + hi - lo] += sum_keys(even, odd, hi, NON_FINITE);
            own[2 + hi - lo] += sum_keys(even, odd, NON_FINITE, MAGNITUDE + 1);
        }
    }
    return 0;
}

/* Add values to counts by their top nine bits, int64[512]: by eight tables, as most values of a tensor share few. */
void dsq_count_octaves(const void *x, size_t n, int64_t *counts)
{
    uint32_t ways[8][OCTAVES];
    const uint8_t *bits = x;
    for (size_t start = 0; start < n; start += PIECE) {
        size_t stop = n - start < PIECE ? n : start + PIECE, i = start;
        memset(ways, 0, sizeof ways);
        for (; i + 8 <= stop; i += 8) {
            const uint8_t *own = bits + 4 * i;
            uint64_t first = load64(own), second = load64(own + 8);
            ways[0][(uint32_t)first >> 23]++, ways[1][first >> 55]++;
            ways[2][(uint32_t)second >> 23]++, ways[3][second >> 55]++;
            first = load64(own + 16), second = load64(own + 24);
            ways[4][(uint32_t)first >> 23]++, ways[5][first >> 55]++;
            ways[6][(uint32_t)second >> 23]++, ways[7][second >> 55]++;
        }
        for (; i < stop; i++)
            ways[0][load32(bits + 4 * i) >> 23]++;
        for (int way = 0; way < 8; way++)
            for (int octave = 0; octave < OCTAVES; octave++)
                counts[octave] += ways[way][octave];
    }
}

/* places[i] = context << bits | symbol; return whether all contexts are below `rows`, and symbols have no more bits. */
static INLINE int place_pairs_body(const uint8_t *contexts, const uint8_t *symbols, size_t n, size_t rows, unsigned bits,
                            uint16_t *places)
{
    for (size_t i = 0; i < n; i++)
        places[i] = (uint16_t)((uint16_t)(contexts[i] << bits) | symbols[i]);
    return largest_of(contexts, n) < rows && !(largest_of(symbols, n) >> bits);
}

/* Return how many codes are `code`. */
static INLINE size_t count_code_body(const uint8_t *codes, size_t n, uint8_t code)
{
    size_t found = 0, i = 0;
    while (n - i >= 64) {  /* counters of eight bits fill vectors, and 255 rounds cannot overflow them */
        uint8_t hits[64] = {0};
        size_t rounds = (n - i) / 64 < 255 ? (n - i) / 64 : 255;
        for (size_t round = 0; round < rounds; round++, i += 64)
            for (int j = 0; j < 64; j++)
                hits[j] = (uint8_t)(hits[j] + (codes[i + j] == code));
        for (int j = 0; j < 64; j++)
            found += hits[j];
    }
    for (; i < n; i++)
        found += codes[i] == code;
    return found;
}

/* flags[i] = whether codes[i] is `code` */
static INLINE void flag_code_body(const uint8_t *codes, size_t n, uint8_t code, uint8_t *flags)
{
    for (size_t i = 0; i < n; i++)
        flags[i] = codes[i] == code;
}

/* Round fp32 bits to bf16 bits: nearest, ties to even; NaN stays (quiet) NaN. */
static INLINE void round_bits_body(const uint8_t *bits, size_t n, uint16_t *out)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t own = load32(bits + 4 * i), high = own >> 16;
        uint32_t rounded = (own + 0x7FFF + (high & 1)) >> 16;  /* half of the last place kept, less one unless odd */
        out[i] = (uint16_t)((own & 0x7FFFFFFF) > 0x7F800000 ? high | 0x40 : rounded);
    }
}

static INLINE void widen_halves_body(const uint8_t *halves, size_t n, uint32_t *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = load16(halves + 2 * i) << 16;
}

#define PARAMETERS (const uint8_t *contexts, const uint8_t *symbols, size_t n, size_t rows, unsigned bits, uint16_t *places)
ON_EACH_PATH(int, place_pairs, PARAMETERS, (contexts, symbols, n, rows, bits, places))
#undef PARAMETERS
ON_EACH_PATH(size_t, count_code, (const uint8_t *codes, size_t n, uint8_t code), (codes, n, code))
ON_EACH_PATH(void, flag_code, (const uint8_t *codes, size_t n, uint8_t code, uint8_t *flags), (codes, n, code, flags))
ON_EACH_PATH(void, round_bits, (const uint8_t *bits, size_t n, uint16_t *out), (bits, n, out))
ON_EACH_PATH(void, widen_halves, (const uint8_t *halves, size_t n, uint32_t *out), (halves, n, out))

/* Add pairs to int64[256][256]; BAD_TABLES if a context is none of `rows`, or a symbol has more than `bits` bits.
 * tables: zeros, uint32[4][(rows << bits) + 16]. */
int dsq_count_pairs(int path, const uint8_t *contexts, const uint8_t *symbols, size_t n, size_t rows, unsigned bits,
                    uint32_t *tables, int64_t *counts)
{
    uint16_t places[TILE];
    if (!dsq_has_path(path) || bits > 8 || rows > 256 || n >> 32)
        return BAD_TABLES;
    const size_t size = rows << bits, gap = size + TABLE_GAP;
    uint32_t *first = tables, *second = first + gap, *third = second + gap, *fourth = third + gap;
    for (size_t at = 0; at < n; at += TILE) {
        size_t count = n - at < TILE ? n - at : TILE, i = 0;
        if (!place_pairs_paths[path](contexts + at, symbols + at, count, rows, bits, places))
            return BAD_TABLES;
        for (; i + 4 <= count; i += 4)
            first[places[i]]++, second[places[i + 1]]++, third[places[i + 2]]++, fourth[places[i + 3]]++;
        for (; i < count; i++)
            first[places[i]]++;
    }
    for (size_t row = 0, at = 0; row < rows; row++)
        for (size_t symbol = 0; symbol < (size_t)1 << bits; symbol++, at++)
            counts[256 * row + symbol] += (int64_t)first[at] + second[at] + third[at] + fourth[at];
    return 0;
}

/* Return how many of n codes are `code`; of the first `capacity` of these, write the positions. */
int64_t dsq_find_positions(int path, const uint8_t *codes, size_t n, int code, int64_t *positions, size_t capacity)
{
    uint8_t flags[TILE + 8];
    size_t found = 0;
    if (!dsq_has_path(path) || code < 0 || code > 255)
        return 0;
    if (!capacity)
        return (int64_t)count_code_paths[path](codes, n, (uint8_t)code);
    for (size_t at = 0; at < n; at += TILE) {
        size_t count = n - at < TILE ? n - at : TILE;
        flag_code_paths[path](codes + at, count, (uint8_t)code, flags);
        memset(flags + count, 0, 8);
        for (size_t i = 0; i < count; i += 8)  /* they are rare: most words are zero */
            if (load64(flags + i))
                for (size_t j = i; j < i + 8; j++)
                    if (flags[j]) {
                        if (found < capacity)
                            positions[found] = (int64_t)(at + j);
                        found++;
                    }
    }
    return (int64_t)found;
}

/* Round n fp32 numbers, at any address, to bf16. */
int dsq_to_bf16(int path, const void *bits, size_t n, uint16_t *out)
{
    if (!dsq_has_path(path))
        return BAD_TABLES;
    round_bits_paths[path](bits, n, out);
    return 0;
}

/* Convert n bf16 numbers, at any address, to fp32. */
int dsq_from_bf16(int path, const void *halves, size_t n, uint32_t *out)
{
    if (!dsq_has_path(path))
        return BAD_TABLES;
    widen_halves_paths[path](halves, n, out);
    return 0;
}
