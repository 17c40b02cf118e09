// The instructions of AVX-512 and VNNI in the kernel's level "vnni", implemented with a compiler's vectors: if this folder is
// before the system's, with `-D__AVX512F__ -D__AVX512VNNI__`, this level runs on any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

typedef float __m512 __attribute__((vector_size(64)));
typedef long long __m512i __attribute__((vector_size(64)));
typedef uint16_t __mmask16;
typedef int32_t IntsOf512 __attribute__((vector_size(64)));
typedef uint16_t WordsOf512 __attribute__((vector_size(64)));

enum { _MM_FROUND_TO_NEG_INF = 1, _MM_FROUND_NO_EXC = 8, _CMP_GT_OQ, _CMP_NLT_UQ };

template <typename To, typename From>
inline To InEach(From from) {  // from(lane) in each of 16 lanes
  To x;
  for (int i = 0; i < 16; ++i) x[i] = from(i);
  return x;
}

inline __m512 _mm512_set1_ps(float x) { return __m512{} + x; }
inline __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) { return InEach<__m512>([&](int i) { return __builtin_fmaf(x[i], y[i], z[i]); }); }
inline __m512 _mm512_sqrt_ps(__m512 x) { return InEach<__m512>([&](int i) { return std::sqrt(x[i]); }); }
inline __m512 Floor(__m512 x) {  // for numbers of a moderate size
  const __m512 whole = __builtin_convertvector(__builtin_convertvector(x, IntsOf512), __m512);
  return whole > x ? whole - 1.0f : whole;
}
inline __m512 _mm512_scalef_ps(__m512 x, __m512 y) {
  const __m512 least = __m512{} - 126.0f, power = Floor(y < least ? least : y);
  const __m512 found = x * (__m512)((__builtin_convertvector(power, IntsOf512) + 127) << 23);
  return y != y ? y : y < least ? __m512{} : found;
}
inline __m512 _mm512_reduce_ps(__m512 x, int) { return x == -INFINITY ? __m512{} : x - Floor(x); }
inline float _mm512_reduce_max_ps(__m512 x) {
  float most = x[0];
  for (int i = 1; i < 16; ++i) most = x[i] > most ? x[i] : most;
  return most;
}
inline __m512 _mm512_mask_loadu_ps(__m512 other, __mmask16 mask, const float* at) {
  return InEach<__m512>([&](int i) { return mask >> i & 1 ? at[i] : other[i]; });
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 x, __m512 y, int how) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (how == _CMP_GT_OQ ? x[i] > y[i] : !(x[i] < y[i])) << i;
  return mask;
}
inline __mmask16 _mm512_test_epi32_mask(__m512i x, __m512i y) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (((IntsOf512)x)[i] & ((IntsOf512)y)[i] ? 1 : 0) << i;
  return mask;
}
inline int32_t _mm512_reduce_add_epi32(__m512i x) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += ((IntsOf512)x)[i];
  return sum;
}
inline __m512i _mm512_abs_epi8(__m512i x) {
  int8_t bytes[64];
  std::memcpy(bytes, &x, 64);
  for (int8_t& byte : bytes) byte = std::abs(byte);
  std::memcpy(&x, bytes, 64);
  return x;
}
inline __m512i _mm512_min_epu8(__m512i x, __m512i y) {
  uint8_t bytes[2][64];
  std::memcpy(bytes[0], &x, 64), std::memcpy(bytes[1], &y, 64);
  for (int i = 0; i < 64; ++i) bytes[0][i] = bytes[1][i] < bytes[0][i] ? bytes[1][i] : bytes[0][i];
  std::memcpy(&x, bytes[0], 64);
  return x;
}
inline __m512i _mm512_set1_epi8(int8_t x) {
  __m512i all;
  std::memset(&all, x, 64);
  return all;
}
inline __m512i _mm512_cvtps_epi32(__m512 x) {  // numbers that int32 does not have become the least int32
  return (__m512i)InEach<IntsOf512>([&](int i) { return std::fabs(x[i]) < 0x1p31f ? (int32_t)std::nearbyint(x[i]) : INT32_MIN; });
}
// Interleaves four bytes or two words of the first with as many of the second, and so on: `to` is a byte or a word.
template <typename From, typename To>
inline __m512i Packed(__m512i x, __m512i y) {
  constexpr int kEach = 16 / sizeof(From), kMost = sizeof(To) == 1 ? 255 : 65535;
  From from[2][64 / sizeof(From)];
  To to[64 / sizeof(To)];
  std::memcpy(from[0], &x, 64), std::memcpy(from[1], &y, 64);
  for (int i = 0; i < 8 * kEach; ++i) {
    const int32_t number = from[i / kEach % 2][i / kEach / 2 * kEach + i % kEach];
    to[i] = number < 0 ? 0 : number > kMost ? kMost : number;
  }
  std::memcpy(&x, to, 64);
  return x;
}
inline __m512i _mm512_packus_epi32(__m512i x, __m512i y) { return Packed<int32_t, uint16_t>(x, y); }
inline __m512i _mm512_packus_epi16(__m512i x, __m512i y) { return Packed<int16_t, uint8_t>(x, y); }
inline __m512i _mm512_permutexvar_epi32(__m512i order, __m512i x) {
  return (__m512i)InEach<IntsOf512>([&](int i) { return ((IntsOf512)x)[((IntsOf512)order)[i] & 15]; });
}
inline __m512i _mm512_set1_epi16(int16_t x) { return (__m512i)(WordsOf512{} + x); }
inline __m512i _mm512_add_epi16(__m512i x, __m512i y) { return (__m512i)((WordsOf512)x + (WordsOf512)y); }
inline __m512i _mm512_srli_epi16(__m512i x, int by) { return (__m512i)((WordsOf512)x >> by); }
inline __m512i _mm512_and_si512(__m512i x, __m512i y) { return x & y; }
inline __mmask16 _mm512_movepi32_mask(__m512i x) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (((IntsOf512)x)[i] < 0) << i;
  return mask;
}
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i x, __m512i y) {  // unsigned bytes times signed bytes
  IntsOf512 total = (IntsOf512)sum;
  for (int j = 0; j < 32; j += 8) total += ((IntsOf512)x >> j & 255) * ((IntsOf512)y << (24 - j) >> 24);
  return (__m512i)total;
}
