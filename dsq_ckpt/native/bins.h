/* Keys of values and the bins of a window of keys (kernels/keys.py), which sketches count and tables of codes have. */
#ifndef DSQ_BINS_H
#define DSQ_BINS_H

#include "paths.h"

#define KEY_SHIFT 17       /* fp32 bits below a key */
#define NON_FINITE 16320   /* the smallest key of a magnitude that is not finite */
#define MAGNITUDE 0x3FFF   /* a key without its sign */

/* The bins of a row of a table, of which each previous code has one. */
typedef struct {
    int32_t under, top, per_sign; /* of a window [lo, hi): lo - 1, hi - lo + 1, hi - lo + 3 */
} bins;

static inline int is_window(int lo, int hi) { return lo >= 1 && hi > lo && hi <= NON_FINITE; }

static inline bins bins_of(int lo, int hi)
{
    return (bins){.under = lo - 1, .top = hi - lo + 1, .per_sign = hi - lo + 3};
}

/* Return n values times inv_scale: in `scaled`, or where they are if that changes nothing; `given` may be anywhere.
 * (quantize.c) */
const float *dsq_scale_values(int path, const void *given, size_t n, float inv_scale, float *scaled);

/* index[i] = place of x[i] * inv_scale in the table; x: float32, anywhere; `parent`, previous codes, may be NULL.
 * (quantize.c) */
void dsq_find_places(int path, const bins *t, const void *x, float inv_scale, const uint8_t *parent, size_t n,
                     uint32_t *index);

#endif
