// Zeroed, aligned memory, mapped page by page at the first access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace foreword::kernels {

// The product. Throws std::bad_alloc if it is larger than any size.
inline size_t product(size_t a, size_t b) {
  size_t out;
  if (__builtin_mul_overflow(a, b, &out)) throw std::bad_alloc();
  return out;
}

// One mapping. Throws std::bad_alloc.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(size_t bytes);
  ~Mapping();
  Mapping(Mapping &&other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping &operator=(Mapping &&other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  uint8_t *data() const { return data_; }
  size_t bytes() const { return bytes_; }

  // The smallest pages, so that threads of several teams can each be the first to touch those that they use.
  void use_small_pages() const;
  // Gives the pages after the first `bytes` back to the system, where that leaves zeros.
  void release_after(size_t bytes) const;

 private:
  uint8_t *data_ = nullptr;
  size_t bytes_ = 0;
};

// Allocations with the lifetime of the arena, adjacent, aligned to 64 bytes.
class Arena {
 public:
  uint8_t *allocate(size_t bytes);
  size_t used() const { return used_; }

 private:
  std::vector<Mapping> chunks_;
  size_t left_ = 0, used_ = 0;
  uint8_t *next_ = nullptr;
};

// A zeroed array whose addresses only grow. Growing discards the contents; if it fails, the array is as before. When
// many calls in turn reserve less than half of what is in use, such as the steps after those of a long prompt, the rest
// becomes zeros and takes no memory.
template <class T>
class Buffer {
 public:
  T *reserve(size_t count) {
    if (count > count_) {
      memory_ = Mapping(product(count, sizeof(T)));
      count_ = in_use_ = count;
    }
    if (count > in_use_ / 2) {
      in_use_ = count > in_use_ ? count : in_use_;
      small_calls_ = 0;
    } else if (++small_calls_ == kSmallCalls) {
      memory_.release_after(count * sizeof(T));
      in_use_ = count;
      small_calls_ = 0;
    }
    return data();
  }
  T *data() const { return reinterpret_cast<T *>(memory_.data()); }

 private:
  static constexpr int kSmallCalls = 64;  // the first use of memory takes less than a hundredth of so many steps

  Mapping memory_;
  size_t count_ = 0, in_use_ = 0;
  int small_calls_ = 0;
};

// Row buffers are padded to this many floats: whole panels and whole blocks of every instruction set.
constexpr int kRowPadding = 64;
constexpr int padded_row(int size) { return (size + kRowPadding - 1) / kRowPadding * kRowPadding; }

// Rows of `width` floats, each padded with zeros.
class FloatRows {
 public:
  explicit FloatRows(int width) : stride_(padded_row(width)) {}

  void reserve(int64_t rows) { reserve_floats(size_t(rows) * size_t(stride_)); }
  // For rows of other widths, at `data`.
  void reserve_floats(size_t count) { buffer_.reserve(count); }
  float *row(int64_t index) const { return buffer_.data() + index * stride_; }
  float *data() const { return buffer_.data(); }
  int stride() const { return stride_; }

 private:
  int stride_;
  Buffer<float> buffer_;
};

}  // namespace foreword::kernels
