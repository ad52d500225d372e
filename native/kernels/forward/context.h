// Data that the stages of a forward pass share: the model, the batch, the residual stream, products and clock.
#pragma once

#include <cmath>

#include "kernels/clock.h"
#include "kernels/forward/input.h"
#include "kernels/forward/lora_step.h"
#include "kernels/forward/products.h"

namespace foreword::kernels {

// The stages that time is counted under, in the order of a layer.
enum class Stage : uint8_t { embed, qkv, rope, attention, o, gate_up, down, logits };
constexpr int kNumStages = 8;
constexpr const char *kStageNames[kNumStages] = {"embed", "qkv", "rope", "attention", "o", "gate_up", "down", "logits"};

// Seconds of thread 0 in each stage.
class StageClock {
 public:
  void start(int thread) {
    if (thread == 0) last_ = now();
  }
  // Adds the time since the previous call to `stage`.
  void finish(int thread, Stage stage) {
    if (thread != 0) return;
    const double t = now();
    seconds_[int(stage)] += t - last_;
    last_ = t;
  }
  double seconds(Stage stage) const { return seconds_[int(stage)]; }

 private:
  double last_ = 0, seconds_[kNumStages] = {};
};

// ln(1 + exp(x)).
inline float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

class PassContext {
 public:
  explicit PassContext(Model &m);

  void reserve();

  // Parts of the tokens, for stages whose numbers of a part stay in the caches until they are read, and take as much
  // memory with more tokens. Adapters are shrunk for all tokens at once. is_whole: whether the stage needs all of them.
  int num_parts(bool is_whole = false) const {
    return is_whole || has_loras() ? 1 : (input.num_tokens + kPartTokens - 1) / kPartTokens;
  }
  Share part(int index, int num_parts) const { return share_of(input.num_tokens, index, num_parts); }
  // The most tokens of a part.
  int part_tokens(bool is_whole) const {
    const int parts = num_parts(is_whole);
    return (input.num_tokens + parts - 1) / parts;
  }

  // The rows of x after a norm and its gate, as input of the products that follow: row 0 is the first of `tokens`.
  ActivationSet norm_rows(int thread, const Norm &norm, Share tokens);
  ActivationSet norm_rows(int thread, const Norm &norm) { return norm_rows(thread, norm, {0, input.num_tokens}); }
  // As norm_rows, with row(t) in place of row t of x.
  template <class Row>
  ActivationSet norm_rows_of(int thread, const Norm &norm, Share tokens, Row &&row) {
    return products.prepare(thread, normed, model.config.hidden_size, tokens.end - tokens.begin,
                            [&](int r) { return norm_row(thread, row(tokens.begin + r), norm); });
  }
  // The input of the first product of a layer: rows after its norm, of x or what the layer reads in its place.
  ActivationSet input_rows(int thread, const Layer &layer, Share tokens);
  // Keeps x as the input of the first layer, if a layer reads it.
  void keep_first_input(int thread);
  // aside = branch Wasideᵀ, the output of a layer aside. Ends with a barrier.
  void finish_aside(int thread, const Layer &layer, const Linear &next);

  // The inputs that the last call of norm_rows prepared.
  ActivationSet normed_rows(int thread) const {
    return products.prepared(thread, normed, model.config.hidden_size, input.num_tokens);
  }
  // norm(row) in memory of this thread, valid until the next call; `row` itself without a norm.
  const float *norm_row(int thread, const float *row, const Norm &norm) const {
    return norm_row(row, norm, norm_out_[size_t(thread)].data());
  }
  // norm(row) in `out`, which is returned; `row` itself without a norm.
  const float *norm_row(const float *row, const Norm &norm, float *out) const {
    const ModelConfig &c = model.config;
    if (!norm) return row;
    if (c.layer_norm) {
      isa.layer_norm(row, norm.weight, norm.bias, c.hidden_size, c.norm_eps, out);
    } else {
      isa.rms_norm(row, norm.weight, c.hidden_size, c.norm_eps, out);
    }
    return out;
  }

  // The input of the last product of attention or an MLP, RMSNorm of `size` numbers of `row` and rounded, in memory of
  // this thread, valid until the next call; `row` itself if the model has neither.
  const float *inner_row(int thread, const float *row, Vector norm, int size) const;

  // `kinds`, and the kinds of input that the adapters of the step take.
  KindSet with_loras(KindSet kinds) const { return lora_.with_kinds(kinds); }
  bool has_loras() const { return lora_.is_active(); }
  // The adapters of the step; only if it has some.
  const LoraStep &loras() const { return lora_; }
  // The adapters of all tokens, shrunk for products whose input is `a`.
  LoraRows shrink(int thread, std::initializer_list<const Linear *> linears, const ActivationSet &a) {
    return lora_.shrink(thread, linears, a);
  }
  // As shrink, by this thread alone: see LoraStep::shrink_alone.
  LoraRows shrink_alone(int thread, const PackedMatrix &matrix, const ActivationSet &a, Share tokens) {
    return has_loras() ? lora_.shrink_alone(thread, matrix, a, tokens) : LoraRows();
  }

  // x += scale norm(a Wᵀ + bias), with or without a norm and a bias. `input`: memory for prepared rows of `a`.
  // `inner_norm`: of these rows. Ends with a barrier.
  void add_product(int thread, const Linear &l, const ProductInput &input, const FloatRows &a, Vector bias,
                   const Norm &norm, const Linear *next, Vector inner_norm = nullptr);
  // Compute a product in two parts: first for the tokens `rows`, the first rows of `a`; then, once for all, the rest.
  void multiply(int thread, const Linear &l, const ActivationSet &a, Share rows, const Norm &norm, const Linear *next);
  void finish_product(int thread, Vector bias, const Norm &norm);
  // x += scale norm(branch), with or without a norm. Ends with a barrier.
  void add_branch(int thread, const Norm &norm);
  // Adds the bias of a layer's first product, if it has one, to the rows of all tokens, at `rows`. Ends with a barrier.
  void add_input_bias(int thread, const Layer &layer, float *rows) const;

  // Returns whether a product is written to `branch`, and added to x from there.
  bool has_branch(const Norm &norm) const {
    return norm || norm.scale != 1.f || norm.kept || norm.is_aside || norm.scales;
  }
  // A row of `first`, of the first product of a layer with attention.
  float *first_row(const Layer &layer, int row) const { return first.data() + int64_t(row) * layer.qkv.stride; }
  Share token_share(int thread) const { return share_of(input.num_tokens, thread, pool.size()); }

  Model &model;
  const Isa &isa;
  ThreadPool &pool;
  ForwardInput input{};
  FloatRows x;                   // residual stream [T, hidden_size]
  FloatRows branch;              // [T, hidden_size], added to x after a norm or a sum
  FloatRows first;               // outputs of the first product of attention or an MLP, of a part, in rows of its size
  // Queries and keys, in rows of qkv, and values [T, key heads · value_dim] of a layer that takes_qkv.
  const FloatRows *mixed = nullptr, *mixed_values = nullptr;
  FloatRows first_input, aside;  // [T, hidden_size], the input of the first layer, and the output of a layer aside
  ProductInput normed;           // rows of x after a norm: the input of qkv, gate, up and router
  Products products;
  StageClock clock;

 private:
  static constexpr int kPartTokens = 512;

  // Rounds a row of `size` numbers to 8 bits: x becomes round(x s) / s, with s = 127 / max(|x|), at least 1e-5.
  static void round_row(float *x, int size);
  // The gates of `norm`, before the sigmoid, of these rows of x. Ends with a barrier.
  void make_gates(int thread, const Norm &norm, Share tokens);
  // Adds `bias` to this thread's rows.
  void add_bias(int thread, Vector bias, FloatRows &rows) const;

  LoraStep lora_;
  KindSet kinds_{};  // the kinds of `normed`
  bool has_branch_ = false, has_aside_ = false;
  KindSet gate_kinds_{};  // the kinds of `low_input_`
  int most_low_ = 0, most_rank_ = 0;  // floats of a row of `low_`, and inputs of a product of `low_input_`
  Buffer<float> low_;                 // [T, rank of a norm's gate]
  ProductInput low_input_;            // the rows of `low_` after the activation
  FloatRows gates_;                   // [T, hidden_size], of a norm
  KindSet wide_kinds_{};  // the kinds of `wide_`
  ProductInput wide_;     // rows of x and of `first_input` after a norm
  std::vector<Buffer<float>> norm_out_, inner_out_, wide_out_;  // [num_threads]
};

}  // namespace foreword::kernels
