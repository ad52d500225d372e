// Python arrays as the types that the batch cores take.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>

#include "python_types.h"

namespace foreword {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Arguments of functions. An array that is written, or whose memory is kept, is not converted: the function would have
// a copy that the caller does not see, and that no object keeps.
inline const nb::arg kRead;
inline const auto kWritten = nb::arg().noconvert();

// The memory layout of a numpy.ndarray, which is part of NumPy's ABI. The arrays of a step are read in this way,
// because a conversion by nanobind takes longer than the preparation of a small step.
struct NumPyArray {
  enum Flags { C_CONTIGUOUS = 0x1, ALIGNED = 0x100, WRITEABLE = 0x400 };

  PyObject head;
  void *data;
  int ndim;
  Py_ssize_t *shape, *strides;
  PyObject *base, *dtype;
  int flags;

  static NumPyArray &of(nb::handle array) { return *reinterpret_cast<NumPyArray *>(array.ptr()); }
};

// An int32 array [n] or [n, width] in C order.
class Ints {
 public:
  const int32_t *data = nullptr;
  int ndim = 0;
  int64_t size = 0, width = 1;

  // Returns false for any other object.
  bool read(nb::handle source, bool writable = false) {
    static const nb::handle numpy = nb::module_::import_("numpy").release();
    static const nb::handle array_type = nb::object(numpy.attr("ndarray")).release();
    static const nb::handle int32_type = nb::object(numpy.attr("dtype")("int32")).release();
    const NumPyArray &array = NumPyArray::of(source);
    const int flags = NumPyArray::C_CONTIGUOUS | NumPyArray::ALIGNED | (writable ? NumPyArray::WRITEABLE : 0);
    if (!source.type().is(array_type) || array.dtype != int32_type.ptr() || (array.flags & flags) != flags)
      return read_other(source, writable);
    return set(static_cast<const int32_t *>(array.data), array.ndim, array.shape);
  }

  int32_t *writable_data() const { return const_cast<int32_t *>(data); }

 private:
  bool read_other(nb::handle source, bool writable) {
    if (source.is_none() || !nb::try_cast(source, imported_, false)) return false;
    if (writable && !nb::isinstance<nb::ndarray<int32_t>>(source)) return false;
    int64_t shape[2] = {};
    for (size_t i = 0; i < std::min(imported_.ndim(), size_t(2)); ++i) shape[i] = int64_t(imported_.shape(i));
    return set(imported_.data(), int(imported_.ndim()), shape);
  }
  template <class Size>
  bool set(const int32_t *values, int dims, const Size *shape) {
    if (dims < 1 || dims > 2) return false;
    data = values;
    ndim = dims;
    size = shape[0];
    width = dims == 2 ? shape[1] : 1;
    return true;
  }

  nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu> imported_;
};

template <class T>
T *pointer(const nb::dict &arrays, const char *name) {
  return nb::cast<Vector<T>>(arrays[name], false).data();  // converted, it would be a copy that no object keeps
}

}  // namespace foreword
