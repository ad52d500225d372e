// The batch of one forward pass.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/model.h"

namespace foreword::kernels {

// Arrays have the names and shapes of the batch tensors: T tokens, B requests, L logit rows, R rows of request state.
// They are read only during the call.
struct ForwardInput {
  int num_tokens, num_reqs, num_logits;
  const int32_t *input_ids;        // [T]
  const int64_t *positions;        // [T]
  const int32_t *query_start_loc;  // [B + 1]
  const int32_t *seq_lens;         // [B]
  const int32_t *idx_mapping;      // [B]
  const int32_t *num_draft_tokens;     // [B]
  const int32_t *num_accepted_tokens;  // [R]
  const int64_t *logits_indices;   // [L]
  bool greedy;                     // the token with the largest logit is enough
  int num_embeds;                  // N
  const int64_t *embed_rows;       // [N] tokens, ascending, whose input is a row of `embeds` in place of a token id
  const float *embeds;             // [N, hidden_size]
  int num_features;                // vectors for each row of `embeds` that a layer adds after its MLP: the first layers
  const float *features;           // [N, num_features, hidden_size]
  const int64_t *mrope_positions;  // [num_axes, T]; null: `positions` in every axis
  const int64_t *last_seen;        // [T] the position of the last key that a token sees; null: its own
  bool bidirectional;              // a token sees the keys after it too, a window to both sides; no last_seen
  const int32_t *lora_ids;         // [B] the adapter of each request, 0: none; null: none has one
  struct Group {
    const int64_t *slot_mapping;  // [T]; −1: not stored
    const int32_t *block_table;   // [R, stride]
    int num_rows, stride;
    bool recurrent;  // a row has a block per state, and no token a slot

    const int32_t *blocks_of(int row) const { return block_table + int64_t(row) * stride; }
  };
  std::vector<Group> groups;

  // The position of token t along an axis of rotary positions.
  int64_t rotary_position(int axis, int t) const {
    return mrope_positions ? mrope_positions[int64_t(axis) * num_tokens + t] : positions[t];
  }
  // The last key that token t sees.
  int64_t last_key(int t) const { return last_seen ? last_seen[t] : positions[t]; }
  int query_len(int req) const { return query_start_loc[req + 1] - query_start_loc[req]; }
  int num_computed(int req) const { return seq_lens[req] - query_len(req); }
  // The entry of a row of a recurrent group with the state after the computed tokens.
  int first_state(int req) const { return num_accepted_tokens[idx_mapping[req]] - 1; }
};

// Throws std::invalid_argument unless values[index] is in [begin, end).
template <class T>
inline void require(const T *values, int64_t index, int64_t begin, int64_t end, const char *name) {
  if (values[index] >= begin && values[index] < end) return;
  throw std::invalid_argument(std::string(name) + "[" + std::to_string(index) + "] = " + std::to_string(values[index]) +
                              " is outside [" + std::to_string(begin) + ", " + std::to_string(end) + ")");
}

// Throws std::invalid_argument for the number of an adapter of a request that the model does not hold. lora_ids: [B].
void check_adapter(const int32_t *lora_ids, int req, const Model &model);

// Throws std::invalid_argument naming the tensor, index and value if any value is outside its range.
void check_input(const ForwardInput &input, const Model &model);

}  // namespace foreword::kernels
