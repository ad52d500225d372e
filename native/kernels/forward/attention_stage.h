// The attention block of a layer: projection to heads, rotation and the KV cache, attention, output projection.
#pragma once

#include <atomic>
#include <vector>

#include "kernels/forward/attention_plan.h"
#include "kernels/forward/embedding_stage.h"
#include "kernels/forward/index_stage.h"
#include "kernels/forward/latent_stage.h"
#include "kernels/forward/low_rank.h"

namespace foreword::kernels {

class AttentionStage {
 public:
  AttentionStage(PassContext &context, const EmbeddingStage &embedding);

  // Plans the attention of every KV group, too.
  void reserve();
  // x += attention(norm(x)); keys and values of the tokens are written at their slots. Ends with a barrier.
  void run(int thread, int layer_index);

 private:
  struct Scratch {
    Buffer<uint8_t> attend;
    Buffer<float> key_value;  // key, value, and the scratch memory of store_kv
  };
  // The rows of layers with heads of one shape. [T, …]: all heads side by side; queries padded to padded_dim, scaled.
  // Outputs are written over the queries, unless these are larger.
  struct Rows {
    FloatRows queries, own_out;
    bool is_apart;

    const FloatRows &out() const { return is_apart ? own_out : queries; }
  };

  // Returns whether the rows of all tokens are read together.
  static bool is_whole(const Layer &layer) {
    return layer.beside || layer.parallel_mlp || layer.gated || layer.latent;
  }
  void project(int thread, const Layer &layer, Share tokens, const Linear &next);
  bool makes_rows() const;
  // Row 0 of `ctx_.first` is that of the first of these tokens.
  void make_rows(int thread, const Layer &layer, Share tokens);
  void rotate_and_store(int thread, const Layer &layer, Share tokens);
  void store_latent(int thread, const Layer &layer);
  // The KV heads of this thread's team, whose keys and values it writes and reads.
  Share heads_of(int thread, const HeadShape &shape) const;
  void attend(int thread, const Layer &layer, std::atomic<int> &next_task);
  void apply_gate(int thread, const Layer &layer, const FloatRows &out);
  AttentionConfig config(const HeadShape &shape, AttentionWindow window, Vector sinks = nullptr) const;
  const int32_t *blocks_of(const Layer &layer, const AttentionTask &task) const {
    return ctx_.input.groups[size_t(layer.group)].blocks_of(ctx_.input.idx_mapping[task.req]);
  }
  AttentionTile tile_of(const Layer &layer, const AttentionTask &task, int kv_head) const;

  PassContext &ctx_;
  const EmbeddingStage &embedding_;
  LatentStage latent_;
  IndexStage index_;
  LowRankProducts added_;
  std::vector<AttentionWindow> windows_;      // by KV group
  std::vector<int> shapes_;                   // by KV group, the index of the shape of its heads
  std::vector<AttentionPlan> plans_;          // by KV group
  std::vector<std::atomic<int>> next_tasks_;  // by layer and team
  std::vector<Scratch> scratch_;              // [num_threads]
  KindSet kinds_{};                           // the kinds of `o_input_`
  bool has_whole_ = false;                    // whether there is a layer that `is_whole`
  std::vector<Rows> rows_;                    // by shape of heads
  ProductInput o_input_;
  size_t partial_stride_ = 0;
  Buffer<float> partials_;  // [partial, KV head] results of splits, partial_stride_ floats each
};

}  // namespace foreword::kernels
