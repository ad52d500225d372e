// Computes the sampling inputs of a step from the columns of its rows: foreword/batch/state/sampling_metadata.py.
#include <nanobind/stl/tuple.h>

#include <array>
#include <cstring>
#include <stdexcept>
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

// A cache of the results for the last few batches, whose rows are the first entries of `rows`.
class StepCache {
 public:
  // columns: (name, values [R], flags; a column is needed if a row has one of its flags). make(rows, needs, arrays)
  // computes the result of a batch whose rows have the flags `needs`; arrays has the needed columns by name.
  StepCache(const SamplingProbe &probe, const nb::list &columns, nb::object rows, nb::object make)
      : probe_(probe), most_(int64_t(nb::len(rows))), rows_(std::move(rows)), make_(std::move(make)),
        empty_(nb::module_::import_("numpy").attr("empty")), int32_(rows_.attr("dtype")) {
    for (const nb::handle column : columns) {
      auto [name, values, flags] = nb::cast<std::tuple<nb::str, nb::object, int32_t>>(column);
      nb::object dtype = values.attr("dtype");
      const bool wide = nb::cast<int>(dtype.attr("itemsize")) == sizeof(uint64_t);
      columns_.push_back({std::move(name), std::move(values), std::move(dtype), flags, wide ? &take8 : &take4});
    }
  }

  nb::object get(int64_t count) {
    if (count < 0 || count > most_) throw std::invalid_argument("more requests than rows");
    const SamplingProbe::Answer found = probe_.lookup(count);
    nb::object &made = made_[found.slot];
    if (!found.known) made.reset();
    if (!made.is_valid()) made = make(count, found.needs);
    return made;
  }

 private:
  struct Column {
    nb::str name;
    nb::object values, dtype;
    int32_t flags;
    void (*take)(const void *column, const int32_t *rows, int64_t count, void *out);
  };

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
    return make_(rows, needs, taken);
  }

  SamplingProbe probe_;
  int64_t most_;  // requests
  std::vector<Column> columns_;
  nb::object rows_, make_, empty_, int32_;
  std::array<nb::object, SamplingProbe::kSlots> made_;
};

void init(StepCache *self, const nb::list &columns, Vector<const int32_t> needs, Vector<const int64_t> stamp,
          Vector<const int64_t> counters, const nb::object &rows, const nb::object &make) {
  SamplingProbe probe{};
  probe.needs = needs.data();
  probe.stamp = stamp.data();
  probe.rows = nb::cast<Vector<const int32_t>>(rows, false).data();
  probe.version = counters.data() + VERSION;
  new (self) StepCache(probe, columns, rows, make);
}

}  // namespace

void bind_sampling(nb::module_ &m) {
  nb::class_<StepCache>(m, "StepCache", "What was made of the sampling columns of the last few batches.")
      .def("__init__", &init, kRead, kWritten, kWritten, kWritten, kWritten, kRead,
           nb::sig("def __init__(self, columns: list[tuple[str, " PY_ARRAY ", int]], needs: " PY_I32 ", stamp: " PY_I64
                   ", counters: " PY_I64 ", rows: " PY_I32 ", make: collections.abc.Callable[[" PY_I32
                   ", int, dict[str, " PY_ARRAY "]], typing.Any], /) -> None"))
      .def("get", &StepCache::get, nb::sig("def get(self, count: int, /) -> typing.Any"));
}

}  // namespace foreword
