#include "kernels/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace foreword::kernels {
namespace {

constexpr size_t kChunkBytes = size_t(16) << 20;
constexpr size_t kHugePage = size_t(2) << 20;

}  // namespace

Mapping::Mapping(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
#if defined(__unix__) || defined(__APPLE__)
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
#if defined(__linux__)
  if (bytes >= 4 * kHugePage) madvise(p, bytes, MADV_HUGEPAGE);  // fewer page-table walks
#endif
#else
  void *p = std::calloc(1, bytes);
  if (!p) throw std::bad_alloc();
#endif
  data_ = static_cast<uint8_t *>(p);
}

Mapping::~Mapping() {
  if (!data_) return;
#if defined(__unix__) || defined(__APPLE__)
  munmap(data_, bytes_);
#else
  std::free(data_);
#endif
}

uint8_t *Arena::allocate(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > left_) {
    const size_t chunk = bytes > kChunkBytes ? bytes : kChunkBytes;
    chunks_.emplace_back(chunk);
    left_ = chunk;
    next_ = chunks_.back().data();
  }
  uint8_t *p = next_;
  next_ += bytes;
  left_ -= bytes;
  used_ += bytes;
  return p;
}

}  // namespace foreword::kernels
