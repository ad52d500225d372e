// Changes rows of RequestStates in bulk: many admissions, removals or new blocks in one call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batch/directory.h"
#include "batch/sampling_columns.h"
#include "batch/step.h"

namespace foreword {

struct RowTable {
  int32_t *table, *num_blocks;  // [R, width], [R]
  int64_t *content_id;          // [R]
  bool *holds_null;             // whether any row was given a null block
  int32_t width, tokens_per_block, null_block;

  // Returns whether a row has room for `count` more blocks.
  bool has_room(int32_t row, int64_t count) const { return num_blocks[row] >= 0 && num_blocks[row] + count <= width; }
  // Returns whether all numbers are blocks or the null block, which is the lowest number allowed. Records a null block.
  bool accepts(const int32_t *blocks, int64_t count) const {
    int32_t lowest = INT32_MAX;
    for (int64_t k = 0; k < count; ++k) lowest = std::min(lowest, blocks[k]);
    if (lowest == null_block) *holds_null = true;
    return lowest >= std::min(null_block, 0);
  }
  // Returns whether a token of a request would be written to the null block: `computed` of its num_tokens tokens are
  // computed, and it holds these blocks.
  bool writes_null(const int32_t *blocks, int64_t count, int32_t computed, int32_t num_tokens) const {
    if (!*holds_null) return false;
    const int64_t end = std::min(count, (int64_t(num_tokens) + tokens_per_block - 1) / tokens_per_block);
    for (int64_t k = computed / tokens_per_block; k < end; ++k)
      if (blocks[k] == null_block) return true;
    return false;
  }
};

// Admitted requests as columns: request i has num_tokens[i] of `tokens` and num_blocks[g][i] of `blocks[g]`, in order.
// If `tokens` is null, the tokens are already in their rows.
struct NewRows {
  int64_t count;
  const int32_t *rows, *tokens, *num_tokens, *prompt_len, *num_computed;
  int64_t total_tokens;
  std::vector<const int32_t *> blocks{}, num_blocks{};
  std::vector<int64_t> total_blocks{};
};

// One value for each of some requests, and the column to which they are written.
struct ColumnWrite {
  uint8_t *column;
  std::vector<uint8_t> values;
  size_t size;  // bytes of a value
};

class RowsCore {
 public:
  States states;
  std::vector<RowTable> tables;
  SamplingColumns sampling;
  Directory directory;
  int64_t *next_content_id;

  // Enters requests and fills their rows; new_rows.rows are the directory's next rows. Returns false, with nothing
  // changed, if a request breaks a rule of RequestStates.add_requests.
  bool admit(const NewRows &new_rows, PyObject *const *ids);
  // Removes rows. Returns false, with nothing changed, for a row that is not live or occurs twice.
  bool remove(const int32_t *rows, int64_t count);
  // Sets column[rows[i]] = values[i] for each given column, and updates the flags of these rows.
  void set_sampling(const int32_t *rows, int64_t count, const std::vector<ColumnWrite> &given) const;
  // Derives seeds for the requests without a seed that were just admitted to these rows, in this order.
  void derive_seeds(const int32_t *rows, int64_t count) const;
  // Appends the next block to each row. Returns false, with nothing changed, for a row that is full or not live, and
  // for a number that is not a block.
  bool append(const int32_t *rows, const int32_t *blocks, int64_t count, int32_t group);

 private:
  bool acceptable(const NewRows &new_rows) const;
  std::vector<int32_t> appended_;
  void fill(const NewRows &new_rows);
};

}  // namespace foreword
