// Lists, tuples, ints and strings of Python, read without a copy. A build for one version of Python reads their memory;
// one for the stable ABI (`make wheel`) calls functions.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace foreword {

inline bool is_sequence(PyObject *o) { return o && (PyList_CheckExact(o) || PyTuple_CheckExact(o)); }

// Functions for lists and tuples. References are borrowed.
#if defined(Py_LIMITED_API)

// PyList_Check would also call a function, PyType_GetFlags.
inline Py_ssize_t length(PyObject *o) { return PyList_CheckExact(o) ? PyList_Size(o) : PyTuple_Size(o); }
inline PyObject *item(PyObject *o, Py_ssize_t i) {
  return PyList_CheckExact(o) ? PyList_GetItem(o, i) : PyTuple_GetItem(o, i);
}
using Items = PyObject *;  // a sequence, for `at`
inline Items items(PyObject *o) { return o; }
inline PyObject *at(Items o, Py_ssize_t i) { return item(o, i); }
inline bool small_int(PyObject *, int32_t &) { return false; }
inline bool small_ints(Items, Py_ssize_t, Py_ssize_t, int32_t *) { return false; }
inline bool same_characters(PyObject *a, PyObject *b) { return PyUnicode_Compare(a, b) == 0; }

#else

inline Py_ssize_t length(PyObject *o) { return Py_SIZE(o); }
inline PyObject *item(PyObject *o, Py_ssize_t i) { return PySequence_Fast_ITEMS(o)[i]; }
using Items = PyObject *const *;
inline Items items(PyObject *o) { return PySequence_Fast_ITEMS(o); }
inline PyObject *at(Items values, Py_ssize_t i) { return values[i]; }

// Reads an int of one digit.
inline bool small_int(PyObject *o, int32_t &out) {
#if PY_VERSION_HEX >= 0x030C0000
  if (!PyUnstable_Long_IsCompact(reinterpret_cast<PyLongObject *>(o))) return false;
  out = int32_t(PyUnstable_Long_CompactValue(reinterpret_cast<PyLongObject *>(o)));
#else
  const Py_ssize_t digits = Py_SIZE(o);
  if (size_t(digits + 1) > 2) return false;
  out = int32_t(digits) * int32_t(reinterpret_cast<PyLongObject *>(o)->ob_digit[0]);
#endif
  return true;
}

// Copies the ints `first` … `first + n − 1`, which are positive and have one digit, as token ids do. Returns false,
// with `out` undefined, for any other object. One branch per int instead of two makes reading a prompt a tenth faster.
inline bool small_ints(Items values, Py_ssize_t first, Py_ssize_t n, int32_t *out) {
  size_t others = 0;
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (!PyLong_CheckExact(values[first + i])) return false;
    const auto *o = reinterpret_cast<const PyLongObject *>(values[first + i]);
#if PY_VERSION_HEX >= 0x030C0000
    others |= o->long_value.lv_tag ^ (1 << 3);
    out[i] = int32_t(o->long_value.ob_digit[0]);
#else
    others |= size_t(Py_SIZE(o)) ^ 1;
    out[i] = int32_t(o->ob_digit[0]);
#endif
  }
  return !others;
}

inline bool same_characters(PyObject *a, PyObject *b) {
  const auto kind = PyUnicode_KIND(a);
  return PyUnicode_GET_LENGTH(a) == PyUnicode_GET_LENGTH(b) && kind == PyUnicode_KIND(b) &&
         !std::memcmp(PyUnicode_DATA(a), PyUnicode_DATA(b), size_t(PyUnicode_GET_LENGTH(a)) * size_t(kind));
}

#endif

// Reads an int of any size.
[[gnu::noinline]] inline bool long_as_int32(PyObject *o, int32_t &out) {
  int overflow;
  const long long value = PyLong_AsLongLongAndOverflow(o, &overflow);
  if (overflow || value < INT32_MIN || value > INT32_MAX) return false;
  out = int32_t(value);
  return true;
}

// Reads a Python int that fits int32. Returns false, with no error set, for anything else.
inline bool as_int32(PyObject *o, int32_t &out) {
  return PyLong_CheckExact(o) && (small_int(o, out) || long_as_int32(o, out));
}

// Copies the ints of a list or tuple to `out`, which has room for them. Returns false if one does not fit int32.
[[gnu::noinline]] inline bool read_int32s(PyObject *o, int32_t *out) {
  constexpr Py_ssize_t piece = 64;  // a piece with another int, such as 0, is read one by one
  const Items values = items(o);
  const Py_ssize_t n = length(o);
  for (Py_ssize_t first = 0; first < n; first += piece) {
    const Py_ssize_t end = std::min(first + piece, n);
    if (small_ints(values, first, end - first, out + first)) continue;
    for (Py_ssize_t i = first; i < end; ++i)
      if (!as_int32(at(values, i), out[i])) return false;
  }
  return true;
}

// Returns whether two objects are the same string.
inline bool same_text(PyObject *a, PyObject *b) {
  return a == b || (PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) && same_characters(a, b));
}

}  // namespace foreword
