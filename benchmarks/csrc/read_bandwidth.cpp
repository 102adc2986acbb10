// Reads a buffer with several threads, each its own contiguous part, as a step reads its weights.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

typedef uint64_t Line __attribute__((vector_size(64)));

static inline void ask_for(const Line* line) {
#ifdef __x86_64__
  asm volatile("prefetcht1 (%0)" ::"r"(line));  // gcc may drop the intrinsic
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

template <bool PREFETCHES>
static uint64_t read(const Line* lines, size_t count, size_t ahead_lines) {
  Line sums[4] = {};
  for (size_t i = 0; i + 4 <= count; i += 4)
    for (size_t j = 0; j < 4; j++) {
      if (PREFETCHES) ask_for(lines + i + j + ahead_lines);  // beyond the buffer's end it does no harm
      sums[j] ^= lines[i + j];
    }
  const Line sum = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  return sum[0] ^ sum[7];
}

// Seconds that num_passes over the whole buffer take; data is aligned to 64 bytes.
extern "C" double read_seconds(const void* data, size_t num_bytes, int num_threads, int num_passes, size_t ahead_bytes) {
  const size_t count = num_bytes / 64;
  std::vector<uint64_t> kept(num_threads);
  auto work = [&](int thread) {
    const size_t begin = count * thread / num_threads, end = count * (thread + 1) / num_threads;
    for (int pass = 0; pass < num_passes; pass++) {
      const Line* lines = (const Line*)data + begin;
      kept[thread] += ahead_bytes ? read<true>(lines, end - begin, ahead_bytes / 64) : read<false>(lines, end - begin, 0);
      asm volatile("" ::: "memory");  // so that no pass is the one before
    }
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; i++) threads.emplace_back(work, i);
  work(0);
  for (auto& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  volatile uint64_t sink = 0;
  for (uint64_t sum : kept) sink = sink ^ sum;
  return seconds;
}
