/* Passes over 64 codes at a time, included where TARGET, INLINE, NAME(name) and these are defined:
 * members(set, p): which of 64 codes are in a set, the first one in the lowest bit; different(p, q): which differ;
 * choose(m, w, p, at, codes): write the places of the bits of m, plus w, and the codes there of 64; return how many. More
 * may be written than there are, up to SLACK.
 */
INLINE uint64_t low_bits(size_t n) { return n < 64 ? (1ull << n) - 1 : ~0ull; }

/* 64 codes, of which n are there; the others are zeros in `rest`. */
INLINE const uint8_t *whole(const uint8_t *p, size_t n, uint8_t *rest)
{
    if (n >= 64)
        return p;
    memset(rest, 0, 64);
    memcpy(rest, p, n);
    return rest;
}

/* `select_changes` with the number of classes known to the compiler. */
INLINE int64_t select_of(const classes *c, unsigned n_classes, const uint8_t *codes, size_t n, uint8_t *const *maps,
                         const uint64_t *ends, uint32_t *at, uint8_t *listed, uint8_t *largest)
{
    size_t found = 0;
    uint64_t seen[MAX_CLASSES] = {0};
    uint8_t rest[64];
    *largest = largest_of(codes, n);
    for (size_t w = 0; w < n; w += 64) {
        const uint8_t *p = whole(codes + w, n - w, rest);
        uint64_t all = low_bits(n - w), changed = 0, words[2];
        for (unsigned k = 0; k < n_classes; k++) {
            uint64_t m = all & members(c->sets + k, p), shift = seen[k] & 63;
            memcpy(words, maps[k] + (seen[k] >> 6 << 3), sizeof words);
            changed |= _pdep_u64(words[0] >> shift | words[1] << 1 << (63 - shift), m);
            seen[k] += (uint64_t)__builtin_popcountll(m);
        }
        if (c->listed)
            changed |= all & members(c->sets + n_classes, p);
        found += choose(changed, w, p, at + found, listed + found);
    }
    for (unsigned k = 0; k < n_classes; k++)
        if (ends[k] > seen[k])
            return LEFT;
    return (int64_t)found;
}

TARGET int64_t NAME(dsq_select)(const classes *c, const uint8_t *codes, size_t n, uint8_t *const *maps,
                                const uint64_t *ends, uint32_t *at, uint8_t *listed, uint8_t *largest)
{
    switch (c->n_classes) {
    case 1: return select_of(c, 1, codes, n, maps, ends, at, listed, largest);
    case 2: return select_of(c, 2, codes, n, maps, ends, at, listed, largest);
    case 3: return select_of(c, 3, codes, n, maps, ends, at, listed, largest);
    default: return select_of(c, MAX_CLASSES, codes, n, maps, ends, at, listed, largest);
    }
}

TARGET int64_t NAME(dsq_compare)(const classes *c, const uint8_t *parent, const uint8_t *codes, size_t n,
                                 uint8_t *const *maps, uint64_t *ends, uint32_t *at, uint8_t *before)
{
    size_t found = 0;
    uint64_t seen[MAX_CLASSES] = {0}, unknown = 0;
    uint8_t rest[2][64];
    for (size_t w = 0; w < n; w += 64) {
        const uint8_t *p = whole(parent + w, n - w, rest[0]), *q = whole(codes + w, n - w, rest[1]);
        uint64_t all = low_bits(n - w), differ = all & different(p, q), listed = 0, words[2];
        for (unsigned k = 0; k < c->n_classes; k++) {
            uint64_t m = all & members(c->sets + k, p), bits = _pext_u64(differ, m), shift = seen[k] & 63;
            uint8_t *to = maps[k] + (seen[k] >> 6 << 3);
            memcpy(words, to, sizeof words);
            words[0] |= bits << shift, words[1] = bits >> 1 >> (63 - shift);
            memcpy(to, words, sizeof words);
            listed |= differ & m;
            seen[k] += (uint64_t)__builtin_popcountll(m);
        }
        if (c->listed)
            listed |= all & members(c->sets + c->n_classes, p);
        unknown |= differ & ~listed;
        found += choose(listed, w, p, at + found, before + found);
    }
    memcpy(ends, seen, sizeof seen);
    return unknown ? UNKNOWN : (int64_t)found;
}

TARGET size_t NAME(dsq_count)(const classes *c, unsigned k, const uint8_t *codes, size_t n)
{
    size_t found = 0;
    uint8_t rest[64];
    for (size_t w = 0; w < n; w += 64) {
        uint64_t m = members(c->sets + k, whole(codes + w, n - w, rest)) & low_bits(n - w);
        found += (size_t)__builtin_popcountll(m);
    }
    return found;
}
