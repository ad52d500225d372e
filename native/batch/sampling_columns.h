// The arrays of foreword.batch.state.sampling_columns.SamplingColumns, [R] each, as native code writes them. Defaults
// and flag rules are data that this class passes: its COLUMNS and FLAG_RULES.
#pragma once

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace foreword {

// A column of sampling parameters.
struct SamplingColumn {
  uint8_t *data;          // [R] values
  size_t size;            // bytes of a value: 4 or 8
  uint8_t type_code;      // as DLPack numbers types
  uint64_t default_bits;  // the default value, in its first `size` bytes

  void set_default(const int32_t *rows, int64_t count) const {
    size == 8 ? fill<8>(rows, count) : fill<4>(rows, count);
  }

 private:
  template <size_t kSize>
  void fill(const int32_t *rows, int64_t count) const {
    uint8_t *const values = data;
    const uint64_t bits = default_bits;
    for (int64_t i = 0; i < count; ++i) std::memcpy(values + kSize * size_t(rows[i]), &bits, kSize);
  }
};

// A row has `flag` if the comparison of its value in `column` with the operand is true.
struct FlagRule {
  int32_t flag;
  const void *column;  // [R]
  double operand;
  void (*apply)(const FlagRule &rule, const int32_t *rows, int64_t count, int32_t *needs);

  // Returns null for an unknown comparison.
  template <class T>
  static decltype(apply) function(std::string_view comparison) {
    if (comparison == ">") return &add_flag<T, std::greater<T>>;
    if (comparison == ">=") return &add_flag<T, std::greater_equal<T>>;
    if (comparison == "<") return &add_flag<T, std::less<T>>;
    if (comparison == "!=") return &add_flag<T, std::not_equal_to<T>>;
    if (comparison == "not >") return &add_flag<T, NotGreater<T>>;
    return nullptr;
  }

 private:
  template <class T>
  struct NotGreater {
    bool operator()(T a, T b) const { return !(a > b); }
  };
  template <class T, class Compare>
  static void add_flag(const FlagRule &rule, const int32_t *rows, int64_t count, int32_t *needs) {
    const T *column = static_cast<const T *>(rule.column);
    const T operand = T(rule.operand);
    const int32_t flag = rule.flag;
    for (int64_t i = 0; i < count; ++i) needs[rows[i]] |= Compare{}(column[rows[i]], operand) ? flag : 0;
  }
};

// The entries of SamplingColumns::counters.
enum Counter { VERSION, BASE_SEED, NUM_ADMISSIONS };

struct SamplingColumns {
  std::unordered_map<std::string, SamplingColumn> by_name;  // those with values of requests
  std::vector<SamplingColumn> all;                          // and `needs`
  std::vector<FlagRule> flag_rules;
  int32_t *needs;
  int64_t *stamp, *counters;
  bool *is_set;
  PyObject *params;  // dict: row → parameters object

  // Returns the values of a column, whose type must be T.
  template <class T>
  T *values(const char *name) const {
    return reinterpret_cast<T *>(by_name.at(name).data);
  }

  // Writes the defaults to these rows.
  void reset(const int32_t *rows, int64_t count) const {
    bool any = false;
    for (int64_t i = 0; i < count; ++i) {
      if (!is_set[rows[i]]) continue;
      any = true;
      is_set[rows[i]] = false;
      stamp[rows[i]] = counters[VERSION] + 1;
      if (PyDict_Size(params)) drop_params(rows[i]);
    }
    if (!any) return;
    ++counters[VERSION];
    for (const SamplingColumn &column : all) column.set_default(rows, count);
  }

  // Records that columns of these rows were written.
  void renew(const int32_t *rows, int64_t count) const {
    ++counters[VERSION];
    for (int64_t i = 0; i < count; ++i) {
      is_set[rows[i]] = true;
      stamp[rows[i]] = counters[VERSION];
      needs[rows[i]] = 0;
    }
    for (const FlagRule &rule : flag_rules) rule.apply(rule, rows, count, needs);
  }

 private:
  void drop_params(int32_t row) const {
    PyObject *key = PyLong_FromLong(row);
    if (!key || PyDict_DelItem(params, key)) PyErr_Clear();  // a row filled from columns has none
    Py_XDECREF(key);
  }
};

}  // namespace foreword
