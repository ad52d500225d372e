// Rows of RequestStates changed in bulk: many arrivals, departures or new blocks in one call.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "batch/directory.h"
#include "batch/sampling_columns.h"
#include "batch/step.h"

namespace foreword {

struct RowTable {
  int32_t *table, *num_blocks;  // [R, width], [R]
  int64_t *content_id;          // [R]
  int32_t width;
};

// Arrivals as columns: request i has num_tokens[i] of `tokens` and num_blocks[g][i] of `blocks[g]`, in order. Null
// `tokens` stand in their rows already, checked.
struct Arrivals {
  int64_t count;
  const int32_t *rows, *tokens, *num_tokens, *prompt_len, *num_computed;
  int64_t total_tokens;
  std::vector<const int32_t *> blocks{}, num_blocks{};
  std::vector<int64_t> total_blocks{};
};

// A column of sampling parameters that requests may bring values for.
struct ParameterColumn {
  uint8_t *data;      // [R] values
  size_t size;        // of a value
  uint8_t type_code;  // as DLPack counts types
};

// One value for each of some requests, and the column they go to.
struct Given {
  uint8_t *column;
  const uint8_t *values;
  size_t size;  // of a value
};

class RowsCore {
 public:
  States states;
  int32_t *lora_id;
  int64_t *row_generation;
  bool *live;
  std::vector<RowTable> tables;
  SamplingArrays sampling;
  std::unordered_map<std::string, ParameterColumn> parameters;
  Directory directory;

  // Seat and fill; arrivals.rows are the directory's next. False, with nothing changed, where an arrival breaks a rule
  // of RequestStates.add_requests.
  bool admit(const Arrivals &arrivals, PyObject *const *ids, int64_t first_content_id);
  // False, with nothing changed, for a row that is not live or named twice.
  bool remove(const int32_t *rows, int64_t count, int64_t first_content_id, int64_t stamp);
  // column[rows[i]] = values[i] for each column given, and what follows from the parameters of these rows.
  void set_sampling(const int32_t *rows, int64_t count, const std::vector<Given> &given, int64_t stamp) const;
  // The next block of each row. False, with nothing changed, for a row that is full or not live, or no block.
  bool append(const int32_t *rows, const int32_t *blocks, int64_t count, int32_t group);

 private:
  bool acceptable(const Arrivals &arrivals) const;
  void fill(const Arrivals &arrivals, int64_t first_content_id);
};

}  // namespace foreword
