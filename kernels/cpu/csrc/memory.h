// Memory by the page: huge pages where the system gives them, zeroed, aligned to them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace trunkline {

constexpr size_t HUGE_PAGE_BYTES = size_t(2) << 20;

// A mapping of its own. Throws std::bad_alloc.
class Pages {
 public:
  Pages() = default;

  Pages(size_t num_bytes, bool huge) {
    mapped_bytes_ = (num_bytes + 2 * HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapping_ == MAP_FAILED) {
      mapping_ = nullptr;
      throw std::bad_alloc();
    }
    data_ = (char*)(((uintptr_t)mapping_ + HUGE_PAGE_BYTES - 1) & ~(uintptr_t)(HUGE_PAGE_BYTES - 1));
    // a kernel without huge pages refuses: small ones serve as well, only slower
    if (huge) madvise(data_, mapped_bytes_ - HUGE_PAGE_BYTES, MADV_HUGEPAGE);
  }

  Pages(Pages&& other) { *this = std::move(other); }

  Pages& operator=(Pages&& other) {
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(data_, other.data_);
    return *this;
  }

  ~Pages() {
    if (mapping_) munmap(mapping_, mapped_bytes_);
  }

  char* data() const { return data_; }

 private:
  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  char* data_ = nullptr;
};

// Deals out parts of `base` in order, each on a cache line of its own; with base null it only counts.
class Layout {
 public:
  explicit Layout(char* base = nullptr) : base_(base) {}

  template <class T>
  T* take(size_t count) {
    T* part = (T*)(base_ ? base_ + used_ : nullptr);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return part;
  }

  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace trunkline
