/* Changed codes, 64 in a vector of AVX-512. */
#include "changes.h"

#ifdef DSQ_X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,bmi,bmi2,popcnt")))
#define INLINE \
    static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512dq,bmi,bmi2,popcnt")))
#define NAME(name) name##_avx512

INLINE uint64_t members(const code_set *s, const uint8_t *p)
{
    const __m512i nibble = _mm512_set1_epi8(15), powers = _mm512_set1_epi64((long long)0x8040201008040201ull);
    __m512i v = _mm512_loadu_si512(p), low = _mm512_and_si512(v, nibble);
    __m512i bit = _mm512_shuffle_epi8(powers, _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble));
    __m512i a = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)s->low));
    __m512i b = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)s->high));
    return _mm512_test_epi8_mask(
        _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(a, low), _mm512_movepi8_mask(v), b, low), bit);
}

INLINE uint64_t different(const uint8_t *p, const uint8_t *q)
{
    return _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(p), _mm512_loadu_si512(q));
}

#include "changes_x86.h"
#endif
