/* Models of the 32-lane coder: fitted to counts, written and read.
 *
 * `_lane_model.py` has the same line by line, and gives the same models where there is no compiler. All arrays have as
 * many rows: freqs[rows * symbols], -1 escaped, 0 absent; firsts, -1 in a row without symbols; escape_freqs; bits.
 */
#include "lanes.h"

#define MAX_LEFT 4095  /* slots that are not of the first symbol */
#define FIRST 127
#define MAX_GRID 103
#define WIDTH 7

static int64_t grid_index(int64_t freq)
{
    int shift = 0;
    while (freq >> shift >= 16)
        shift++;
    return 8 * shift + (freq >> shift);
}

static int64_t grid_value(int64_t index) { return index < 16 ? index : (8 + (index & 7)) << ((index >> 3) - 1); }

/* Share 2**bits slots out to n counts, on the grid but for `first`, which takes the rest. */
static void share(const int64_t *counts, size_t n, size_t first, int bits, int64_t *freqs)
{
    int64_t slots = (int64_t)1 << bits, least = slots - MAX_LEFT > 1 ? slots - MAX_LEFT : 1, total = 0, rest = slots;
    for (size_t s = 0; s < n; s++)
        total += counts[s];
    for (size_t s = 0; s < n; s++) {
        freqs[s] = 0;
        if (counts[s] > 0 && s != first) {
            int64_t freq = counts[s] * slots / total;
            freqs[s] = grid_value(grid_index(freq > 1 ? freq : 1));
            rest -= freqs[s];
        }
    }
    while (rest < least) {  /* very many symbols, or a first one that is none too frequent for so many slots */
        size_t most = 0;
        for (size_t s = 1; s < n; s++)
            most = freqs[s] > freqs[most] ? s : most;
        int64_t below = grid_value(grid_index(freqs[most]) - 1);
        rest += freqs[most] - below;
        freqs[most] = below;
    }
    /* All were rounded down, and `first` has what they lost: raise those that are nearer to the next value, down to
       15/16 of what is due to `first`; then any that are below their due while `first` is above its own. */
    for (int near = 1; near >= 0; near--)
        for (size_t s = 0; s < n; s++) {
            if (freqs[s] == 0)
                continue;
            int64_t above = grid_value(grid_index(freqs[s]) + 1), left = rest - (above - freqs[s]);
            int wanted, affordable;
            if (near) {
                wanted = 2 * counts[s] * slots >= (freqs[s] + above) * total;
                affordable = 16 * left * total >= 15 * counts[first] * slots;
            } else {
                wanted = counts[s] * slots > freqs[s] * total;
                affordable = left * total >= counts[first] * slots;
            }
            if (wanted && affordable && left >= least) {
                freqs[s] = above;
                rest = left;
            }
        }
    freqs[first] = rest;
}

/* 2**24 times the bits that the counts take, each without its last `shift` bits: integers, so that every machine fits
   the same model. Symbols and escapes take less than 2**5 bits each, and the counts are below 2**33 in all. */
static int64_t cost(const int64_t *counts, size_t n, const int64_t *freqs, int bits, int shift, const int64_t *log2s)
{
    int64_t sum = 0;
    for (size_t s = 0; s < n; s++)
        if (counts[s] > 0)
            sum += (counts[s] >> shift) * (((int64_t)bits << 24) - log2s[freqs[s]]);
    return sum;
}

/* Fit a row with 2**bits slots: try to escape the symbols below several parts of a slot; return what it costs. */
static int64_t fit_row(const int64_t *counts, size_t symbols, size_t first, int bits, const int64_t *log2s,
                       int32_t *freqs, int32_t *escape_freq)
{
    static const int quarters[] = {0, 1, 2, 4, 8, 16};
    int64_t merged[257], trial[257], slots = (int64_t)1 << bits, total = 0, tried = -1, best = -1;
    int shift = 0;
    for (size_t s = 0; s < symbols; s++)
        total += counts[s];
    while (total >> shift >> 33)
        shift++;
    for (int i = 0; i < 6; i++) {
        int64_t escaped = 0;
        merged[symbols] = 0;
        for (size_t s = 0; s < symbols; s++) {
            merged[s] = counts[s];
            if (counts[s] > 0 && 4 * counts[s] * slots < quarters[i] * total && s != first) {
                merged[s] = 0;
                merged[symbols] += counts[s];
                escaped++;
            }
        }
        if (escaped > 0 && symbols > ESCAPE && merged[ESCAPE] > 0) {
            merged[symbols] += merged[ESCAPE];
            merged[ESCAPE] = 0;
            escaped++;
        }
        if (escaped == tried || escaped == 1 || (escaped > 0 && first == ESCAPE))
            continue;
        tried = escaped;
        share(merged, symbols + 1, first, bits, trial);
        int64_t sum = cost(merged, symbols + 1, trial, bits, shift, log2s);
        if (escaped > 0)
            sum += (merged[symbols] >> shift) * (((int64_t)bits << 24) - log2s[slots / escaped]);
        if (best < 0 || sum < best) {
            best = sum;
            *escape_freq = (int32_t)trial[symbols];
            for (size_t s = 0; s < symbols; s++)
                freqs[s] = merged[s] == 0 && counts[s] > 0 ? -1 : (int32_t)trial[s];
        }
    }
    return best;
}

/* Whether a row can have 2**bits slots at all: up to 2**12 always. */
static int can_have(const int64_t *counts, size_t symbols, size_t first, int bits)
{
    int64_t total = 0;
    for (size_t s = 0; s < symbols; s++)
        total += counts[s];
    return bits <= 12 || (total - counts[first]) << bits <= (MAX_LEFT + 1) * total;
}

/* Fit a model to counts[rows * symbols], symbols <= 256. log2s: 2**24 log2 of 0 (unused) to 2**15. */
void dsq_fit(const int64_t *counts, size_t rows, size_t symbols, const int64_t *log2s, int32_t *freqs, int32_t *firsts,
             int32_t *escape_freqs, int32_t *bits)
{
    int32_t trial[256], escape_freq;
    for (size_t r = 0; r < rows; r++, counts += symbols, freqs += symbols) {
        size_t first = 0;
        int64_t costs[MAX_BITS + 1], best = INT64_MAX;
        for (size_t s = 1; s < symbols; s++)
            first = counts[s] > counts[first] ? s : first;
        if (counts[first] == 0)
            continue;
        firsts[r] = (int32_t)first;
        for (int b = MIN_BITS; b <= MAX_BITS; b++) {
            costs[b] = INT64_MAX;
            if (can_have(counts, symbols, first, b))
                costs[b] = fit_row(counts, symbols, first, b, log2s, trial, &escape_freq);
            best = costs[b] < best ? costs[b] : best;
        }
        /* the fewest slots that cost next to nothing: their tables stay in the cache */
        bits[r] = MIN_BITS;
        while (costs[bits[r]] > best + best / 2000)
            bits[r]++;
        fit_row(counts, symbols, first, bits[r], log2s, freqs, escape_freqs + r);
    }
}

static size_t put(uint8_t *data, size_t at, uint32_t value, int width)
{
    for (int i = 0; i < width; i++)
        data[(at + i) >> 3] |= (uint8_t)((value >> i & 1) << ((at + i) & 7));
    return at + width;
}

static size_t put_number(uint8_t *data, size_t at, uint32_t value)
{
    int zeros = 0;
    while ((value + 1) >> (zeros + 1))
        zeros++;
    at = put(data, at + zeros, 1, 1);
    return put(data, at, (value + 1) & ((1u << zeros) - 1), zeros);
}

/* Write the rows of a model to zeros, of at least 6 rows + 3 (symbols present) bytes; return how many bytes it took. */
size_t dsq_write_rows(const int32_t *freqs, const int32_t *firsts, const int32_t *escape_freqs, const int32_t *bits,
                      size_t rows, size_t symbols, uint8_t *data)
{
    size_t at = 0;
    for (size_t r = 0; r < rows; r++, freqs += symbols) {
        uint32_t count = 0, next = 0;
        for (size_t s = 0; s < symbols; s++)
            count += freqs[s] != 0;
        at = put_number(data, at, count);
        if (count > 0)
            at = put(data, at, bits[r] - MIN_BITS, 3);
        for (uint32_t s = 0; s < symbols; s++) {
            if (freqs[s] == 0)
                continue;
            at = put_number(data, at, s - next);
            next = s + 1;
            uint32_t v = (int32_t)s == firsts[r] ? FIRST : freqs[s] < 0 ? 0 : (uint32_t)grid_index(freqs[s]);
            at = put(data, at, v, WIDTH);
        }
        if (escape_freqs[r] > 0)
            at = put(data, at, (uint32_t)grid_index(escape_freqs[r]), WIDTH);
    }
    return (at + 7) / 8;
}

typedef struct { const uint8_t *data; size_t size, at; } stream;  /* size and place in bits */

/* Bits of the stream; past its end, zeros. */
static uint32_t take(stream *s, int width)
{
    uint32_t value = 0;
    for (int i = 0; i < width; i++, s->at++)
        if (s->at < s->size)
            value |= (uint32_t)(s->data[s->at >> 3] >> (s->at & 7) & 1) << i;
    return value;
}

static int64_t take_number(stream *s)
{
    int zeros = 0;
    while (take(s, 1) == 0)
        if (++zeros > 15)
            return -1;
    return (1 << zeros) - 1 + (int64_t)take(s, zeros);
}

static int read_row(stream *s, int64_t symbols, int32_t *freqs, int32_t *first, int32_t *escape_freq, int32_t *bits)
{
    int64_t count = take_number(s), symbol = -1, left = 0, escaped = 0;
    if (count <= 0)
        return count == 0;
    *bits = (int32_t)take(s, 3) + MIN_BITS;
    if (count > symbols || *bits > MAX_BITS)
        return 0;
    while (count-- > 0) {
        int64_t gap = take_number(s), v = take(s, WIDTH);
        symbol += gap + 1;
        if (gap < 0 || symbol >= symbols)
            return 0;
        if (v == FIRST && *first < 0) {
            *first = (int32_t)symbol;
        } else if (v == 0) {
            freqs[symbol] = -1;
            escaped++;
        } else if (v <= MAX_GRID) {
            freqs[symbol] = (int32_t)grid_value(v);
            left += freqs[symbol];
        } else {
            return 0;
        }
    }
    if (escaped > 0) {
        int64_t v = take(s, WIDTH);
        if (v == 0 || v > MAX_GRID)
            return 0;
        *escape_freq = (int32_t)grid_value(v);
        left += *escape_freq;
    }
    if (*first < 0 || left > MAX_LEFT || left >= 1 << *bits)
        return 0;
    freqs[*first] = (1 << *bits) - (int32_t)left;
    return escaped == 0 || symbols <= ESCAPE || freqs[ESCAPE] <= 0;
}

/* Read the rows of a model into freqs and escape_freqs of 0 and firsts of -1; return whether it is one. */
int dsq_read_rows(const uint8_t *data, size_t size, int32_t *freqs, int32_t *firsts, int32_t *escape_freqs,
                  int32_t *bits, size_t rows, size_t symbols)
{
    stream s = {data, 8 * size, 0};
    for (size_t r = 0; r < rows; r++)
        if (!read_row(&s, (int64_t)symbols, freqs + r * symbols, firsts + r, escape_freqs + r, bits + r))
            return 0;
    return s.at <= s.size && s.size - s.at < 8 && take(&s, (int)(s.size - s.at)) == 0;
}
