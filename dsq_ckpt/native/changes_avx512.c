/* Changed codes, 64 in a vector of AVX-512. */
#include "changes.h"

#ifdef DSQ_X86
#include <immintrin.h>

#define FEATURES "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,bmi,bmi2,popcnt"
#define TARGET __attribute__((target(FEATURES)))
#define INLINE static inline __attribute__((always_inline, target(FEATURES)))
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

INLINE size_t choose(uint64_t m, size_t w, const uint8_t *p, uint32_t *at, uint8_t *codes)
{
    const __m512i order = _mm512_set_epi64(
        0x3F3E3D3C3B3A3938, 0x3736353433323130, 0x2F2E2D2C2B2A2928, 0x2726252423222120, 0x1F1E1D1C1B1A1918,
        0x1716151413121110, 0x0F0E0D0C0B0A0908, 0x0706050403020100);
    __m512i places = _mm512_maskz_compress_epi8(m, order), base = _mm512_set1_epi32((int)w);
    size_t count = (size_t)__builtin_popcountll(m);
    _mm512_storeu_si512(codes, _mm512_maskz_compress_epi8(m, _mm512_loadu_si512(p)));
    size_t done = 0;
    do {  /* nearly always once: whether there are any is predicted badly */
        _mm512_storeu_si512(at + done, _mm512_add_epi32(base, _mm512_cvtepu8_epi32(_mm512_castsi512_si128(places))));
        places = _mm512_shuffle_i32x4(places, places, 0x39);
    } while ((done += 16) < count);
    return count;
}

#include "changes_x86.h"
#endif
