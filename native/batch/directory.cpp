#include "batch/directory.h"

namespace foreword {
namespace {

void put(PyObject *&slot, PyObject *value) {
  PyObject *old = slot;
  Py_INCREF(value);
  slot = value;
  Py_DECREF(old);
}

}  // namespace

bool Directory::next_rows(int64_t count, int32_t *rows) const {
  const Py_ssize_t available = PyList_Size(free);
  if (available < count) return false;
  for (int64_t i = 0; i < count; ++i) rows[i] = int32_t(PyLong_AsLong(PyList_GetItem(free, available - 1 - i)));
  return true;
}

bool Directory::enter(PyObject *const *ids, const int32_t *rows, int64_t count) const {
  const Py_ssize_t available = PyList_Size(free);
  for (int64_t i = 0; i < count; ++i) {
    PyObject *row = PyList_GetItem(free, available - 1 - i);
    if (PyUnicode_CheckExact(ids[i]) && PyDict_Contains(row_of, ids[i]) == 0 && !PyDict_SetItem(row_of, ids[i], row))
      continue;
    PyErr_Clear();
    while (i-- > 0) PyDict_DelItem(row_of, ids[i]);
    return false;
  }
  for (int64_t i = 0; i < count; ++i) put(req_ids[rows[i]], ids[i]);
  PyList_SetSlice(free, available - count, available, nullptr);
  return true;
}

void Directory::leave(int32_t row) const {
  PyDict_DelItem(row_of, req_ids[row]);
  put(req_ids[row], Py_None);
  PyObject *number = PyLong_FromLong(row);
  if (!number || PyList_Append(free, number)) PyErr_Clear();  // out of memory: the row is lost, nothing is wrong
  Py_XDECREF(number);
}

}  // namespace foreword
