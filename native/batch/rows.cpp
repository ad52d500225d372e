#include "batch/rows.h"

#include <algorithm>
#include <cstring>

#include "batch/seeds.h"
#include "batch/vectorized.h"

namespace foreword {

// Returns whether every id is in [0, vocab_size): a negative one is a large unsigned one.
FOREWORD_VECTORIZED static bool all_token_ids(const int32_t *ids, int64_t n, uint32_t vocab_size) {
  uint32_t largest = 0;
  for (int64_t t = 0; t < n; ++t) largest = std::max(largest, uint32_t(ids[t]));
  return largest < vocab_size;
}

bool RowsCore::acceptable(const NewRows &a) const {
  int64_t tokens = 0;
  std::vector<int64_t> blocks(tables.size(), 0);
  for (int64_t i = 0; i < a.count; ++i) {
    const int32_t n = a.num_tokens[i];
    if (n < 1 || n > states.max_model_len || a.prompt_len[i] < 1 || a.prompt_len[i] > n) return false;
    if (a.num_computed[i] < 0 || a.num_computed[i] >= n || tokens + n > a.total_tokens) return false;
    int32_t *ids = states.tokens_of(a.rows[i]);  // no code reads the tokens of a free row
    if (a.tokens) std::copy_n(a.tokens + tokens, n, ids);
    if (!all_token_ids(ids, n, uint32_t(states.vocab_size))) return false;
    tokens += n;
    for (size_t g = 0; g < tables.size(); ++g) {
      const int32_t held = a.num_blocks[g][i];
      if (held < 0 || held > tables[g].width || blocks[g] + held > a.total_blocks[g]) return false;
      const int32_t *own = a.blocks[g] + blocks[g];
      if (!tables[g].accepts(own, held) || tables[g].writes_null(own, held, a.num_computed[i], n)) return false;
      blocks[g] += held;
    }
  }
  for (size_t g = 0; g < tables.size(); ++g)
    if (blocks[g] != a.total_blocks[g]) return false;
  return tokens == a.total_tokens;
}

bool RowsCore::admit(const NewRows &a, PyObject *const *ids) {
  if (!acceptable(a) || !directory.enter(ids, a.rows, a.count)) return false;
  fill(a);
  sampling.counters[NUM_ADMISSIONS] += a.count;
  return true;
}

void RowsCore::fill(const NewRows &a) {
  for (int64_t i = 0; i < a.count; ++i) {
    const int32_t row = a.rows[i];
    states.begin(row, a.num_tokens[i], a.prompt_len[i], a.num_computed[i]);
    states.live[row] = true;
  }
  for (size_t g = 0; g < tables.size(); ++g) {
    const RowTable &t = tables[g];
    const int32_t *blocks = a.blocks[g];
    for (int64_t i = 0; i < a.count; ++i) {
      const int32_t row = a.rows[i], held = a.num_blocks[g][i];
      std::copy_n(blocks, held, t.table + int64_t(row) * t.width);
      t.num_blocks[row] = held;
      t.content_id[row] = (*next_content_id)++;
      blocks += held;
    }
  }
}

bool RowsCore::remove(const int32_t *rows, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] >= 0 && rows[i] < states.max_num_reqs && states.live[rows[i]]) {
      states.live[rows[i]] = false;  // so that a row named twice is found
      continue;
    }
    while (i-- > 0) states.live[rows[i]] = true;
    return false;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = rows[i];
    states.end(row);
    states.lora_id[row] = 0;
    ++states.row_generation[row];
    for (const RowTable &t : tables) {
      std::fill_n(t.table + int64_t(row) * t.width, std::min(t.num_blocks[row], t.width), t.null_block);
      t.num_blocks[row] = 0;
      t.content_id[row] = (*next_content_id)++;
    }
    directory.leave(row);
  }
  sampling.reset(rows, count);
  return true;
}

void RowsCore::set_sampling(const int32_t *rows, int64_t count, const std::vector<ColumnWrite> &given) const {
  for (const ColumnWrite &g : given)
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(g.column + g.size * size_t(rows[i]), g.values.data() + g.size * size_t(i), g.size);
  sampling.renew(rows, count);
}

void RowsCore::derive_seeds(const int32_t *rows, int64_t count) const {
  int64_t *seeds = sampling.values<int64_t>("seed");
  const int64_t first = sampling.counters[NUM_ADMISSIONS] - count;
  for (int64_t i = 0; i < count; ++i) seeds[rows[i]] = derived_seed(sampling.counters[BASE_SEED], first + i);
}

bool RowsCore::append(const int32_t *rows, const int32_t *blocks, int64_t count, int32_t group) {
  if (group < 0 || size_t(group) >= tables.size()) return false;
  const RowTable &t = tables[group];
  // Copies, because both are read several times and other threads may write to NumPy's arrays meanwhile.
  appended_.assign(rows, rows + count);
  appended_.insert(appended_.end(), blocks, blocks + count);
  rows = appended_.data(), blocks = rows + count;
  if (!t.accepts(blocks, count)) return false;
  for (int64_t i = 0; i < count; ++i) {  // a row may be named twice: each of its blocks counts at once
    const int32_t row = rows[i];
    if (row >= 0 && row < states.max_num_reqs && states.live[row] && t.has_room(row, 1)) {
      __builtin_prefetch(t.table + int64_t(row) * t.width + t.num_blocks[row]++, 1);
      continue;
    }
    while (i-- > 0) --t.num_blocks[rows[i]];
    return false;
  }
  for (int64_t i = count; i-- > 0;) --t.num_blocks[rows[i]];
  for (int64_t i = 0; i < count; ++i) t.table[int64_t(rows[i]) * t.width + t.num_blocks[rows[i]]++] = blocks[i];
  return true;
}

}  // namespace foreword
