/* For passes that are plain loops, of which compilers make vectors: `name_body`, INLINE, becomes one function for each
 * path, name_paths[path]. */
#ifndef DSQ_PATHS_H
#define DSQ_PATHS_H

#include "lanes.h"

#define INLINE inline __attribute__((always_inline))
#ifdef DSQ_X86
/* All that dsq_best_path asks for: compilers use what is named. */
#define ALL_OF_AVX512 "avx512f,avx512bw,avx512vl,avx512dq"
#define ON_EACH_PATH(result, name, parameters, arguments) \
    static result name##_plain parameters { return name##_body arguments; } \
    __attribute__((target("avx2"))) static result name##_avx2 parameters { return name##_body arguments; } \
    __attribute__((target(ALL_OF_AVX512))) static result name##_avx512 parameters { return name##_body arguments; } \
    static result (*const name##_paths[]) parameters = {name##_plain, name##_avx2, name##_avx512};
#else
#define ON_EACH_PATH(result, name, parameters, arguments) \
    static result name##_plain parameters { return name##_body arguments; } \
    static result (*const name##_paths[]) parameters = {name##_plain};
#endif

/* A number in an array that may begin at any byte, as views of a file's bytes do. */
typedef float any_float __attribute__((aligned(1)));

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

/* The largest finite number, with its sign, for infinity: the pattern of bits before it. */
static INLINE float within(float product)
{
    uint32_t bits = bits_of(product);
    return float_of(bits - ((bits & 0x7FFFFFFF) == 0x7F800000));
}

#endif
