/* Which codes of a block change: passes over the previous codes, one set for each path.
 *
 * Previous codes fall into classes. Of class k < n_classes few codes change: bit i of map k tells whether that of
 * element number i of the class does. All codes after those of class n_classes are listed, and none of the others.
 */
#ifndef DSQ_CHANGES_H
#define DSQ_CHANGES_H

#include "lanes.h"

#define MAX_CLASSES 4
#define SLACK 64  /* entries after the last one that `select` and `compare` may write to */

/* A set of codes: bit c >> 4 & 7 of entry c & 15 of `low`, or, from code 128 on, of `high`. */
typedef struct { uint8_t low[16], high[16]; } code_set;

typedef struct {
    uint8_t of[256];                     /* the class of each code, MAX_CLASSES + 1 for those that never change */
    code_set sets[MAX_CLASSES + 1];      /* the codes of each class */
    unsigned n_classes;
    int listed;                          /* whether class n_classes has codes */
} classes;

/* Bytes of a map of n bits: whole words, and two more that may be read. */
static inline size_t map_size(size_t n) { return (n / 64 + 3) * 8; }

/* Write which elements are listed to `at`, and their codes to `listed`, in order; return how many, or LEFT if a map has
   more than `ends` bits. `largest`: the largest of all codes. */
typedef int64_t select_changes(const classes *c, const uint8_t *codes, size_t n, uint8_t *const *maps,
                               const uint64_t *ends, uint32_t *at, uint8_t *listed, uint8_t *largest);
/* Fill maps, which are zero, and return the elements of each class in `ends`; write which are listed, and their previous
   codes to `before`; UNKNOWN: of codes that never change, one does. */
typedef int64_t compare_codes(const classes *c, const uint8_t *parent, const uint8_t *codes, size_t n,
                              uint8_t *const *maps, uint64_t *ends, uint32_t *at, uint8_t *before);
/* How many codes are of a class. */
typedef size_t count_codes(const classes *c, unsigned k, const uint8_t *codes, size_t n);

select_changes dsq_select_plain;
compare_codes dsq_compare_plain;
count_codes dsq_count_plain;
#ifdef DSQ_X86
select_changes dsq_select_avx2, dsq_select_avx512;
compare_codes dsq_compare_avx2, dsq_compare_avx512;
count_codes dsq_count_avx2, dsq_count_avx512;
#endif

#endif
