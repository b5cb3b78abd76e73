/* Blocks of the 32-lane coder: their frame, what is left of whole groups, and the choice of a path. */
#include "lanes.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words and states are stored little-endian"
#endif

#define SINGLE_CODES 32768 /* blocks of fewer codes have one lane */
#define TAIL_WORDS 30     /* of the last codes, which one lane codes into what the 32 lanes end with */
#define MAX_TAIL 4096     /* codes, or a 64th of the block, for speed; readers take any number */

enum { PLAIN = 0, AVX2 = 1, AVX512 = 2 };
#ifdef DSQ_X86
static decode_groups *const decoders[] = {dsq_decode_plain, dsq_decode_avx2, dsq_decode_avx512};
static encode_groups *const encoders[] = {dsq_encode_plain, dsq_encode_avx2, dsq_encode_avx512};
#else
static decode_groups *const decoders[] = {dsq_decode_plain};
static encode_groups *const encoders[] = {dsq_encode_plain};
#endif
#define PATHS (int)(sizeof decoders / sizeof *decoders)

#ifndef DSQ_SOURCES
#define DSQ_SOURCES ""
#endif

/* Return the version of the functions here: their arguments, and what tables mean. */
int dsq_interface(void) { return 7; }

/* Return the hash of the sources that this library was built from (setup.py). */
const char *dsq_sources(void) { return DSQ_SOURCES; }

/* Return the fastest path that this processor has: 0 plain C, 1 AVX2, 2 AVX-512. */
int dsq_best_path(void)
{
#ifdef DSQ_X86
    __builtin_cpu_init();
    int popcnt = __builtin_cpu_supports("popcnt"), avx512 = __builtin_cpu_supports("avx512f");
    avx512 = avx512 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (popcnt && avx512 && __builtin_cpu_supports("avx512dq"))
        return AVX512;
    if (popcnt && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return AVX2;
#endif
    return PLAIN;
}

static int decode_group(const decoder *d, const uint8_t *parent, uint8_t *out, int count, uint32_t *states,
                        const uint8_t **p, const uint8_t *end)
{
    int error, escapes = 0;
    for (int j = 0; j < count; j++) {
        if ((error = decode_step(d, parent ? parent[j] : 0, states + j, p, end, out + j)))
            return error;
        escapes |= out[j] == ESCAPE;
    }
    return escapes ? dsq_decode_escapes(d, parent, out, count, states, p, end) : 0;
}

int dsq_decode_escapes(const decoder *d, const uint8_t *parent, uint8_t *out, int count, uint32_t *states,
                       const uint8_t **p, const uint8_t *end)
{
    int error;
    for (int j = 0; j < count; j++)
        if (out[j] == ESCAPE && (error = decode_escaped(d, parent ? parent[j] : 0, states + j, p, end, out + j)))
            return error;
    return 0;
}

int dsq_encode_group(const encoder *e, const uint8_t *parent, const uint8_t *codes, int count, uint32_t *states,
                     uint8_t **p)
{
    uint32_t entries[LANES];
    for (int j = count; j-- > 0;)
        if (!(entries[j] = encode_escaped(e, parent ? parent[j] : 0, codes[j], states + j, p)))
            return UNKNOWN;
    for (int j = count; j-- > 0;)
        encode_step(states + j, entries[j] >> 16, entries[j] >> 4 & 0xFFF, entries[j] & 15, p);
    return 0;
}

int dsq_has_path(int path) { return path >= 0 && path < PATHS; }

int dsq_fast_bits(void)
{
#ifdef DSQ_X86
    __builtin_cpu_init();
    return __builtin_cpu_supports("bmi2") && !__builtin_cpu_is("amdfam17h");
#else
    return 0;
#endif
}

/* Return whether a path has groups of two blocks in turns (words_avx512.c). */
int dsq_takes_two(int path)
{
#ifdef DSQ_X86
    __builtin_cpu_init();
    return path == AVX512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
           __builtin_cpu_supports("bmi");
#else
    return path < 0;
#endif
}

typedef struct {
    const uint32_t *rows;
    const uint16_t *counts;
    const uint8_t *escaped;
    size_t n_rows;
    const uint32_t *entries;
    size_t n_entries;
    const uint8_t *parent;
    uint8_t *out;
    size_t n;
    const uint8_t *block;
    size_t size;
} given;

int dsq_decode_one(const decoder *d, const uint8_t *parent, uint8_t *out, size_t n, uint32_t *x, const uint8_t **p,
                   const uint8_t *end)
{
    int error;
    if (*x < LOW)
        return BAD_STATE;
    for (size_t i = 0; i < n; i++) {
        uint32_t row = parent ? parent[i] : 0;
        if ((error = decode_step(d, row, x, p, end, out + i)))
            return error;
        if (out[i] == ESCAPE && (error = decode_escaped(d, row, x, p, end, out + i)))
            return error;
    }
    return 0;
}

int dsq_decode_turns(int path, const decoder *d, const uint8_t *parent, uint8_t *out, size_t n, uint32_t *states,
                     const uint8_t **p, const uint8_t *end)
{
    size_t groups = n / LANES, done = 0;
    int error;
    while (done < groups && (size_t)(end - *p) >= 2 * LANES) {
        size_t at = done * LANES;
        int64_t more = decoders[path](d, parent ? parent + at : NULL, out + at, groups - done, states, p, end);
        if (more < 0)
            return (int)more;
        done += (size_t)more;
    }
    for (size_t at = done * LANES; at < n; at += LANES) {
        int count = n - at < LANES ? (int)(n - at) : LANES;
        if ((error = decode_group(d, parent ? parent + at : NULL, out + at, count, states, p, end)))
            return error;
    }
    return 0;
}

int dsq_decode_tail(const decoder *d, const uint8_t *parent, uint8_t *out, size_t n, const uint32_t *states)
{
    uint8_t words[2 * LANES];
    const uint8_t *p = words + 4, *end = words + sizeof words;
    int error;
    for (int j = 0; j < LANES; j++) {
        if (states[j] >> 16 != 1)
            return LEFT;
        store16(words + 2 * j, states[j]);
    }
    uint32_t x = load32(words);
    if ((error = dsq_decode_one(d, parent, out, n, &x, &p, end)))
        return error;
    if (x != LOW)
        return LEFT;
    while (p < end)  /* words that the tail did not need are 0 */
        if (*p++)
            return LEFT;
    return 0;
}

int dsq_check_decoder(const decoder *d, size_t n_entries)
{
    for (size_t r = 0; r < d->n_rows; r++) {
        uint32_t info = d->rows[r], bits = info & 15, left = info >> 4 & 0xFFF;
        if (bits < MIN_BITS || left >= 1u << bits || (size_t)(info >> 16 << 4) + left >= n_entries)
            return BAD_TABLES;
        if (d->counts[r] > 256 && d->counts[r] != EMPTY)
            return BAD_TABLES;
    }
    return 0;
}

/* Read the frame of a block. */
static int open_block(int path, size_t n_entries, size_t n, const uint8_t *block, size_t size, opened *s)
{
    if (!dsq_has_path(path) || dsq_check_decoder(&s->d, n_entries) ||
        (s->parent && largest_of(s->parent, n) >= s->d.n_rows))
        return BAD_TABLES;
    s->single = n < SINGLE_CODES;
    if (size < (s->single ? 4 : HEAD) || size % 2)
        return BAD_SIZE;
    s->tail = s->single ? 0 : load16(block);
    if (s->tail > n)
        return BAD_SIZE;
    s->n = n - s->tail, s->p = block + (s->single ? 4 : HEAD), s->end = block + size;
    for (int j = 0; j < (s->single ? 1 : LANES); j++)
        if ((s->states[j] = load32(block + (s->single ? 0 : 2 + 4 * j))) < LOW)
            return BAD_STATE;
    return 0;
}

/* Decode what is left of a block. */
static int close_block(int path, opened *s)
{
    int error;
    if (s->single) {
        error = dsq_decode_one(&s->d, s->parent, s->out, s->n, s->states, &s->p, s->end);
        return error ? error : s->p == s->end && s->states[0] == LOW ? 0 : LEFT;
    }
    const uint8_t *parent = s->parent;
#ifdef DSQ_X86
    if (!s->done && dsq_takes_two(path))
        dsq_decode_in_words(s, NULL);
#endif
    if (s->error)
        return s->error;
    if ((error = dsq_decode_turns(path, &s->d, parent ? parent + s->done : NULL, s->out + s->done, s->n - s->done,
                                  s->states, &s->p, s->end)))
        return error;
    return s->p != s->end ? LEFT
                          : dsq_decode_tail(&s->d, parent ? parent + s->n : NULL, s->out + s->n, s->tail, s->states);
}

/* Decode a block of n codes.
 *
 * path: as `dsq_best_path` returns, or a lower one. rows, counts: n_rows each; escaped: 256 n_rows. parent: n codes,
 * or NULL, and then the row is 0. Returns 0 or an error.
 */
int dsq_decode(int path, const uint32_t *rows, const uint16_t *counts, const uint8_t *escaped, size_t n_rows,
               const uint32_t *entries, size_t n_entries, const uint8_t *parent, uint8_t *out, size_t n,
               const uint8_t *block, size_t size)
{
    opened s = {.d = {rows, entries, counts, escaped, n_rows}, .parent = parent, .out = out};
    int error = open_block(path, n_entries, n, block, size, &s);
    return error ? error : close_block(path, &s);
}

/* Decode two blocks, which have nothing in common but the time they take: arguments of each as of `dsq_decode`, and
 * errors as it returns them. */
void dsq_decode_two(int path, const given blocks[2], int errors[2])
{
    opened two[2];
    for (int i = 0; i < 2; i++) {
        const given *b = blocks + i;
        two[i] = (opened){.d = {b->rows, b->entries, b->counts, b->escaped, b->n_rows}, .parent = b->parent,
                          .out = b->out};
        errors[i] = open_block(path, b->n_entries, b->n, b->block, b->size, two + i);
    }
#ifdef DSQ_X86
    if (!errors[0] && !errors[1] && !two[0].single && !two[1].single && dsq_takes_two(path))
        dsq_decode_in_words(two, two + 1);
#endif
    for (int i = 0; i < 2; i++)
        errors[i] = errors[i] ? errors[i] : close_block(path, two + i);
}

/* Encode codes of one lane from the last one down; 0, or an error. */
int dsq_encode_one(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t n, uint32_t *x, uint8_t **p)
{
    for (size_t i = n; i-- > 0;) {
        uint32_t entry = encode_escaped(e, parent ? parent[i] : 0, codes[i], x, p);
        if (!entry)
            return UNKNOWN;
        encode_step(x, entry >> 16, entry >> 4 & 0xFFF, entry & 15, p);
    }
    return 0;
}

/* Encode the last codes with one lane into `states`, LOW + a word each; return how many these are, or an error. */
int64_t dsq_encode_tail(const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t n, uint32_t *states,
                        int *certain)
{
    uint8_t words[2 * TAIL_WORDS], *end = words + sizeof words, *p = end;
    uint32_t x = LOW;
    size_t tail = 0, most = n / 64 > MAX_TAIL ? n / 64 < 65535 ? n / 64 : 65535 : MAX_TAIL;
    for (; tail < n && tail < most && p - words >= 4; tail++) {  /* a code takes two words at most */
        size_t at = n - tail - 1;
        int error = dsq_encode_one(e, parent ? parent + at : NULL, codes + at, 1, &x, &p);
        if (error)
            return error;
    }
    *certain = p == end && x == LOW;
    states[0] = LOW + (x & 0xFFFF), states[1] = LOW + (x >> 16);
    for (int j = 2; j < LANES; j++, p += 2)
        states[j] = LOW + (p < end ? load16(p) : 0);
    return (int64_t)tail;
}

int dsq_encode_turns(int path, const encoder *e, const uint8_t *parent, const uint8_t *codes, size_t n,
                     uint32_t *states, uint8_t **p)
{
    size_t whole = n / LANES * LANES;
    int error = 0, count = (int)(n - whole);
    if (count)
        error = dsq_encode_group(e, parent ? parent + whole : NULL, codes + whole, count, states, p);
    return error ? error : encoders[path](e, parent, codes, n / LANES, states, p);
}

/* Encode n codes into the end of `buffer`, of at least 4 n + 1024 bytes.
 *
 * table: n_rows << shift; escapes, counts: n_rows. Returns the size of the block, 0 if all codes are certain, or an
 * error.
 */
int64_t dsq_encode(int path, const uint32_t *table, const uint32_t *escapes, const uint16_t *counts, size_t n_rows,
                   unsigned shift, const uint8_t *parent, const uint8_t *codes, size_t n, uint8_t *buffer,
                   size_t capacity)
{
    const encoder e = {table, escapes, counts, n_rows, shift};
    uint8_t largest = largest_of(codes, n), row = parent ? largest_of(parent, n) : 0, *end = buffer + capacity, *p = end;
    if (!dsq_has_path(path) || shift > 8 || row >= n_rows || capacity < 4 * n + 1024)
        return BAD_TABLES;
    if (largest >> shift)
        return UNKNOWN;
    if (n < SINGLE_CODES) {
        uint32_t x = LOW;
        int error = dsq_encode_one(&e, parent, codes, n, &x, &p);
        if (error)
            return error;
        if (p == end && x == LOW)
            return 0;
        p -= 4;
        store32(p, x);
        return end - p;
    }
    uint32_t first[LANES], states[LANES];
    int certain;
    int64_t tail = dsq_encode_tail(&e, parent, codes, n, first, &certain);
    if (tail < 0)
        return tail;
    memcpy(states, first, sizeof states);
    int error = dsq_encode_turns(path, &e, parent, codes, n - (size_t)tail, states, &p);
    if (error)
        return error;
    if (certain && p == end && !memcmp(states, first, sizeof states))
        return 0;
    p -= HEAD;
    store16(p, (uint32_t)tail);
    for (int j = 0; j < LANES; j++)
        store32(p + 2 + 4 * j, states[j]);
    return end - p;
}
