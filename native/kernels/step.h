// One step of a model: the whole forward pass over a flat batch of tokens, in one parallel region.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/model.h"

namespace foreword::kernels {

// The batch, as tensors.md names it. Pointers are only read, and only during the call.
struct StepInput {
  int num_tokens, num_reqs, num_logits;
  const int32_t *input_ids;        // [T]
  const int64_t *positions;        // [T]
  const int32_t *query_start_loc;  // [B + 1]
  const int32_t *seq_lens;         // [B]
  const int32_t *idx_mapping;      // [B]
  const int64_t *logits_indices;   // [L]
  struct Group {
    const int64_t *slot_mapping;  // [T]; −1: not stored
    const int32_t *block_table;   // [R, stride]
    int num_rows, stride;
  };
  std::vector<Group> groups;
};

// Runs steps of one model. Owns the memory they work in, which grows to the largest step seen.
class StepRunner {
 public:
  explicit StepRunner(Model &model);

  // logits [L, logits_stride()], valid until the next call. Throws std::invalid_argument on input outside its range, before
  // anything was changed.
  const float *run(const StepInput &input);
  int logits_stride() const { return logits_stride_; }

  // Seconds since the runner was made, by stage, of thread 0; see kStageNames.
  static constexpr int kNumStages = 8;
  static const char *const kStageNames[kNumStages];
  double stage_seconds[kNumStages] = {};

 private:
  // Queries of one request that are attended to together, and the keys of one task.
  struct AttentionTask {
    int req, first_token, num_queries;
    int64_t first_position, key_begin, key_end;
    int partial;  // index of its first partial result (one a KV head follows); −1: it writes the output itself
  };
  struct Merge {
    int task, num_splits;  // its first task; the others follow
  };
  struct GroupPlan {
    std::vector<AttentionTask> tasks;
    std::vector<Merge> merges;
  };
  // What one thread keeps for itself.
  struct ThreadMemory {
    Buffer<uint8_t> linear, attention;
    Buffer<float> row, gate, up, rotated;
    ActivationBuffer in_acts, attn_acts, mlp_acts;
  };

  void check(const StepInput &input) const;
  void plan(const StepInput &input);
  void plan_group(const StepInput &input, int64_t window, GroupPlan &plan) const;
  void reserve(const StepInput &input);

  // The stages below run on every thread of the region.
  void step(int thread);
  void embed(int thread);
  void attention_block(int thread, const Layer &layer, int index);
  void rope_and_store(int thread, const Layer &layer);
  void attend(int thread, const Layer &layer, int index);
  void mlp_block(int thread, const Layer &layer, int index);
  void project(int thread);

  template <class Row>
  ActivationSet prepare(int thread, int cols, int rows, const ActivationBuffer &shared, Row &&row);

  // This thread's share of rows [0, rows), `row(r)` in every kind the set holds.
  template <class Row>
  void prepare_rows(int thread, const ActivationSet &set, int rows, Row &&row) {
    const Share share = share_of(rows, thread, pool_.size());
    for (int r = share.begin; r < share.end; ++r) prepare_row(thread, set, r, row(r));
  }
  void prepare_row(int thread, const ActivationSet &set, int r, const float *x) {
    for (int kind = 0; kind < kNumActivationKinds; ++kind) {
      if (set.used[kind]) level_.prepare_row(set.kinds[kind], r, x, own_[static_cast<size_t>(thread)].rotated.data());
    }
  }
  // `next`: the product that follows, whose first weights are fetched meanwhile; null if it is not known.
  void linear(int thread, const Linear &l, const ActivationSet &a, Share rows, float *out, Store store, const Linear *next = nullptr);
  void gated(int thread, const Mlp &mlp, const ActivationSet &a, Share rows, float *out);
  const uint8_t *first_weights(int thread, const Linear *l) const;
  void dense_mlp(int thread, const Layer &layer, const Mlp &mlp, float *out, Store store, const Linear *next);
  void moe(int thread, const Layer &layer, const Moe &moe);
  void route(int thread, const Moe &moe);
  void sort_by_expert(const Moe &moe);
  void add_branch(int thread, Vector norm);
  const float *norm_row(int thread, const float *x, Vector weight);
  const int32_t *table_of(const Layer &layer, const AttentionTask &task) const;
  kernels::AttentionTile tile_of(const Layer &layer, const AttentionTask &task, int head) const;
  AttentionConfig attention_config(int64_t window) const;
  void tick(int thread, int stage);

  Model &m_;
  const Level &level_;
  ThreadPool &pool_;
  StepInput in_;
  int logits_stride_;
  bool post_norms_ = false;
  double last_tick_ = 0;

  std::vector<ThreadMemory> own_;
  std::vector<GroupPlan> plans_;
  std::vector<std::atomic<int>> counters_;  // next task of each layer
  size_t partial_stride_ = 0;
  Buffer<float> x_, qkv_, q_, attn_, hidden_, branch_, logits_, cosines_, sines_, partials_;
  int hidden_stride_ = 0, attn_stride_ = 0, mlp_stride_ = 0, qkv_stride_ = 0, rope_stride_ = 0;
  ActivationBuffer in_acts_, attn_acts_, mlp_acts_;

  // Mixture of experts: a "choice" is one of the experts a token goes to, token * experts_per_token + rank.
  Buffer<float> normed_, router_logits_, shared_gate_, choice_weight_, expert_hidden_, expert_out_;
  Buffer<int> choice_expert_, choice_place_, place_token_, expert_begin_;
  int router_stride_ = 0;
  ActivationBuffer gathered_acts_, expert_acts_;
};

}  // namespace foreword::kernels
