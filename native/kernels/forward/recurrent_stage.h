// A recurrent layer: projections, convolution, the recurrence over the tokens of each request, norm and gate, output
// projection.
#pragma once

#include "kernels/forward/head_products.h"

namespace foreword::kernels {

class RecurrentStage {
 public:
  explicit RecurrentStage(PassContext &context);

  void reserve();
  // x += layer(norm(x)); the states of the requests are read and written. Ends with a barrier.
  void run(int thread, const Layer &layer);

 private:
  float *projection(const Layer &layer, int part, int token) const {
    return projected_.row(token) + layer.qkv.parts[size_t(part)].offset;
  }
  // Consecutive tokens of a request after which its state is kept: it is read from one block and written to another.
  struct Run {
    int first, num_tokens;
    float *before, *after;
  };
  // The first one has the known tokens of the request, and each other one a draft.
  int num_runs(int req) const { return ctx_.input.query_len(req) == 0 ? 0 : 1 + ctx_.input.num_draft_tokens[req]; }
  Run run_of(const Layer &layer, int req, int index) const;

  void mix_tokens(int thread, const Layer &layer);
  void mix_channels(int thread, const Layer &layer);
  void mix_selectively(int thread, const Layer &layer);
  void mix_gated(int thread, const Layer &layer);
  void mix_heads(int thread, const Layer &layer);
  void convolve_heads(int thread, const Layer &layer, int key_head, Share dims);
  void delay(int thread, const Layer &layer, Share channels);
  // Calls f(first, num_tokens, input, keep) for each request with tokens: input(t) has the inputs of token t of its
  // step by channel, also of the tokens before that its state has. keep() writes these channels of the states after it:
  // channels(j), for each j below `count`.
  template <class Channels, class F>
  void with_inputs(int thread, const Layer &layer, int count, Channels &&channels, F &&f);
  void convolve(int thread, const Layer &layer);
  void multiply_lows(int thread, const Layer &layer);
  void prepare_tokens(int thread, const Layer &layer);
  void scan(int thread, const Layer &layer);
  void scan_selective(int thread, const Layer &layer);
  void scan_gated(int thread, const Layer &layer);
  void apply_gate(int thread, const Layer &layer);

  PassContext &ctx_;
  const RecurrentConfig config_;
  const int channels_;                // floats of a row of channels
  const int q_, k_, v_;               // offsets in a row of channels
  FloatRows projected_;               // [T, projections], later the outputs of the convolution in its channels
  FloatRows decay_, write_;           // [T, num_decays], [T, num_heads]
  FloatRows out_;                     // [T, num_values]
  FloatRows unit_;                    // [2, key_dim]: the factors of normed q and k
  FloatRows inner_;                   // [T, dt_low k q] of mamba1, [T, num_values] of gated_delta: second products of z
  FloatRows steps_;                   // [T, num_values] of mamba1, [T, num_decays]: second products of dt
  FloatRows low_;                     // [num_threads, rank], a normed dt_low
  FloatRows gates_;                   // [T, 2 · padded channels], the products of write and of forget of rg_lru; the
                                      // inputs of the second convolution of mixed_qkv, heads_kernel of each head
  FloatRows past_;                    // [num_threads, num_inputs · channels] of mixed_qkv: a state before the step
  HeadProducts gate_products_;
  KindSet kinds_{}, inner_kinds_{}, step_kinds_{};  // the kinds of the inputs below
  ProductInput o_input_, inner_input_, step_input_;
};

}  // namespace foreword::kernels
