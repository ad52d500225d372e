// Finds a batch among the last few by its rows and their sampling parameters.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace foreword {

class SamplingProbe {
 public:
  static constexpr int kSlots = 2;  // steps in flight alternate
  const int32_t *needs;             // [R] flags of each row
  const int64_t *stamp;             // [R] renewed by every change of a row
  const int32_t *rows;              // the batch's rows are its first entries
  const int64_t *version;           // grows with every change of any row

  struct Answer {
    int slot;   // where the batch is known, or will be from now on
    bool known;
    int32_t needs;  // the union of the rows' flags
  };
  Answer lookup(int64_t count) {
    int32_t all = 0;
    for (int s = 0; s < kSlots; ++s)
      if (same(entries_[s], count)) return {s, true, entries_[s].needs};
    Entry &entry = entries_[oldest_];
    entry.rows.assign(rows, rows + count);
    entry.stamps.resize(count);
    for (int64_t b = 0; b < count; ++b) {
      entry.stamps[b] = stamp[rows[b]];
      all |= needs[rows[b]];
    }
    entry.needs = all;
    entry.version = *version;
    const int slot = oldest_;
    oldest_ = (oldest_ + 1) % kSlots;
    return {slot, false, all};
  }

 private:
  struct Entry {
    std::vector<int32_t> rows;
    std::vector<int64_t> stamps;
    int32_t needs = 0;
    int64_t version = -1;
  };
  bool same(Entry &entry, int64_t count) const {
    if (entry.version < 0 || int64_t(entry.rows.size()) != count) return false;
    if (count && std::memcmp(entry.rows.data(), rows, sizeof(int32_t) * count)) return false;
    if (entry.version == *version) return true;
    for (int64_t b = 0; b < count; ++b)
      if (entry.stamps[b] != stamp[rows[b]]) return false;
    entry.version = *version;
    return true;
  }

  std::array<Entry, kSlots> entries_;
  int oldest_ = 0;
};

}  // namespace foreword
