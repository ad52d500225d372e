// The map from requests to rows. All three objects belong to RequestStates in Python.
#pragma once

#include <Python.h>

#include <cstdint>

namespace foreword {

struct Directory {
  PyObject *row_of;    // dict: id → row
  PyObject **req_ids;  // [R] id, or None for a free row
  PyObject *free;      // list of free rows; the last serves the next request

  // Writes the rows that the next requests get. Returns false if there are not enough free rows.
  bool next_rows(int64_t count, int32_t *rows) const;
  // Enters requests in their `next_rows`. Returns false, with nothing changed, for an id that is not a string, has a
  // row, or occurs twice.
  bool enter(PyObject *const *ids, const int32_t *rows, int64_t count) const;
  // Frees the row. Calls in reverse order undo `enter`.
  void leave(int32_t row) const;
};

}  // namespace foreword
