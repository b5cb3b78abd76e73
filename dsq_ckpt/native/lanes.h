/* What the paths of the 32-lane coder share: tables, and the steps of one lane in plain C.
 *
 * docs/format.md, section 10, has the format. No function here trusts what it is given: a decoder's tables are checked
 * once for each call (`check_decoder`), after which no slot, whatever the state, leads outside them, and each word that
 * is read is checked against the end. Only states and codes come out wrong of a hostile block.
 */
#ifndef DSQ_LANES_H
#define DSQ_LANES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 32
#define HEAD (2 + 4 * LANES) /* bytes in front of the words of a block with so many: codes of the tail, states */
#define LOW 65536u      /* states are in [LOW, 2**32) */
#define ESCAPE 255      /* the symbol that an escape decodes to at first */
#define EMPTY 0xFFFF    /* in place of a row's number of escaped symbols: the row has no symbols at all */
#define MIN_BITS 10     /* of a row's slots */
#define MAX_BITS 15

enum {
    TRUNCATED = -1,   /* a word is missing */
    IMPOSSIBLE = -2,  /* a row without symbols, or no such escaped symbol */
    LEFT = -3,        /* words are left, or the last states are wrong */
    BAD_STATE = -4,   /* a first state is below LOW */
    BAD_SIZE = -5,    /* no block of so many codes has so many bytes */
    BAD_TABLES = -6,  /* tables or arguments contradict each other */
    UNKNOWN = -7,     /* a code that the row of its previous code lacks */
    NO_MEMORY = -8,
};

/* Tables of a decoder.
 *
 * rows[r]: first entry / 16 << 16 | L << 4 | bits, where the row has 2**bits slots, L of them not of its first symbol.
 * entries: of a row, one for each of these L slots and one for the first symbol; start << 20 |
 * frequency << 8 | symbol (of the first symbol, which has what the others leave, any frequency).
 * counts[r]: its escaped symbols, 0..256, or EMPTY; escaped[256 r + j]: number j of them.
 */
typedef struct {
    const uint32_t *rows, *entries;
    const uint16_t *counts;
    const uint8_t *escaped;
    size_t n_rows;
} decoder;

/* Tables of an encoder.
 *
 * table[r << shift | symbol]: frequency << 16 | start << 4 | bits. Frequency 0 marks an escaped symbol, with its number
 * plus 1 in place of the start, or, with start 0, one that the row lacks. escapes[r]: that of the row's escape.
 */
typedef struct {
    const uint32_t *table, *escapes;
    const uint16_t *counts;
    size_t n_rows;
    unsigned shift;
} encoder;

static inline uint32_t load16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline void store16(uint8_t *p, uint32_t v) { uint16_t w = (uint16_t)v; memcpy(p, &w, 2); }
static inline void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

/* The largest of n codes, 0 without any: a loop of its own, which compilers turn into vectors. */
static inline uint8_t largest_of(const uint8_t *codes, size_t n)
{
    uint8_t largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = codes[i] > largest ? codes[i] : largest;
    return largest;
}

/* Refill a state after a step. */
static inline int refill(uint32_t *x, const uint8_t **p, const uint8_t *end)
{
    if (*x >= LOW)
        return 0;
    if (end - *p < 2)
        return TRUNCATED;
    *x = *x << 16 | load16(*p);
    *p += 2;
    return 0;
}

/* Decode one symbol of a row; ESCAPE may need `decode_escaped` after it. */
static inline int decode_step(const decoder *d, uint32_t row, uint32_t *x, const uint8_t **p, const uint8_t *end,
                              uint8_t *out)
{
    uint32_t info = d->rows[row], bits = info & 15, left = info >> 4 & 0xFFF;
    uint32_t q = *x >> bits, slot = *x - (q << bits), at = slot < left ? slot : left;
    uint32_t entry = d->entries[(size_t)(info >> 16 << 4) + at];
    uint32_t freq = at == left ? (1u << bits) - left : entry >> 8 & 0xFFF;
    *x = freq * q + slot - (entry >> 20);
    *out = (uint8_t)entry;
    return refill(x, p, end);
}

/* Replace ESCAPE, if it is one, by the escaped symbol. */
static inline int decode_escaped(const decoder *d, uint32_t row, uint32_t *x, const uint8_t **p, const uint8_t *end,
                                 uint8_t *out)
{
    uint32_t count = d->counts[row], bits = d->rows[row] & 15;
    if (count == 0)
        return 0;
    if (count == EMPTY)
        return IMPOSSIBLE;
    uint32_t share = (1u << bits) / count, q = *x >> bits, slot = *x - (q << bits), j = slot / share;
    if (j >= count)
        return IMPOSSIBLE;
    *out = d->escaped[(size_t)row * 256 + j];
    *x = share * q + slot - j * share;
    return refill(x, p, end);
}

/* Take frequency and start into a state; words go in front of *p. */
static inline void encode_step(uint32_t *x, uint32_t freq, uint32_t start, uint32_t bits, uint8_t **p)
{
    if (*x >= (uint64_t)freq << (32 - bits)) {
        *p -= 2;
        store16(*p, *x);
        *x >>= 16;
    }
    *x += *x / freq * ((1u << bits) - freq) + start;
}

/* The entry of a code, the escape's for an escaped code, whose number is encoded here; 0 if the row lacks it. */
static inline uint32_t encode_escaped(const encoder *e, uint32_t row, uint32_t symbol, uint32_t *x, uint8_t **p)
{
    uint32_t entry = e->table[(size_t)row << e->shift | symbol];
    if (entry >> 16)
        return entry;
    uint32_t number = entry >> 4 & 0xFFF, bits = entry & 15, count = e->counts[row];
    if (number == 0 || count == 0 || number > count || count > 256 || !(e->escapes[row] >> 16) || bits < MIN_BITS)
        return 0;
    uint32_t share = (1u << bits) / count;
    encode_step(x, share, (number - 1) * share, bits, p);
    return e->escapes[row];
}

/* Whole groups, of one code of each lane, all with `parent` or all in row 0 without.
 *
 * Decoders return how many groups they did, or an error: they stop where a vector would read past the end of the words.
 * Encoders begin with the last group and return 0 or an error.
 */
typedef int64_t decode_groups(const decoder *d, const uint8_t *parent, uint8_t *out, size_t groups,
                              uint32_t *states, const uint8_t **p, const uint8_t *end);
typedef int encode_groups(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t groups,
                              uint32_t *states, uint8_t **p);

/* A block under way: the first n codes, which the lanes take in turn, `done` of them decoded, or one lane has (`single`);
 * and the `tail`. */
typedef struct {
    decoder d;
    const uint8_t *parent, *p, *end;
    uint8_t *out;
    size_t n, done, tail;
    int single, error;
    uint32_t states[LANES];
} opened;

/* Whole groups of one block, where that is faster than by `decode_groups`, or of two blocks in turns, as many as both
   have, where `t` is not NULL: `done` and `error` tell how far they are. */
typedef void decode_in_words(opened *s, opened *t);

/* Of one group, of `count` codes: */
int dsq_decode_escapes(const decoder *d, const uint8_t *parent, uint8_t *out, int count, uint32_t *states,
                       const uint8_t **p, const uint8_t *end);
int dsq_encode_group(const encoder *e, const uint8_t *parent, const uint8_t *codes, int count, uint32_t *states,
                     uint8_t **p);

/* What blocks consist of (lanes.c): codes that the lanes take in turn, or that one lane has; and the last codes, which
   one lane codes into what the 32 lanes end with. */
int dsq_check_decoder(const decoder *d, size_t n_entries);
int dsq_decode_turns(int path, const decoder *d, const uint8_t *parent, uint8_t *out, size_t n, uint32_t *states,
                     const uint8_t **p, const uint8_t *end);
int dsq_decode_one(const decoder *d, const uint8_t *parent, uint8_t *out, size_t n, uint32_t *x, const uint8_t **p,
                   const uint8_t *end);
int dsq_decode_tail(const decoder *d, const uint8_t *parent, uint8_t *out, size_t n, const uint32_t *states);
int dsq_encode_turns(int path, const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t n,
                     uint32_t *states, uint8_t **p);
int dsq_encode_one(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t n, uint32_t *x, uint8_t **p);
int64_t dsq_encode_tail(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t n, uint32_t *states,
                        int *certain);
int dsq_has_path(int path);
/* Whether PDEP and PEXT are there and fast: AMD's processors before Zen 3 take hundreds of cycles for them. */
int dsq_fast_bits(void);

decode_groups dsq_decode_plain;
encode_groups dsq_encode_plain;
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__)) && !defined(DSQ_PLAIN_ONLY)
#define DSQ_X86 1
decode_groups dsq_decode_avx2, dsq_decode_avx512;
encode_groups dsq_encode_avx2, dsq_encode_avx512;
decode_in_words dsq_decode_in_words;
#endif

#endif
