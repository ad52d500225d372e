// The sampling metadata of a step, made from the columns of its rows: foreword/batch/state/sampling_metadata.py.
#include <nanobind/stl/tuple.h>

#include <array>
#include <cstring>
#include <tuple>
#include <vector>

#include "batch/bind.h"
#include "batch/sampling_columns.h"
#include "batch/sampling_probe.h"
#include "batch/vectorized.h"

namespace foreword {
namespace {

template <class T>
inline void take(const void *column, const int32_t *__restrict rows, int64_t count, void *out) {
  const T *__restrict from = static_cast<const T *>(column);
  T *__restrict to = static_cast<T *>(out);
  for (int64_t b = 0; b < count; ++b) to[b] = from[rows[b]];
}
FOREWORD_VECTORIZED void take4(const void *column, const int32_t *rows, int64_t count, void *out) {
  take<uint32_t>(column, rows, count, out);
}
FOREWORD_VECTORIZED void take8(const void *column, const int32_t *rows, int64_t count, void *out) {
  take<uint64_t>(column, rows, count, out);
}

// The metadata of the last few batches whose rows are the first entries of `rows`.
class MetadataCache {
 public:
  // columns: (name, values [R], flags: needed where a row has one of them) of each parameter. type: what is made.
  // build(count, needs): makes it for batches with a flag of `rare`, whose rows have parameters that are no column.
  MetadataCache(const SamplingProbe &probe, const nb::list &columns, nb::object rows, int32_t vocab_size,
                nb::object type, nb::object build, int32_t rare)
      : probe_(probe), rows_(std::move(rows)), type_(std::move(type)), build_(std::move(build)),
        empty_(nb::module_::import_("numpy").attr("empty")), int32_(rows_.attr("dtype")), vocab_size_(vocab_size),
        rare_(rare) {
    for (const nb::handle column : columns) {
      auto [name, values, flags] = nb::cast<std::tuple<nb::str, nb::object, int32_t>>(column);
      nb::object dtype = values.attr("dtype");
      const bool wide = nb::cast<int>(dtype.attr("itemsize")) == sizeof(uint64_t);
      columns_.push_back({std::move(name), std::move(values), std::move(dtype), flags, wide ? &take8 : &take4});
    }
  }

  nb::object get(int64_t count) {
    const SamplingProbe::Answer found = probe_.lookup(count);
    nb::object &metadata = made_[found.slot];
    if (!found.known) metadata.reset();
    if (!metadata.is_valid()) metadata = found.needs & rare_ ? build_(count, found.needs) : make(count, found.needs);
    return metadata;
  }

 private:
  struct Column {
    nb::str name;
    nb::object values, dtype;
    int32_t flags;
    void (*take)(const void *column, const int32_t *rows, int64_t count, void *out);
  };

  // type(rows, needs, vocab_size, {}, name=its values for the rows, … for each parameter that is needed)
  nb::object make(int64_t count, int32_t needs) const {
    const nb::int_ size(count);
    const nb::object rows = empty_(size, int32_);
    std::memcpy(NumPyArray::of(rows).data, probe_.rows, sizeof(int32_t) * size_t(count));
    nb::dict taken;
    for (const Column &column : columns_) {
      if (!(needs & column.flags)) continue;
      const nb::object values = empty_(size, column.dtype);
      column.take(NumPyArray::of(column.values).data, probe_.rows, count, NumPyArray::of(values).data);
      taken[column.name] = values;
    }
    return type_(rows, needs, vocab_size_, nb::dict(), **taken);
  }

  SamplingProbe probe_;
  std::vector<Column> columns_;
  nb::object rows_, type_, build_, empty_, int32_;
  int32_t vocab_size_, rare_;
  std::array<nb::object, SamplingProbe::kSlots> made_;
};

void init(MetadataCache *self, const nb::list &columns, Vector<const int32_t> needs, Vector<const int64_t> stamp,
          Vector<const int64_t> counters, const nb::object &rows, int32_t vocab_size, const nb::object &type,
          const nb::object &build, int32_t rare) {
  SamplingProbe probe{};
  probe.needs = needs.data();
  probe.stamp = stamp.data();
  probe.rows = nb::cast<Vector<const int32_t>>(rows).data();
  probe.version = counters.data() + VERSION;
  new (self) MetadataCache(probe, columns, rows, vocab_size, type, build, rare);
}

}  // namespace

void bind_sampling(nb::module_ &m) {
  nb::class_<MetadataCache>(m, "MetadataCache", "Sampling metadata of the last few batches, made from the columns.")
      .def("__init__", &init)
      .def("get", &MetadataCache::get);
}

}  // namespace foreword
