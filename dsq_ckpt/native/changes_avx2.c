/* Changed codes, 64 in two vectors of AVX2. */
#include "changes.h"

#ifdef DSQ_X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#define INLINE static inline __attribute__((always_inline, target("avx2,bmi,bmi2,popcnt")))
#define NAME(name) name##_avx2

INLINE uint32_t half(const code_set *s, const uint8_t *p)
{
    const __m256i nibble = _mm256_set1_epi8(15), powers = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    __m256i v = _mm256_loadu_si256((const __m256i *)p), low = _mm256_and_si256(v, nibble);
    __m256i bit = _mm256_shuffle_epi8(powers, _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
    __m256i a = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)s->low));
    __m256i b = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)s->high));
    __m256i has = _mm256_blendv_epi8(_mm256_shuffle_epi8(a, low), _mm256_shuffle_epi8(b, low), v);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(has, bit), bit));
}

INLINE uint64_t members(const code_set *s, const uint8_t *p) { return half(s, p) | (uint64_t)half(s, p + 32) << 32; }

INLINE uint32_t equal(const uint8_t *p, const uint8_t *q)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)p), b = _mm256_loadu_si256((const __m256i *)q);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b));
}

INLINE uint64_t different(const uint8_t *p, const uint8_t *q)
{
    return ~(equal(p, q) | (uint64_t)equal(p + 32, q + 32) << 32);
}

/* Eight at a time whatever their number: branches would be predicted badly. */
INLINE size_t choose(uint64_t m, size_t w, const uint8_t *p, uint32_t *at, uint8_t *codes)
{
    size_t count = (size_t)__builtin_popcountll(m);
    for (size_t done = 0; done < count; done += 8)
        for (int j = 0; j < 8; j++, m &= m - 1) {
            uint64_t place = _tzcnt_u64(m) & 63;
            at[done + j] = (uint32_t)(w + place), codes[done + j] = p[place];
        }
    return count;
}

#include "changes_x86.h"
#endif
