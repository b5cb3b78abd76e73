/* Blocks of which few codes change: where these are, and what they become (docs/format.md, section 10). */
#include <stdlib.h>

#include "changes.h"

#define SINGLE_CHANGES 4096 /* blocks of fewer tokens and symbols have one lane; readers are told */
#define MAX_NUMBER 5 /* bytes of the number of tokens of a class */

int64_t dsq_select_plain(const classes *c, const uint8_t *codes, size_t n, uint8_t *const *maps, const uint64_t *ends,
                         uint32_t *at, uint8_t *listed, uint8_t *largest)
{
    size_t found = 0;
    uint64_t seen[MAX_CLASSES + 2] = {0};
    for (size_t i = 0; i < n; i++) {
        unsigned k = c->of[codes[i]];
        uint64_t rank = seen[k]++;
        at[found] = (uint32_t)i;
        found += k < c->n_classes ? maps[k][rank >> 3] >> (rank & 7) & 1 : k == c->n_classes;
    }
    *largest = largest_of(codes, n);
    for (unsigned k = 0; k < c->n_classes; k++)
        if (ends[k] > seen[k])
            return LEFT;
    for (size_t i = 0; i < found; i++)
        listed[i] = codes[at[i]];
    return (int64_t)found;
}

int64_t dsq_compare_plain(const classes *c, const uint8_t *parent, const uint8_t *codes, size_t n,
                          uint8_t *const *maps, uint64_t *ends, uint32_t *at, uint8_t *before)
{
    size_t found = 0;
    uint64_t seen[MAX_CLASSES + 2] = {0};
    int unknown = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned k = c->of[parent[i]], listed = k == c->n_classes, differs = parent[i] != codes[i];
        uint64_t rank = seen[k]++;
        if (k < c->n_classes) {
            maps[k][rank >> 3] |= (uint8_t)(differs << (rank & 7));
            listed = differs;
        }
        unknown |= differs & !listed;
        at[found] = (uint32_t)i, before[found] = parent[i];
        found += listed;
    }
    memcpy(ends, seen, MAX_CLASSES * sizeof *seen);
    return unknown ? UNKNOWN : (int64_t)found;
}

size_t dsq_count_plain(const classes *c, unsigned k, const uint8_t *codes, size_t n)
{
    size_t found = 0;
    for (size_t i = 0; i < n; i++)
        found += c->of[codes[i]] == k;
    return found;
}

#ifdef DSQ_X86
static select_changes *const selects[] = {dsq_select_plain, dsq_select_avx2, dsq_select_avx512};
static compare_codes *const compares[] = {dsq_compare_plain, dsq_compare_avx2, dsq_compare_avx512};
static count_codes *const counters[] = {dsq_count_plain, dsq_count_avx2, dsq_count_avx512};

/* The passes of a path: Intel's first processors with AVX-512 lack VBMI2. */
static int passes(int path)
{
    if (!dsq_fast_bits())
        return 0;
    return path < 2 || __builtin_cpu_supports("avx512vbmi2") ? path : 1;
}
#else
static select_changes *const selects[] = {dsq_select_plain};
static compare_codes *const compares[] = {dsq_compare_plain};
static count_codes *const counters[] = {dsq_count_plain};

static int passes(int path) { (void)path; return 0; }
#endif

/* Read the classes of the previous codes; 0 if these or what belongs to them are out of range. */
static int read_classes(classes *c, const uint8_t *kinds, size_t contexts, unsigned n_classes, const uint8_t *limits,
                        size_t n_rows)
{
    memset(c, 0, sizeof *c);
    memset(c->of, MAX_CLASSES + 1, sizeof c->of);
    c->n_classes = n_classes;
    if (n_classes > MAX_CLASSES || contexts > 256 || contexts + n_classes > n_rows || n_rows > 256)
        return 0;
    for (unsigned k = 0; k < n_classes; k++)
        if (!limits[k])
            return 0;
    for (size_t code = 0; code < contexts; code++) {
        unsigned k = kinds[code];
        if (k > n_classes)
            continue;
        c->of[code] = (uint8_t)k;
        c->listed |= k == n_classes;
        (code < 128 ? c->sets[k].low : c->sets[k].high)[code & 15] |= (uint8_t)(1u << (code >> 4 & 7));
    }
    return 1;
}

/* Set the bits of a map that tokens tell; return how many elements they reach over, or -1: more than n. */
static int64_t fill_map(const uint8_t *tokens, size_t count, unsigned limit, size_t n, uint8_t *map)
{
    uint64_t at = 0, reach = 0;
    if (count && tokens[count - 1] >= limit)
        return -1;  /* the last one is to be a change */
    for (size_t i = 0; i < count; i++)
        reach += tokens[i] < limit ? tokens[i] + 1u : limit;
    if (reach > n)
        return -1;
    for (size_t i = 0; i < count; i++) {
        unsigned changes = tokens[i] < limit;
        at += changes ? tokens[i] : limit;
        map[at >> 3] |= (uint8_t)(changes << (at & 7));
        at += changes;
    }
    return (int64_t)reach;
}

/* The tokens of a map of n bits; return how many. */
static size_t read_map(const uint8_t *map, uint64_t n, unsigned limit, uint8_t *tokens)
{
    size_t count = 0;
    uint64_t next = 0, m;
    for (uint64_t w = 0; w < n; w += 64)
        for (memcpy(&m, map + w / 8, 8); m; m &= m - 1) {
            uint64_t at = w + (uint64_t)__builtin_ctzll(m), gap = at - next;
            for (next = at + 1; gap >= limit; gap -= limit)
                tokens[count++] = (uint8_t)limit;
            tokens[count++] = (uint8_t)gap;
        }
    return count;
}

/* Read how many tokens each class has, n at most; return the end, or NULL. */
static const uint8_t *read_head(const uint8_t *p, const uint8_t *end, unsigned n_classes, size_t n, int *lanes,
                                size_t *counts)
{
    for (unsigned k = 0; k < n_classes; k++) {
        uint64_t value = 0;
        for (int i = 0;; i++) {
            if (p == end || i == MAX_NUMBER)
                return NULL;
            value |= (uint64_t)(*p & 127) << (7 * i);
            if (*p++ < 128)
                break;
        }
        if (k == 0)
            *lanes = value & 1, value >>= 1;
        if (value > n)
            return NULL;
        counts[k] = (size_t)value;
    }
    return p;
}

static void write_number(uint64_t value, uint8_t **p)
{
    uint8_t bytes[MAX_NUMBER];
    int count = 0;
    do
        bytes[count++] = value & 127;
    while (value >>= 7);
    for (int i = count; i-- > 0;)
        *--*p = (uint8_t)(bytes[i] | (i < count - 1) << 7);
}

/* Read the lanes' first states, and the number of codes of the tail. */
static int read_states(const uint8_t **p, const uint8_t *end, int lanes, uint32_t *states, size_t *tail)
{
    int count = lanes ? LANES : 1;
    if (end - *p < (lanes ? HEAD : 4) || (end - *p) % 2)
        return BAD_SIZE;
    *tail = 0;
    if (lanes)
        *tail = load16(*p), *p += 2;
    for (int j = 0; j < count; j++, *p += 4)
        if ((states[j] = load32(*p)) < LOW)
            return BAD_STATE;
    return 0;
}

/* Decode the tokens of all classes, one after the other: each class has a row of its own, after `contexts` others. */
static int decode_tokens(int path, const decoder *d, size_t contexts, unsigned n_classes, const size_t *n_tokens,
                         uint8_t *tokens, int lanes, uint32_t *states, const uint8_t **p, const uint8_t *end)
{
    size_t at = 0, stop = 0, total = 0;
    int error = 0;
    for (unsigned k = 0; k < n_classes; k++)
        total += n_tokens[k];
    for (unsigned k = 0; !error && k < n_classes; k++) {
        size_t r = contexts + k;
        const decoder alone = {d->rows + r, d->entries, d->counts + r, d->escaped + 256 * r, 1};
        stop += n_tokens[k];
        if (!lanes) {
            error = dsq_decode_one(&alone, NULL, tokens + at, stop - at, states, p, end);
            at = stop;
        } else if (at < stop) {
            uint8_t row[LANES];  /* of a group that begins in this class and ends in another one */
            size_t whole = (stop - at) / LANES * LANES, rest, next = stop;
            error = dsq_decode_turns(path, &alone, NULL, tokens + at, whole, states, p, end);
            at += whole;
            rest = total - at < LANES ? total - at : LANES;
            for (size_t i = 0, of = k; i < rest; i++) {
                while (at + i == next)
                    next += n_tokens[++of];
                row[i] = (uint8_t)(contexts + of);
            }
            if (!error && at < stop)
                error = dsq_decode_turns(path, d, row, tokens + at, rest, states, p, end), at += rest;
        }
    }
    return error;
}

/* Decode a block in place of its n previous codes, which are left as they are after an error.
 *
 * rows to n_entries: a decoder's tables, of `contexts` rows for symbols, then one for the tokens of each class.
 * kinds: the class of each previous code. limits: of each class, the token of so many codes that do not change.
 */
int dsq_decode_changes(int path, const uint32_t *rows, const uint16_t *counts, const uint8_t *escaped, size_t n_rows,
                       const uint32_t *entries, size_t n_entries, const uint8_t *kinds, size_t contexts,
                       const uint8_t *limits, unsigned n_classes, uint8_t *codes, size_t n, const uint8_t *block,
                       size_t size)
{
    const decoder d = {rows, entries, counts, escaped, n_rows};
    const uint8_t *p = block, *end = block + size;
    classes c;
    if (!dsq_has_path(path) || !n_classes || n > UINT32_MAX - 64 || dsq_check_decoder(&d, n_entries) ||
        !read_classes(&c, kinds, contexts, n_classes, limits, n_rows))
        return BAD_TABLES;
    int way = passes(path), lanes = 0, error;
    size_t n_tokens[MAX_CLASSES], total = 0, tail;
    uint32_t states[LANES];
    if (!(p = read_head(p, end, n_classes, n, &lanes, n_tokens)))
        return BAD_SIZE;
    if ((error = read_states(&p, end, lanes, states, &tail)))
        return error;
    for (unsigned k = 0; k < n_classes; k++)
        total += n_tokens[k];
    if (total > n)
        return BAD_SIZE;
    size_t most = total + (c.listed ? counters[way](&c, n_classes, codes, n) : 0) + SLACK, map = map_size(n);
    uint8_t *maps[MAX_CLASSES], *memory = malloc(6 * most + total), *bits = calloc(n_classes, map);
    if (!memory || !bits) {
        free(memory), free(bits);
        return NO_MEMORY;
    }
    uint32_t *at = (uint32_t *)memory;
    uint8_t *context = memory + 4 * most, *symbols = context + most, *tokens = symbols + most, largest;
    error = decode_tokens(path, &d, contexts, n_classes, n_tokens, tokens, lanes, states, &p, end);
    uint64_t ends[MAX_CLASSES];
    for (size_t k = 0, first = 0; !error && k < n_classes; first += n_tokens[k++]) {
        maps[k] = bits + k * map;
        int64_t reach = fill_map(tokens + first, n_tokens[k], limits[k], n, maps[k]);
        ends[k] = (uint64_t)reach;
        error = reach < 0 ? LEFT : 0;
    }
    int64_t found = error ? error : selects[way](&c, codes, n, maps, ends, at, context, &largest);
    if (!error && largest >= contexts)
        found = BAD_TABLES;
    if (found >= 0) {
        const decoder own = {rows, entries, counts, escaped, contexts};  /* fewer rows may fit into registers */
        size_t count = (size_t)found, start = count - tail;
        if (tail > count)
            error = BAD_SIZE;
        else if (!lanes && !(error = dsq_decode_one(&own, context, symbols, count, states, &p, end)))
            error = p != end || *states != LOW ? LEFT : 0;
        else if (lanes && !(error = dsq_decode_turns(path, &own, context, symbols, start, states, &p, end)))
            error = p != end ? LEFT : dsq_decode_tail(&own, context + start, symbols + start, tail, states);
        for (size_t i = 0; !error && i < count; i++)
            codes[at[i]] = symbols[i];
    }
    free(memory), free(bits);
    return found < 0 ? (int)found : error;
}

/* Encode n codes given previous ones, all below `contexts`, into the end of `buffer`, of at least 8 n + 1024 bytes.
 * Returns the size of the block, or an error. Tables as of the decoder. */
int64_t dsq_encode_changes(int path, const uint32_t *table, const uint32_t *escapes, const uint16_t *counts,
                           size_t n_rows, unsigned shift, const uint8_t *kinds, size_t contexts, const uint8_t *limits,
                           unsigned n_classes, const uint8_t *parent, const uint8_t *codes, size_t n, uint8_t *buffer,
                           size_t capacity)
{
    const encoder e = {table, escapes, counts, n_rows, shift};
    uint8_t *end = buffer + capacity, *p = end;
    classes c;
    if (!dsq_has_path(path) || shift > 8 || !n_classes || n > UINT32_MAX - 64 || largest_of(parent, n) >= contexts ||
        capacity < 8 * n + 1024 || !read_classes(&c, kinds, contexts, n_classes, limits, n_rows))
        return BAD_TABLES;
    for (unsigned k = 0; k < n_classes; k++)
        if (limits[k] >> shift)
            return BAD_TABLES;
    if (largest_of(codes, n) >> shift)
        return UNKNOWN;
    size_t map = map_size(n);
    uint8_t *maps[MAX_CLASSES], *memory = malloc(4 * n + SLACK), *bits = calloc(n_classes, map);
    uint32_t *at = malloc(4 * (n + SLACK));
    int64_t result = NO_MEMORY;
    if (!memory || !bits || !at)
        goto done;
    for (unsigned k = 0; k < n_classes; k++)
        maps[k] = bits + k * map;
    uint8_t *tokens = memory, *rows = tokens + n, *symbols = rows + n, *context = symbols + n;
    uint64_t ends[MAX_CLASSES];
    size_t n_tokens[MAX_CLASSES], total = 0, count;
    if ((result = compares[passes(path)](&c, parent, codes, n, maps, ends, at, context)) < 0)
        goto done;
    count = (size_t)result;
    for (size_t i = 0; i < count; i++)
        symbols[i] = codes[at[i]];
    for (unsigned k = 0; k < n_classes; total += n_tokens[k++]) {
        n_tokens[k] = read_map(maps[k], ends[k], limits[k], tokens + total);
        memset(rows + total, (int)(contexts + k), n_tokens[k]);
    }
    uint32_t states[LANES];
    int lanes = total + count >= SINGLE_CHANGES, certain;
    if (lanes) {
        int64_t tail = dsq_encode_tail(&e, context, symbols, count, states, &certain);
        result = tail < 0 ? tail : dsq_encode_turns(path, &e, context, symbols, count - (size_t)tail, states, &p);
        if (result >= 0)
            result = dsq_encode_turns(path, &e, rows, tokens, total, states, &p);
        if (result < 0)
            goto done;
        p -= HEAD;
        store16(p, (uint32_t)tail);
        for (int j = 0; j < LANES; j++)
            store32(p + 2 + 4 * j, states[j]);
    } else {
        states[0] = LOW;
        if ((result = dsq_encode_one(&e, context, symbols, count, states, &p)) ||
            (result = dsq_encode_one(&e, rows, tokens, total, states, &p)))
            goto done;
        p -= 4;
        store32(p, states[0]);
    }
    for (unsigned k = n_classes; k-- > 0;)
        write_number(k ? n_tokens[k] : (uint64_t)n_tokens[0] << 1 | (unsigned)lanes, &p);
    result = end - p;
done:
    free(memory), free(bits), free(at);
    return result;
}
