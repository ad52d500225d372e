// One forward pass of an encoder over whole texts side by side, in one parallel region. Each token sees every token of
// its own text, or those within a distance; keys and values are not kept.
//
//   x = norm(embed[ids] + positions[p] + token_types[type]), or rows that are given
//   per layer, norms after   x = norm(x + attention(x));  x = norm(x + mlp(x))
//              norms before  x += attention(norm(x));     x += mlp(norm(x))       and a final norm
//
// norm is a layer norm with an optional bias, or, before the branches alone, one without a mean (rms_norm), which the
// output of a branch, and heads, may have too. A text's result does not depend on the other texts, nor on the number of
// threads.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#include "kernels/forward/lora_step.h"
#include "kernels/forward/products.h"

namespace foreword::kernels {

// The bounds of the inputs of a product, then of its outputs: [4]; null without.
using Bounds = Vector;

// Returns whether two products, both with bounds or both without, have inputs with equal bounds.
inline bool have_equal_inputs(Bounds a, Bounds b) { return !a || (a[0] == b[0] && a[1] == b[1]); }

struct EncoderLayer {
  Norm attn_norm, mlp_norm, post_attn_norm, post_mlp_norm;
  Vector q_norm = nullptr, k_norm = nullptr, v_norm = nullptr;  // [head_dim] each
  Vector q_bias = nullptr, k_bias = nullptr, v_bias = nullptr, o_bias = nullptr;
  Vector gate_bias = nullptr, up_bias = nullptr, down_bias = nullptr;
  Bounds q_bounds = nullptr, k_bounds = nullptr, v_bounds = nullptr, o_bounds = nullptr;
  Bounds gate_bounds = nullptr, up_bounds = nullptr, down_bounds = nullptr;
  Linear qkv, o;
  std::vector<Linear> apart;  // q, k and v alone, if the bounds of their inputs differ
  Mlp mlp;  // without a gate: act(h Wup) Wdown
  int rope = -1;
  int64_t window = -1;  // the largest distance that a token sees; −1: all of its text
  bool grouped = false;  // a token sees its group in place of its text

  // Returns whether the outputs of gate and up are changed before they are multiplied.
  bool gates_apart() const { return gate_bias || gate_bounds; }
};

struct Encoder {
  bool norms_before = false, rms_norm = false;
  float act_scale = 1.f;  // the function of an MLP without a gate is act(act_scale x) / act_scale
  Norm embed_norm, final_norm;  // embed_norm: of an embedding; final_norm: if norms come before, perhaps
  FloatRows positions{1}, token_types{1};  // [count, hidden_size]
  int num_positions = 0, num_token_types = 0;  // 0: the model has none
  FloatRows biases{1};  // [num_heads], of the distances from −longest + 1 on: see AttentionConfig
  int longest = 0;      // the longest text with biases; 0: the model has none
  std::vector<EncoderLayer> layers;
};

struct EncoderInput {
  int num_tokens, num_reqs;
  const int32_t *input_ids;        // [T]; null: x is given
  const float *x;                  // [T, hidden_size]; null: of input_ids
  const int64_t *positions;        // [T], from 0 in each text
  const int32_t *query_start_loc;  // [B + 1]
  const int32_t *token_types;      // [T]; null: all 0
  const int64_t *places;           // [num_axes, T], of rotations by several axes; null without
  int num_groups;                  // groups of the grouped layers, 0 without
  const int32_t *group_start_loc;  // [num_groups + 1]
  const int32_t *lora_ids;         // [B] the adapter of each text, 0: none; null: none has one
};

class EncoderPass {
 public:
  // The model and the encoder are complete; they outlive the pass.
  EncoderPass(Model &model, const Encoder &encoder);
  EncoderPass(const EncoderPass &) = delete;
  EncoderPass &operator=(const EncoderPass &) = delete;

  // The hidden states [T, stride()], valid until the next call. Throws std::invalid_argument on input outside its
  // range, before anything is written.
  const float *run(const EncoderInput &input);
  int stride() const { return x_.stride(); }

 private:
  struct Scratch {
    Buffer<uint8_t> attend;
    Buffer<float> norm, key_value;  // key_value: key, value, and the scratch memory of store_kv: [3, padded_dim]
  };
  // Consecutive queries of one text, or group, whose tokens are [begin, end).
  struct Task {
    int begin, end, first_block, first, count;
  };
  // The division of attention to texts, or to groups, each of which has its own blocks.
  struct Division {
    std::vector<int64_t> slots;  // the slot of each token
    std::vector<Task> tasks;     // each is computed once per head
    int num_blocks = 0;
  };

  void check(const EncoderInput &input) const;
  void reserve();
  void divide(const int32_t *start_loc, int count, int max_queries, Division &division) const;
  const Division &division(const EncoderLayer &layer) const { return layer.grouped ? groups_ : texts_; }
  void run_stages(int thread);
  void embed(int thread);
  void attention(int thread, size_t index);
  void add_branch(int thread, const Linear &linear, const ActivationSet &in, const Linear *next);
  void make_heads(int thread, const EncoderLayer &layer);
  void attend(int thread, const EncoderLayer &layer, std::atomic<int> &next_task);
  void mlp(int thread, size_t index);
  // row += bias, both padded to `size`; a null bias adds nothing.
  void add_bias(Vector bias, int size, float *row) const {
    if (bias) isa_.add_row(bias, size_t(size), row);
  }
  // Row t of x plus the output of a branch, with its bias, or its bounds and its norm.
  float *with_branch(int t, Vector bias, Bounds bounds, const Norm &post) const;
  // x between the bounds of an input, in memory of this thread; x itself without bounds.
  const float *bounded(int thread, const float *x, Bounds bounds) const;
  const float *normed(int thread, const float *x, const Norm &norm) const;
  void norm(const float *x, const Norm &norm, float *out) const;
  AttentionConfig config(const EncoderLayer &layer) const;

  Model &model_;
  const Encoder &encoder_;
  const Isa &isa_;
  ThreadPool &pool_;
  EncoderInput input_{};
  Products products_;
  LoraStep loras_;
  std::vector<Scratch> scratch_;  // [num_threads]
  KindSet in_kinds_{}, o_kinds_{}, down_kinds_{};
  int hidden_stride_ = 0, hidden_cols_ = 0, qkv_stride_ = 0;
  bool has_branch_ = false;  // the output of a branch is not added to x by its product
  FloatRows x_, branch_, queries_, heads_, cosines_, sines_;  // [T, …]; angles [ropes * T, pairs]
  Buffer<float> qkv_, hidden_, gate_;                // [T, qkv_stride_], [T, hidden_stride_] twice
  ActivationBuffer in_, o_in_, down_in_;
  std::optional<KVCache> kv_;        // keys and values of one layer, a text's blocks one after the other
  std::vector<int32_t> blocks_;      // 0, 1, 2, …
  Division texts_, groups_;
  std::vector<std::atomic<int>> next_tasks_;  // by layer
};

}  // namespace foreword::kernels
