// Tiles of AMX: eight registers of 16 rows of 64 bytes, and the product of two of them added to a third.
//
// The instructions are written out, as gcc 12's tile loads and configurations do not say which memory they read. Intel's
// manual, volume 2: LDTILECFG, TILELOADD, TDPBF16PS.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "simd.h"

#if defined(__AMX_BF16__) && ELEMENT_IS_BF16
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

namespace trunkline {

constexpr int NARROW_ROWS = 4;  // up to so many rows have tiles of their own kind

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

// A thread's tiles while it lives.
class Tiles {
 public:
  // Once for the process, before the first tile: the kernel has to make room for them where it saves registers.
  static void ask_permission() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) throw NoPermission();
  }

  Tiles() { make_full(); }
  ~Tiles() { asm volatile("tilerelease"); }

  // All of full size, or for few rows: 0, 1 and 4 have four rows, 2, 3 and 5 four columns.
  void set_narrow(bool narrow) {
    if (narrow == is_narrow_) return;
    is_narrow_ = narrow;
    constexpr int R = NARROW_ROWS, BYTES = NARROW_ROWS * sizeof(float);
    if (narrow)
      configure({R, R, 16, 16, R, 16, 16, 16}, {64, 64, BYTES, BYTES, 64, BYTES, 64, 64});
    else
      make_full();
  }

 private:
  void make_full() { configure({16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}); }

  static void configure(std::array<uint8_t, 8> rows, std::array<uint16_t, 8> row_bytes) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    std::copy(row_bytes.begin(), row_bytes.end(), config.row_bytes);
    std::copy(rows.begin(), rows.end(), config.rows);
    asm volatile("ldtilecfg %0" : : "m"(config));
  }

  bool is_narrow_ = false;
};

#else

struct Tiles {
  static void ask_permission() {}
  void set_narrow(bool) {}
  ~Tiles() {}
};

#endif

}  // namespace trunkline
