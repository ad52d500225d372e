// Types of Python for the signatures of bindings, which `make stubs` writes to src/foreword/_native.pyi. Functions that
// take any object and answer what does not fit state their signature as text (nb::sig).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#define PY_I32 "foreword.arrays.I32"
#define PY_I64 "foreword.arrays.I64"
#define PY_F32 "foreword.arrays.F32"
#define PY_F64 "foreword.arrays.F64"
#define PY_U16 "foreword.arrays.U16"
#define PY_U32 "foreword.arrays.U32"
#define PY_BOOLS "foreword.arrays.Bools"
#define PY_ARRAY "foreword.arrays.AnyArray"

namespace foreword {

namespace nb = nanobind;

using Arrays = nb::typed<nb::dict, nb::str, nb::ndarray<nb::numpy>>;
using Objects = nb::typed<nb::dict, nb::str, nb::object>;
using Integers = nb::typed<nb::dict, nb::str, int>;
using Numbers = nb::typed<nb::dict, nb::str, double>;

}  // namespace foreword
