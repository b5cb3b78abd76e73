/* Feeds hostile blocks, tables and models to the coder, built with sanitizers: fuzz_lanes PATH ROUNDS SEED CASE...
 *
 * A case is a file of tables and of a block that they decode, written by test_fuzz.py. Every buffer has an allocation
 * of its own and of its very size, so that a byte read or written outside it is seen. Prints how many rounds passed
 * without an error, and how many were refused.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int dsq_best_path(void);
int dsq_decode(int, const uint32_t *, const uint16_t *, const uint8_t *, size_t, const uint32_t *, size_t,
               const uint8_t *, uint8_t *, size_t, const uint8_t *, size_t);
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
} block;
void dsq_decode_two(int, const block[2], int[2]);
int dsq_decode_changes(int, const uint32_t *, const uint16_t *, const uint8_t *, size_t, const uint32_t *, size_t,
                       const uint8_t *, size_t, const uint8_t *, unsigned, uint8_t *, size_t, const uint8_t *, size_t);
int64_t dsq_encode_changes(int, const uint32_t *, const uint32_t *, const uint16_t *, size_t, unsigned, const uint8_t *,
                           size_t, const uint8_t *, unsigned, const uint8_t *, const uint8_t *, size_t, uint8_t *,
                           size_t);
int64_t dsq_encode(int, const uint32_t *, const uint32_t *, const uint16_t *, size_t, unsigned, const uint8_t *,
                   const uint8_t *, size_t, uint8_t *, size_t);
int64_t dsq_values(int, const float *, size_t, unsigned, const uint8_t *, size_t, const uint8_t *, size_t, int, int,
                   float *, int);
int dsq_unpack(int, const uint8_t *, size_t, unsigned, uint8_t *, size_t);
int dsq_quantize(int, const void *, size_t, float, int, int, const uint8_t *, size_t, const uint8_t *, size_t,
                 uint8_t *, unsigned, int, const void *, size_t, uint8_t *);
int dsq_scale(int, float *, size_t, size_t, size_t, const int16_t *, size_t, const int16_t *, size_t, const float *);
int dsq_divide(int, const void *, size_t, size_t, size_t, const int16_t *, size_t, const int16_t *, size_t,
               const float *, void *);
int dsq_over_roots(int, const void *, const void *, size_t, float, void *);
int dsq_times_roots(int, void *, const void *, size_t, float);
int dsq_times_octaves(int, void *, const void *, size_t, const float *);
int dsq_step_lengths(int, const void *, const uint8_t *, size_t, const float *, size_t, size_t, int, int, double *,
                     size_t, double *, size_t, float *, size_t);
int dsq_row_sums(int, const void *, size_t, size_t, int, int, const double *, double *, double *, int32_t *);
int dsq_part_waves(const void *, const uint8_t *, size_t, double, const double *, const double *, size_t,
                   const double *, size_t, double *, double *);
int dsq_refine(int, const void *, size_t, float, const uint8_t *, unsigned, int, const void *, size_t, uint8_t *);
int dsq_pack(int, const uint8_t *, size_t, unsigned, uint8_t *);
int dsq_count_bins(int, const void *, size_t, float, int, int, const uint8_t *, size_t, int64_t *);
int dsq_count_keys(int, const void *, size_t, float, int, int, uint32_t *, int64_t *);
void dsq_count_octaves(const void *, size_t, int64_t *);
int dsq_count_pairs(int, const uint8_t *, const uint8_t *, size_t, size_t, unsigned, uint32_t *, int64_t *);
int64_t dsq_find_positions(int, const uint8_t *, size_t, int, int64_t *, size_t);
int dsq_to_bf16(int, const void *, size_t, uint16_t *);
int dsq_from_bf16(int, const void *, size_t, uint32_t *);
int dsq_kmeans(int, const double *, const double *, size_t, size_t, double *, double *, int32_t *);
int dsq_choose(const int64_t *, const int64_t *, size_t, const double *, const uint8_t *, const uint8_t *, size_t,
               const double *, const uint8_t *, size_t, const int64_t *, const double *, size_t, size_t, double,
               uint8_t *);
int dsq_read_rows(const uint8_t *, size_t, int32_t *, int32_t *, int32_t *, int32_t *, size_t, size_t);

/* KINDS and LIMITS are of blocks that list changes, and else empty. */
enum { ROWS, COUNTS, ESCAPED, ENTRIES, TABLE, ESCAPES, PARENT, CODES, BLOCK, MODEL, KINDS, LIMITS, PARTS };
typedef struct { size_t size; uint8_t *data; } part;

static uint64_t state;
static uint64_t random_below(uint64_t n)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return n ? (state >> 11) % n : 0;
}

static part copy(part from)
{
    part to = {from.size, malloc(from.size ? from.size : 1)};
    memcpy(to.data, from.data, from.size);
    return to;
}

/* Flip bits or set bytes of a part; with `cut`, also shorten or lengthen it. */
static void mutate(part *p, int cut)
{
    for (uint64_t i = 1 + random_below(4); i > 0 && p->size; i--) {
        size_t at = random_below(random_below(2) ? p->size : p->size < 200 ? p->size : 200);
        p->data[at] = random_below(2) ? (uint8_t)random_below(256) : p->data[at] ^ (uint8_t)(1u << random_below(8));
    }
    if (cut && random_below(3) == 0) {
        size_t size = random_below(2) ? random_below(p->size + 1) : p->size + random_below(80);
        part other = {size, calloc(size ? size : 1, 1)};
        memcpy(other.data, p->data, size < p->size ? size : p->size);
        free(p->data);
        *p = other;
    }
}

static block block_of(const part *p, uint8_t *out)
{
    return (block){(uint32_t *)p[ROWS].data, (uint16_t *)p[COUNTS].data, p[ESCAPED].data, p[ROWS].size / 4,
                   (uint32_t *)p[ENTRIES].data, p[ENTRIES].size / 4, p[PARENT].size ? p[PARENT].data : NULL, out,
                   p[CODES].size, p[BLOCK].data, p[BLOCK].size};
}

/* Decode a block that may be altered beside another one, and return whether both give what they give alone. `sound`:
   its tables are not altered; of others no two paths need make the same. */
static int two(int path, const part *p, const part *q, const uint8_t *out, int error, int sound)
{
    part beside[PARTS];
    uint8_t *own = malloc(p[CODES].size), *other = malloc(q[CODES].size);
    int errors[2], last = (int)random_below(2), altered = random_below(4) == 0;
    for (int i = 0; i < PARTS; i++)
        beside[i] = copy(q[i]);
    if (altered)
        mutate(&beside[BLOCK], 1);
    block both[2];
    both[last] = block_of(p, own), both[!last] = block_of(beside, other);
    dsq_decode_two(path, both, errors);
    int same = !sound || (errors[last] == error && (error || !memcmp(own, out, p[CODES].size)));
    same = same && (altered || (!errors[!last] && !memcmp(other, q[CODES].data, q[CODES].size)));
    for (int i = 0; i < PARTS; i++)
        free(beside[i].data);
    free(own), free(other);
    return same;
}

/* Look up the values of n codes by a table, and symbols of the right size or another one. */
static void look_up(int path, part codes)
{
    size_t n = random_below(codes.size + 1), rows = random_below(257), bits = random_below(9), packed = random_below(2);
    size_t size = bits ? packed ? (n * bits + 7) / 8 : n : 0;
    if (random_below(8) == 0)
        size = random_below(2 * n + 2);
    part symbols = {size, malloc(size ? size : 1)};
    for (size_t i = 0; i < size; i++)
        symbols.data[i] = (uint8_t)random_below(packed || random_below(999) == 0 ? 256 : 1u << bits);
    float *table = malloc((rows << bits) * 4 + !rows), *out = malloc(4 * n + !n);
    memset(table, 1, (rows << bits) * 4);
    uint8_t *own = malloc(n ? n : 1);
    memcpy(own, codes.data + codes.size - n, n);
    dsq_values(path, table, rows, (unsigned)bits, own, n, bits ? symbols.data : NULL, size, (int)packed,
               (int)random_below(256), out, (int)random_below(2));
    uint8_t *unpacked = malloc(n ? n : 1);
    dsq_unpack(path, symbols.data, size, (unsigned)bits, unpacked, n);
    free(unpacked), free(symbols.data), free(table), free(out), free(own);
}

/* Quantize any values, which begin at any byte, by a table of any codes, of any window, with cells for some or all. */
static void quantize(int path)
{
    size_t n = random_below(9000), rows = random_below(5), bits = random_below(10), n_cells = random_below(257);
    int lo = 1 + (int)random_below(16400), hi = lo - 1 + (int)random_below(300);
    size_t size = rows * 2 * (size_t)(hi - lo + 3), row = random_below(rows + 1), most = 1 + random_below(256);
    size_t start = random_below(4);
    uint8_t *x = malloc(4 * n + start + !n);
    uint8_t *table = malloc(size + !size), *parent = malloc(n + !n), *out = malloc(n + !n);
    uint8_t *packed = malloc((n * bits + 7) / 8 + !n + !bits);
    double *cells = malloc(512 * sizeof *cells);
    for (size_t i = 0; i < n; i++) {
        uint32_t pattern = (uint32_t)random_below(1ull << 32);
        memcpy(x + start + 4 * i, &pattern, 4);
        parent[i] = (uint8_t)random_below(rows + (random_below(9999) == 0));
    }
    for (size_t i = 0; i < size; i++)
        table[i] = (uint8_t)random_below(most);
    for (size_t i = 0; i < 512; i++)
        cells[i] = (double)random_below(999) - 500;
    dsq_quantize(path, x + start, n, random_below(2) ? 1 : 0.25f, lo, hi, table, rows, random_below(2) ? parent : NULL,
                 row, out, (unsigned)bits, (int)random_below(2), cells, n_cells, packed);
    dsq_refine(path, x + start, n, random_below(2) ? 1 : 0.25f, out, (unsigned)bits, (int)random_below(2), cells,
               n_cells, parent);
    if (bits)
        dsq_pack(path, out, n, (unsigned)bits, packed);
    free(x), free(table), free(parent), free(out), free(packed), free(cells);
}

/* Count any values, which begin at any byte, in a window that may be none, and any codes; return whether all that was
   not refused is counted. */
static int count(int path)
{
    size_t n = random_below(5000), rows = random_below(5), start = random_below(4), bits = random_below(10);
    int lo = (int)random_below(16400), hi = lo - 1 + (int)random_below(300), code = (int)random_below(258) - 1;
    size_t size = hi > lo ? 2 * (size_t)(hi - lo + 3) : 1, capacity = random_below(n + 1);
    uint8_t *x = malloc(4 * n + start + !n), *parent = malloc(n + !n), *symbols = malloc(n + !n);
    int64_t *counts = calloc(rows * size + 1, 8), *octaves = calloc(512, 8), *pairs = calloc(65536, 8);
    int64_t *positions = malloc(8 * capacity + !capacity), sum = 0, counted = 0;
    uint32_t *ways = malloc(4 << 16), *tables = calloc(4 * ((rows << bits) + 16), 4), *wide = malloc(4 * n + !n);
    uint16_t *halves = malloc(2 * n + !n);
    for (size_t i = 0; i < n; i++) {
        uint32_t pattern = (uint32_t)random_below(1ull << 32);
        memcpy(x + start + 4 * i, &pattern, 4);
        parent[i] = (uint8_t)random_below(rows + (random_below(9999) == 0));
        symbols[i] = (uint8_t)(random_below(1u << (bits < 8 ? bits : 8)) ^ (random_below(9999) == 0) << 7);
    }
    float by = random_below(2) ? 1 : 0.25f;
    if (!dsq_count_bins(path, x + start, n, by, lo, hi, random_below(2) ? parent : NULL, rows, counts))
        counted += (int64_t)n;
    if (rows && !dsq_count_keys(path, x + start, n, by, lo, hi, ways, counts))
        counted += (int64_t)n;
    dsq_count_octaves(x + start, n, octaves);
    if (!dsq_count_pairs(path, parent, symbols, n, rows, (unsigned)bits, tables, pairs))
        counted += (int64_t)n;
    for (size_t i = 0; i < rows * size; i++)
        sum += counts[i];
    for (size_t i = 0; i < 65536; i++)
        sum += pairs[i] + (i < 512 ? octaves[i] : 0);
    int64_t found = dsq_find_positions(path, symbols, n, code, positions, capacity);
    for (int64_t i = 0; i < found && i < (int64_t)capacity; i++)
        sum += symbols[positions[i]] == code ? 0 : 5 * (int64_t)n;
    dsq_to_bf16(path, x + start, n, halves);
    dsq_from_bf16(path, x + start, n, wide);
    free(x), free(parent), free(symbols), free(counts), free(octaves), free(pairs), free(positions), free(ways);
    free(tables), free(wide), free(halves);
    /* A count that was refused may have begun. */
    return sum >= counted + (int64_t)n && sum <= 4 * (int64_t)n;
}

/* Cluster points in any order, and choose codes of entries, a few of which are outside the tables. */
static void make_codebook(int path)
{
    size_t n = random_below(1200), k = random_below(9), rows = random_below(5), columns = random_below(300);
    size_t levels = random_below(258), symbols = random_below(257);
    double *points = malloc(8 * n + !n), *weights = malloc(8 * n + !n), *sums = malloc(24 * (n + 1));
    double *pending = malloc(16 * n + !n), *bits = calloc(rows * symbols + 1, 8), *positions = calloc(levels + 1, 8);
    int32_t *starts = calloc(n * k + 1, 4);
    for (size_t i = 0; i < n; i++)
        points[i] = (double)random_below(99) / 99, weights[i] = (double)random_below(9);
    dsq_kmeans(path, points, weights, n, k, sums, pending, starts);
    int64_t *own_rows = malloc(8 * n + !n), *own_columns = malloc(8 * n + !n), *ranks = malloc(8 * 256);
    uint8_t *codes = malloc(levels + 1), *base = malloc(columns + 1), *movable = malloc(columns + 1);
    uint8_t *table = calloc(rows * columns + 1, 1);
    double *places = malloc(8 * columns + 8);
    for (size_t i = 0; i < n; i++) {
        own_rows[i] = (int64_t)random_below(rows) - (random_below(9999) == 0);
        own_columns[i] = (int64_t)random_below(columns + (random_below(9999) == 0));
    }
    for (size_t i = 0; i < 256; i++)
        ranks[i] = (int64_t)random_below(levels) - (random_below(9999) == 0);
    for (size_t i = 0; i < levels; i++)
        codes[i] = (uint8_t)random_below(symbols), positions[i] = (double)i;
    for (size_t i = 0; i < columns; i++)
        base[i] = (uint8_t)random_below(256), movable[i] = random_below(4) > 0, places[i] = (double)random_below(300);
    dsq_choose(own_rows, own_columns, n, places, base, movable, columns, positions, codes, levels, ranks, bits, rows,
               symbols, 0.5, table);
    free(points), free(weights), free(sums), free(pending), free(bits), free(positions), free(starts), free(own_rows);
    free(own_columns), free(ranks), free(codes), free(base), free(movable), free(table), free(places);
}

/* Multiply and divide a part of a matrix by any numbers of rows and columns, of which there may be too few. */
static void scale(int path)
{
    size_t columns = random_below(200), rows = random_below(20), n = random_below(columns * rows + 1);
    size_t start = random_below(columns * rows - n + 1 + (random_below(4) ? 0 : columns + 1));
    size_t n_rows = random_below(3) ? rows : 1, n_columns = random_below(3) ? columns : 1;
    float *values = calloc(n + !n, 4), *quotients = malloc(4 * n + !n), *scales = calloc(2048, 4);
    int16_t *by_row = malloc(2 * n_rows + !n_rows), *by_column = malloc(2 * n_columns + !n_columns);
    for (size_t i = 0; i < n_rows; i++)
        by_row[i] = (int16_t)random_below(65536);
    for (size_t i = 0; i < n_columns; i++)
        by_column[i] = (int16_t)random_below(65536);
    dsq_scale(path, values, n, start, columns, by_row, n_rows, by_column, n_columns, scales);
    dsq_divide(path, values, n, start, columns, by_row, n_rows, by_column, n_columns, scales, quotients);
    free(values), free(quotients), free(scales), free(by_row), free(by_column);
}

/* Return an array of any bits. */
static void *fill(size_t size)
{
    uint8_t *data = malloc(size + !size);
    for (size_t i = 0; i < size; i++)
        data[i] = (uint8_t)random_below(256);
    return data;
}

/* First moments and second ones, which begin at any byte. */
static void roots(int path)
{
    size_t n = random_below(3000), start = random_below(4);
    float units[2] = {0.5f, 0.7f};
    uint8_t *values = fill(4 * n + start), *squares = fill(4 * n + start), *out = malloc(4 * n + start + 1);
    dsq_over_roots(path, values + start, squares + start, n, 1e-20f, out + start);
    dsq_times_roots(path, values + start, squares + start, n, 1e-20f);
    dsq_times_octaves(path, values + start, squares + start, n, units);
    free(values), free(squares), free(out);
}

/* Lengths of steps of a block of a matrix, for arrays of sums of the right sizes or others. */
static void step_lengths(int path)
{
    size_t n = random_below(5000), columns = random_below(random_below(2) ? 40 : 3000), start = random_below(4);
    size_t offset = random_below(columns + (random_below(9) == 0)), off = random_below(9) == 0;
    size_t n_rows = columns ? (offset + n + columns - 1) / columns + random_below(2) - off : 1;
    size_t width = random_below(2) ? columns : n + random_below(2) - off;
    size_t room = (columns < n ? columns : n) - (random_below(9) == 0);
    int by_row = (int)random_below(2), by_column = (int)random_below(2);
    if (!by_row)
        n_rows = 1;
    if (!by_column)
        width = 1;
    if (n_rows > 9999 || width > 9999 || room > 9999)
        return;
    uint8_t *values = fill(4 * n + start), *codes = fill(n);
    float *inverse = calloc(256, 4), *space = malloc(4 * room + !room);
    for (int i = 0; i < 200; i++)
        inverse[i] = (float)random_below(99);
    double *rows = calloc(2 * n_rows + !n_rows, 8), *sums = calloc(2 * width + !width, 8);
    dsq_step_lengths(path, values + start, codes, n, inverse, offset, columns, by_row, by_column, rows, n_rows, sums,
                     width, space, room);
    free(values), free(codes), free(inverse), free(space), free(rows), free(sums);
}

/* Sums of the rows and columns of a matrix. */
static void row_sums(int path)
{
    size_t rows = random_below(20), columns = random_below(200), start = random_below(4);
    int by_row = (int)random_below(2), by_column = (int)random_below(2);
    size_t n_numbers = by_row ? rows : 0, width = by_column ? columns : 1;
    uint8_t *values = fill(4 * rows * columns + start);
    double *inverses = calloc(2048, 8), *numbers = malloc(8 * n_numbers + !n_numbers);
    double *sums = calloc(2 * width + !width, 8);
    int32_t *reach = malloc(8);
    dsq_row_sums(path, values + start, rows, columns, by_row, by_column, inverses, numbers, sums, reach);
    free(values), free(inverses), free(numbers), free(sums), free(reach);
}

/* Places of values in parts of cells of any widths. */
static void part_waves(void)
{
    size_t n = random_below(2000), parts = random_below(random_below(9) ? 20 : 300), places = random_below(100);
    size_t start = random_below(4);
    uint8_t *values = fill(4 * n + start), *codes = fill(n);
    double *low = fill(256 * 8), *steps = fill(256 * 8), *waves = calloc(2 * places + !places, 8);
    double *space = calloc(768 * parts + !parts, 8), *out = malloc(24);
    for (int i = 0; i < 200; i++) {
        low[i] = -(double)random_below(4);
        steps[i] = random_below(2) ? (double)parts : (double)parts / 3;
    }
    for (size_t i = 0; i < n; i++) {
        float value = (float)random_below(1 << 20) / (1 << 18) - 2;
        if (random_below(4))
            memcpy(values + start + 4 * i, &value, 4);
    }
    dsq_part_waves(values + start, codes, n, 1.0, low, steps, parts, waves, places, space, out);
    free(values), free(codes), free(low), free(steps), free(waves), free(space), free(out);
}

int main(int argc, char **argv)
{
    int path = atoi(argv[1]);
    long rounds = atol(argv[2]), passed = 0, refused = 0;
    state = strtoull(argv[3], NULL, 10) * 2654435761u + 88172645463325252u;
    int cases = argc - 4;
    part (*given)[PARTS] = calloc((size_t)cases, sizeof *given);
    uint64_t (*shape)[2] = calloc((size_t)cases, sizeof *shape);
    for (int c = 0; c < cases; c++) {
        FILE *file = fopen(argv[4 + c], "rb");
        if (!file || fread(shape[c], 8, 2, file) != 2)  /* shift, symbols */
            return 2;
        for (int i = 0; i < PARTS; i++) {
            uint64_t size;
            if (fread(&size, 8, 1, file) != 1)
                return 2;
            given[c][i].size = size, given[c][i].data = malloc(size ? size : 1);
            if (fread(given[c][i].data, 1, size, file) != size)
                return 2;
        }
        fclose(file);
    }
    for (long round = 0; round < rounds; round++) {
        int c = (int)random_below((uint64_t)cases);
        part p[PARTS];
        for (int i = 0; i < PARTS; i++)
            p[i] = copy(given[c][i]);
        size_t n = p[CODES].size, rows = p[ROWS].size / 4;
        uint64_t what = random_below(p[KINDS].size ? 12 : 10);
        if (what < 5)
            mutate(&p[BLOCK], 1);
        else if (what == 5)
            mutate(&p[PARENT], 0);
        else if (what == 6)
            mutate(&p[ROWS], 0);
        else if (what == 7)
            mutate(&p[ENTRIES], 1);
        else if (what == 8)
            mutate(&p[COUNTS], 0);
        else if (what > 9)
            mutate(&p[what == 10 ? KINDS : LIMITS], 0);
        const uint8_t *parent = p[PARENT].size ? p[PARENT].data : NULL;
        uint8_t *out = malloc(n);
        int error;
        if (p[KINDS].size) {
            memcpy(out, parent, n);
            error = dsq_decode_changes(path, (uint32_t *)p[ROWS].data, (uint16_t *)p[COUNTS].data, p[ESCAPED].data, rows,
                                       (uint32_t *)p[ENTRIES].data, p[ENTRIES].size / 4, p[KINDS].data, p[KINDS].size,
                                       p[LIMITS].data, (unsigned)p[LIMITS].size, out, n, p[BLOCK].data, p[BLOCK].size);
            if (error && memcmp(out, parent, n))
                return 5;  /* codes are changed by sound blocks only */
        } else
            error = dsq_decode(path, (uint32_t *)p[ROWS].data, (uint16_t *)p[COUNTS].data, p[ESCAPED].data, rows,
                               (uint32_t *)p[ENTRIES].data, p[ENTRIES].size / 4, parent, out, n, p[BLOCK].data,
                               p[BLOCK].size);
        int other = (int)random_below((uint64_t)cases);
        if (!p[KINDS].size && !given[other][KINDS].size && round % 2)
            if (!two(path, p, given[other], out, error, what < 6 || what == 9))
                return 6;
        if (what == 9 && (error || memcmp(out, p[CODES].data, n)))
            return 3;  /* nothing was changed */
        error ? refused++ : passed++;
        if (round % 8 == 0) {  /* what a fit cannot make, an encoder is not to write outside its buffer for */
            mutate(&p[random_below(2) ? TABLE : CODES], 0);
            if (random_below(2))
                mutate(&p[ESCAPES], 0);
            size_t capacity = (p[KINDS].size ? 8 : 4) * n + 1024;
            uint8_t *buffer = malloc(capacity);
            if (p[KINDS].size) {
                int64_t size = dsq_encode_changes(
                    path, (uint32_t *)p[TABLE].data, (uint32_t *)p[ESCAPES].data, (uint16_t *)p[COUNTS].data, rows,
                    (unsigned)shape[c][0], p[KINDS].data, p[KINDS].size, p[LIMITS].data, (unsigned)p[LIMITS].size, parent,
                    p[CODES].data, n, buffer, capacity);
                if (size > (int64_t)capacity)
                    return 4;
            } else if (dsq_encode(path, (uint32_t *)p[TABLE].data, (uint32_t *)p[ESCAPES].data,
                                  (uint16_t *)p[COUNTS].data, rows, (unsigned)shape[c][0], parent, p[CODES].data, n,
                                  buffer, capacity) > (int64_t)capacity)
                return 4;
            free(buffer);
        }
        if (round % 8 == 1)
            look_up(path, p[CODES]), scale(path), quantize(path), make_codebook(path);
        if (round % 8 == 2)
            roots(path), step_lengths(path), row_sums(path), part_waves();
        if (round % 8 == 1 && !count(path))
            return 7;
        mutate(&p[MODEL], 1);
        size_t symbols = shape[c][1], lines = rows + random_below(3);
        int32_t *freqs = calloc(lines * symbols + 1, 4), *ends = calloc(lines + 1, 4), *bits = calloc(lines + 1, 4);
        int32_t *firsts = malloc(4 * lines + 4);
        memset(firsts, 255, 4 * lines + 4);
        dsq_read_rows(p[MODEL].data, p[MODEL].size, freqs, firsts, ends, bits, lines, symbols);
        free(freqs), free(ends), free(bits), free(firsts), free(out);
        for (int i = 0; i < PARTS; i++)
            free(p[i].data);
    }
    for (int c = 0; c < cases; c++)
        for (int i = 0; i < PARTS; i++)
            free(given[c][i].data);
    free(given), free(shape);
    printf("%ld %ld\n", passed, refused);
    return 0;
}
