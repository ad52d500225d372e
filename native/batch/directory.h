// Which request is in which row. All three belong to the Python side's RequestStates.
#pragma once

#include <Python.h>

#include <cstdint>

namespace foreword {

struct Directory {
  PyObject *row_of;    // dict: id → row
  PyObject **req_ids;  // [R] id, or None for a free row
  PyObject *free;      // list of free rows; the last serves the next request

  // The rows that the next requests get. False if there are not so many.
  bool next_rows(int64_t count, int32_t *rows) const;
  // Enter requests in their `next_rows`. False, with nothing changed, for an id that is not a string, has a row or is
  // named twice.
  bool enter(PyObject *const *ids, const int32_t *rows, int64_t count) const;
  // The row is free again. Undoes `enter` in reverse order.
  void leave(int32_t row) const;
};

}  // namespace foreword
