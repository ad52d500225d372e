#include "kernels/memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

// Memory of its own for every array lets the address sanitizer see an access past its end.
#if !defined(FOREWORD_SEPARATE_ARRAYS) && (defined(__unix__) || defined(__APPLE__))
#define FW_MAPPED 1
#include <sys/mman.h>
#else
#define FW_MAPPED 0
#endif

namespace foreword::kernels {
namespace {

// The first chunk is small, since of weights in files only vectors are in an arena; each other is as large as those
// before it together.
constexpr size_t kLeastChunk = FW_MAPPED ? size_t(1) << 20 : 0, kMostChunk = 16 * kLeastChunk;
constexpr size_t kPage = size_t(1) << 16;  // a multiple of the size of pages on every processor
constexpr size_t kHugePage = size_t(2) << 20;

}  // namespace

Mapping::Mapping(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
#if FW_MAPPED
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
#if FW_MAPPED
  munmap(data_, bytes_);
#else
  std::free(data_);
#endif
}

void Mapping::use_small_pages() const {
#if defined(__linux__) && FW_MAPPED
  if (data_) madvise(data_, bytes_, MADV_NOHUGEPAGE);
#endif
}

void Mapping::release_after(size_t bytes) const {
#if defined(__linux__) && FW_MAPPED
  const size_t begin = (bytes + kPage - 1) / kPage * kPage;
  if (begin < bytes_) madvise(data_ + begin, bytes_ - begin, MADV_DONTNEED);
#else
  (void)bytes;
#endif
}

uint8_t *Arena::allocate(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > left_) {
    const size_t chunk = std::max(bytes, std::clamp(used_, kLeastChunk, kMostChunk));
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
