// Python arrays as the types that the batch cores take.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace foreword {

namespace nb = nanobind;

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
T *pointer(const nb::dict &arrays, const char *name) {
  return nb::cast<Vector<T>>(arrays[name]).data();
}

}  // namespace foreword
