// The threads of a block: parallel on a GPU; on a CPU one thread of the system computes them one after the other.
//
// All other code uses these primitives: parallel loops that end with a barrier of the block, so that code between two loops
// does not depend on the order of threads, and lanes of a warp, whose registers are arrays.
#pragma once

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define CALLED __device__ __noinline__  // compiled once, and not inlined in each call
#define LANES(lane, at) for (int lane = threadIdx.x & 31, at = 0; at < 1; ++at)
#define STRING(x) #x
#define UNROLL(n) _Pragma(STRING(unroll n))
#else
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#define DEVICE inline
#define CALLED inline
#define LANES(lane, at) for (int lane = 0, at = 0; lane < 32; at = ++lane)
#define UNROLL(n)
#endif

namespace launch {

constexpr int kThreads = 256, kWarps = kThreads / 32;
#ifdef __CUDACC__
constexpr int kHeld = 1;  // the number of lanes whose registers one thread holds
#else
constexpr int kHeld = 32;
#endif

DEVICE int Least(int a, int b) { return a < b ? a : b; }
DEVICE int Most(int a, int b) { return a > b ? a : b; }
DEVICE int Parts(int whole, int part) { return (whole + part - 1) / part; }

// The upper half of a float32.
struct Bfloat16 {
  unsigned short bits;
  Bfloat16() = default;
  DEVICE explicit Bfloat16(float x) {
    union { float x; unsigned bits; } wide{x};
    bits = (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;  // rounded to nearest, ties to even
  }
  DEVICE explicit operator float() const {
    union { unsigned bits; float x; } wide{unsigned(bits) << 16};
    return wide.x;
  }
};

// The numbers that a lane loads at once.
template <typename T>
struct alignas(8 * sizeof(T)) Eight {
  T x[8];
};

#ifdef __CUDACC__

struct Word {  // a word for the communication of blocks
  int value;
};

DEVICE void Wait() { __syncthreads(); }

template <typename Task>
DEVICE void Each(int count, Task task) {  // each thread runs task(i) for its values of i
  for (int i = threadIdx.x; i < count; i += kThreads) task(i);
  __syncthreads();
}

template <typename Task>
DEVICE void EachWarp(int count, Task task) {  // each warp runs task(i) for its values of i
  for (int i = threadIdx.x / 32; i < count; i += kWarps) task(i);
  __syncthreads();
}

template <typename Task>
DEVICE void One(Task task) {
  if (threadIdx.x == 0) task();
}

template <typename Of>
DEVICE float MaxOfWarp(int count, Of of) {
  float found = -3e38f;
  for (int i = threadIdx.x & 31; i < count; i += 32) found = fmaxf(found, of(i));
  for (int away = 16; away; away /= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, away));
  return found;
}

template <typename Of>
DEVICE float SumOfWarp(int count, Of of) {
  float found = 0;
  for (int i = threadIdx.x & 31; i < count; i += 32) found += of(i);
  for (int away = 16; away; away /= 2) found += __shfl_xor_sync(~0u, found, away);
  return found;
}

template <typename Task>
DEVICE void OneOfWarp(Task task) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) task();
}

DEVICE float Exp(float x) { return __expf(x); }
DEVICE float Tanh(float x) { return tanhf(x); }
DEVICE float InverseRoot(float x) { return rsqrtf(x); }

DEVICE int Read(const Word& word) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(&word.value) : "memory");
  return value;
}

DEVICE void Write(Word& word, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(&word.value), "r"(value) : "memory");
}

DEVICE void Arrive(Word& word) {
  __threadfence();
  atomicAdd(&word.value, 1);
}

DEVICE void Arrived() { __threadfence(); }

struct Watch {
  long long since;
  DEVICE long long Now() const {
    long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
  }
  DEVICE Watch() : since(Now()) {}
  DEVICE bool Over(int milliseconds) const { return Now() - since > milliseconds * 1000000ll; }
};

DEVICE void Dawdle(int) {}
DEVICE void Rest() {}

// Prefetches `bytes` bytes of memory that will be read soon, in lines of 128 bytes.
DEVICE void Fetch(const void* from, int bytes) {
  for (int i = 128 * threadIdx.x; i < bytes; i += 128 * kThreads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(from) + i));
}

// Adds the product of A [16, 16] and B [16, 8], for the half `half` of the 32 inputs that lanes hold.
DEVICE void MultiplyAdd(float (&sums)[1][4], const Eight<Bfloat16>* low, const Eight<Bfloat16>* high,
                        const Eight<Bfloat16>* rows, int half) {
  const unsigned* a = reinterpret_cast<const unsigned*>(low) + 2 * half;
  const unsigned* b = reinterpret_cast<const unsigned*>(high) + 2 * half;
  const unsigned* w = reinterpret_cast<const unsigned*>(rows) + 2 * half;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0][0]), "+f"(sums[0][1]), "+f"(sums[0][2]), "+f"(sums[0][3])
      : "r"(a[0]), "r"(b[0]), "r"(a[1]), "r"(b[1]), "r"(w[0]), "r"(w[1]));
}

#else

using Word = std::atomic<int>;

inline void Wait() {}

template <typename Task>
void Each(int count, Task task) {
  for (int i = 0; i < count; ++i) task(i);
}

template <typename Task>
void EachWarp(int count, Task task) {
  for (int i = 0; i < count; ++i) task(i);
}

template <typename Task>
void One(Task task) {
  task();
}

template <typename Of>
float MaxOfWarp(int count, Of of) {
  float found = -3e38f;
  for (int i = 0; i < count; ++i) found = std::max(found, of(i));
  return found;
}

template <typename Of>
float SumOfWarp(int count, Of of) {
  float found = 0;
  for (int i = 0; i < count; ++i) found += of(i);
  return found;
}

template <typename Task>
void OneOfWarp(Task task) {
  task();
}

inline float Exp(float x) { return std::exp(x); }
inline float Tanh(float x) { return std::tanh(x); }
inline float InverseRoot(float x) { return 1 / std::sqrt(x); }
inline int Read(const Word& word) { return word.load(std::memory_order_acquire); }
inline void Write(Word& word, int value) { word.store(value, std::memory_order_release); }
inline void Arrive(Word& word) { word.fetch_add(1, std::memory_order_acq_rel); }
inline void Arrived() {}

struct Watch {
  std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
  bool Over(int milliseconds) const { return std::chrono::steady_clock::now() - since > std::chrono::milliseconds(milliseconds); }
};

// Delays a block by a random time, so that blocks arrive in any order.
inline void Dawdle(int most_microseconds) {
  thread_local std::minstd_rand random(std::hash<std::thread::id>()(std::this_thread::get_id()));
  if (most_microseconds && random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % most_microseconds));
}

inline void Rest() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
inline void Fetch(const void*, int) {}

// Like the GPU's m16n8k16: lane 4 g + j holds rows g and g + 8 of A and column g of B, in each the numbers 2 j and 2 j + 1
// and the same plus 8.
template <typename T>
void MultiplyAdd(float (&sums)[32][4], const Eight<T>* low, const Eight<T>* high, const Eight<T>* rows, int half) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n) {
      float& sum = sums[4 * (m % 8) + n / 2][2 * (m / 8) + n % 2];
      for (int k = 0; k < 16; ++k) {
        const int j = k % 8 / 2, at = 4 * half + 2 * (k / 8) + k % 2;
        sum += float((m < 8 ? low : high)[4 * (m % 8) + j].x[at]) * float(rows[4 * n + j].x[at]);
      }
    }
}

#endif

}  // namespace launch
