/* Whole groups of the 32-lane coder in plain C, without branches that a code decides. */
#include "lanes.h"
#include <stdlib.h>

/* A row, as the loop reads it. */
typedef struct {
    const uint32_t *entries;
    uint32_t mask, left, first, bits;  /* first: the frequency of its first symbol */
} row;

/* Step one lane and refill it in arithmetic: compilers make branches of conditions, and whether a word is needed is a
 * coin toss. Two bytes at *p can be read. Bit 8 of the result: the symbol is ESCAPE. */
static inline uint32_t decode_lane(const row *r, uint32_t *state, const uint8_t **p, uint8_t *out)
{
    uint32_t slot = *state & r->mask, other = (uint32_t)(((uint64_t)slot - r->left) >> 32);
    uint32_t entry = r->entries[r->left + ((slot - r->left) & other)];
    uint32_t freq = r->first ^ ((r->first ^ (entry >> 8 & 0xFFF)) & other);
    uint32_t x = freq * (*state >> r->bits) + slot - (entry >> 20);
    uint32_t low = (uint32_t)(((uint64_t)x - LOW) >> 63);
    *state = x << 16 * low | (load16(*p) & (0 - low));
    *p += 2 * low;
    *out = (uint8_t)entry;
    return (entry & 0xFF) + 1;
}

int64_t dsq_decode_plain(const decoder *d, const uint8_t *parent, uint8_t *out, size_t groups, uint32_t *lanes,
                         const uint8_t **words, const uint8_t *end)
{
    row rows[256];
    uint32_t states[LANES];
    size_t n_rows = !parent ? 1 : d->n_rows < 256 ? d->n_rows : 256, g = 0;
    const uint8_t *p = *words;
    for (size_t r = 0; r < n_rows; r++) {
        uint32_t info = d->rows[r], bits = info & 15, left = info >> 4 & 0xFFF;
        rows[r] = (row){d->entries + (size_t)(info >> 16 << 4), (1u << bits) - 1, left, (1u << bits) - left, bits};
    }
    const row alone = rows[0];
    memcpy(states, lanes, sizeof states);
    for (; g < groups && end - p >= 2 * LANES; g++, out += LANES) {
        uint32_t escapes = 0;
        if (parent)
            for (int j = 0; j < LANES; j++)
                escapes |= decode_lane(rows + parent[j], states + j, &p, out + j);
        else
            for (int j = 0; j < LANES; j++)
                escapes |= decode_lane(&alone, states + j, &p, out + j);
        if (escapes >> 8) {
            int error = dsq_decode_escapes(d, parent, out, LANES, states, &p, end);
            if (error)
                return error;
        }
        parent += parent ? LANES : 0;
    }
    memcpy(lanes, states, sizeof states);
    *words = p;
    return (int64_t)g;
}

/* A code of a row, as the loop reads it.
 *
 * With M slots, a power of 2, a frequency f <= M and a state x < f 2**32 / M, x / f is x * inverse >> 32 + log2(M), for
 * inverse = ceil(2**32 M / f) = (2**32 M + e) / f, 0 <= e < f: that is the floor of x / f + d, d = x e / (2**32 M f),
 * and d < 1 / f as x e < 2**32 f f / M <= 2**32 M. The product is below 2**64: x is at most f 2**32 / M - 1, so it is
 * at most 2**64 + 2**32 (f - 1) / M - 2**32 M / f, where f (f - 1) < M M.
 */
typedef struct {
    uint64_t inverse;
    uint32_t most;   /* the largest state that needs no word written */
    uint16_t others; /* M - f, or SPECIAL: escaped or unknown */
    uint16_t start;  /* start << 4 | log2(M) */
} code;

#define SPECIAL 0x8000u

static void fill(const encoder *e, size_t size, code *table)
{
    for (size_t i = 0; i < size; i++) {
        uint32_t entry = e->table[i], freq = entry >> 16, bits = entry & 15;
        table[i] = (code){0, 0xFFFFFFFF, SPECIAL, 0};
        if (freq) {
            table[i].inverse = (((uint64_t)1 << (32 + bits)) + freq - 1) / freq;
            table[i].most = (uint32_t)(((uint64_t)freq << (32 - bits)) - 1);
            table[i].others = (uint16_t)(((1u << bits) - freq) & (SPECIAL - 1));
            table[i].start = (uint16_t)entry;
        }
    }
}

/* Take a code into its lane; two bytes before *p are always written. */
static inline uint32_t encode_lane(const code *c, uint32_t *state, uint8_t **p)
{
    uint32_t x = *state, full = x > c->most, others = c->others, start = c->start;
    store16(*p - 2, x);
    *p -= 2 * full;
    x = full ? x >> 16 : x;
    *state = x + (uint32_t)(x * c->inverse >> 32 >> (start & 15)) * others + (start >> 4);
    return others;
}

int dsq_encode_plain(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t groups, uint32_t *lanes,
                     uint8_t **words)
{
    const unsigned shift = e->shift;
    size_t size = e->n_rows << shift;
    code *table = size <= groups * LANES / 4 ? malloc(size * sizeof *table) : NULL;  /* else it takes more than it saves */
    uint32_t states[LANES], before[LANES];
    uint8_t *p = *words;
    int error = 0;
    if (table)
        fill(e, size, table);
    memcpy(states, lanes, sizeof states);
    for (size_t at = groups * LANES; at > 0 && !error;) {
        at -= LANES;
        const uint8_t *c = codes + at, *o = parent ? parent + at : NULL;
        uint8_t *last = p;
        uint32_t special = 0;
        memcpy(before, states, sizeof states);
        if (!table)
            special = SPECIAL;
        else if (parent)
            for (int j = LANES; j-- > 0;)
                special |= encode_lane(table + ((size_t)o[j] << shift | c[j]), states + j, &p);
        else
            for (int j = LANES; j-- > 0;)
                special |= encode_lane(table + c[j], states + j, &p);
        if (special & SPECIAL) {  /* once more: the numbers of escaped codes come first */
            memcpy(states, before, sizeof states);
            p = last;
            error = dsq_encode_group(e, o, c, LANES, states, &p);
        }
    }
    free(table);
    memcpy(lanes, states, sizeof states);
    *words = p;
    return error;
}
