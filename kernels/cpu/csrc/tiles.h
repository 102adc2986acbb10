// Tiles of AMX: eight registers of 16 rows of 64 bytes, and the product of two of them added to a third.
//
// The instructions are written out, as gcc 12's tile loads and configurations do not say which memory they read. Intel's
// manual, volume 2: LDTILECFG, TILELOADD, TDPBF16PS.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

#if defined(__AMX_BF16__) && ELEMENT_IS_BF16
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

namespace trunkline {

#if HAS_TILES

// What a system refuses.
struct NoPermission {};

constexpr int TILE_ROWS = 16;
constexpr int TILE_WORDS = 16;  // of a row

template <int T>
INLINE void tile_load(const void* from, long stride_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride_bytes) : "memory");
}

template <int T>
INLINE void tile_store(void* to, long stride_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride_bytes) : "memory");
}

template <int T>
INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}

// sums [rows][columns] += a [rows][words] * b [words][columns], two bf16 to a word
template <int SUMS, int A, int B>
INLINE void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(A), "i"(B));
}

// A thread's tiles, all of full size, while it lives.
class Tiles {
 public:
  // Once for the process, before the first tile: the kernel has to make room for them where it saves registers.
  static void ask_permission() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) throw NoPermission();
  }

  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
};

#else

struct Tiles {
  static void ask_permission() {}
  ~Tiles() {}
};

#endif

}  // namespace trunkline
