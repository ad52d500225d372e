// Recurrent layers: their sizes, the layout of their states, and what the kernels read and write. The arithmetic is
// that of foreword.models.recurrent.
#pragma once

#include <cstddef>

#include "kernels/memory.h"

namespace foreword::kernels {

enum class RecurrentKind : int { mamba2, gated_delta, short_conv, mamba1, rg_lru, mixed_qkv };

constexpr size_t kScaleFloats = 16;  // the scale of a head's state, and unused floats
constexpr int kChannelGroup = 16;    // adjacent channels of mamba1, whose states are beside each other

// The sizes of the recurrent layers of a model; num_heads = 0: it has none.
//
//   a row of projections   v k q z dt (mamba2), q k v z dt beta (gated_delta), v beta z (short_conv), v z (mamba1 and
//                          rg_lru) or q k late_v v (mixed_qkv), each from a multiple of kRowPadding on; q, k and v, or
//                          late_v, are the channels of the convolution. z and dt of gated_delta with a rank: z_low and
//                          dt_low
//   a state                S [num_heads][head_floats()], then the last num_inputs() rows of channels; of a head,
//                          S = c X: first c, from kScaleFloats on the columns of kScanVectors vectors of X
//                          [key_dim][columns], one after the other, then of the rest those of each vector. Of mamba1,
//                          from kScaleFloats on, S [channels / kChannelGroup][key_dim][kChannelGroup]; of rg_lru,
//                          from there on, S [channels]
// rank: the outputs of the first product of time steps of mamba1; of gated_delta, those of z_low and of dt_low, or 0;
// the channels of a block of rg_lru. heads_kernel: of the second convolution of mixed_qkv, otherwise 1.
struct RecurrentConfig {
  RecurrentKind kind;
  int num_heads, num_key_heads, key_dim, value_dim, conv_kernel;
  int rank;
  bool tiled;  // value head j uses key head j mod num_key_heads, not j / (num_heads / num_key_heads)
  bool channel_decays;  // gated_delta has a decay for each number of a key, not one per head
  int heads_kernel;

  int key_head(int head) const { return tiled ? head % num_key_heads : head / (num_heads / num_key_heads); }
  bool gated_delta() const { return kind == RecurrentKind::gated_delta; }
  bool short_conv() const { return kind == RecurrentKind::short_conv; }
  bool mamba1() const { return kind == RecurrentKind::mamba1; }
  bool rg_lru() const { return kind == RecurrentKind::rg_lru; }
  bool mixed_qkv() const { return kind == RecurrentKind::mixed_qkv; }
  bool has_keys() const { return !mamba1() && !rg_lru(); }  // whether channels are keys and queries, too
  bool has_lows() const { return gated_delta() && rank > 0; }
  int num_keys() const { return num_key_heads * key_dim; }
  int num_values() const { return num_heads * value_dim; }
  int num_decays() const { return num_heads * (channel_decays ? key_dim : 1); }
  int num_late() const { return num_key_heads * value_dim / 2; }  // values of mixed_qkv of the token before
  int num_inputs() const { return conv_kernel - 1 + heads_kernel - 1; }
  int channel_stride() const {
    if (mixed_qkv()) return padded_row(num_values()) + padded_row(num_key_heads * value_dim) + padded_row(num_late());
    return (has_keys() ? 2 * padded_row(num_keys()) : 0) + padded_row(num_values());
  }
  int padded_value_dim() const { return (value_dim + 15) / 16 * 16; }
  size_t head_floats() const { return kScaleFloats + product(size_t(key_dim), size_t(padded_value_dim())); }
  size_t matrix_floats() const { return product(head_floats(), size_t(num_heads)); }
  size_t state_floats() const { return matrix_floats() + product(size_t(num_inputs()), size_t(channel_stride())); }
};

// The causal convolution of consecutive tokens of one request, for the channels [begin, end), whole vectors.
struct Convolution {
  float *rows;            // [num_tokens], `stride` apart: inputs, which become silu of the sums, or the sums
  const float *past;      // [kernel − 1][channel_stride], the inputs before them
  float *last;            // the same after them; may be `past`
  const float *weights;   // [kernel][channel_stride]
  const float *bias;      // [channel_stride], or null
  size_t stride, channel_stride;
  int num_tokens, kernel, begin, end;
  bool silu;
};

// The recurrence of consecutive tokens of one request in one head.
struct StateScan {
  bool gated_delta, channel_decays;
  int num_tokens, key_dim, value_dim, padded_value_dim;
  const float *before;       // [kScaleFloats + key_dim · padded_value_dim], the state before the first token
  float *state;              // the state after the last one; may be `before`
  const float *q, *k, *v;    // from the first token on; rows `stride` apart
  const float *decay, *write;  // from the first token on, rows decay_stride and write_stride apart
  float skip;                // only mamba2 has it
  float *out;                // [num_tokens][value_dim], rows out_stride apart
  size_t stride, decay_stride, write_stride, out_stride;
};

// The recurrence of consecutive tokens of one request in the channels [begin, end), whole groups of kChannelGroup, with
// the gate: out = (Sᵀ q + skip x) silu(gate), and dt = softplus(step + step_bias). Arrays are addressed from channel 0.
struct SelectiveScan {
  int num_tokens, key_dim, begin, end;
  const float *rate;           // exp(a_log), [channels / kChannelGroup][key_dim][kChannelGroup]
  const float *before;         // S before the first token, in the same order
  float *state;                // S after the last one; may be `before`
  const float *step_bias, *skip;
  const float *x, *gate;       // from the first token on; rows `stride` apart
  const float *step;           // rows step_stride apart
  const float *k, *q;          // [key_dim], rows key_stride apart
  float *out;                  // rows out_stride apart
  size_t stride, step_stride, key_stride, out_stride;
};

// The recurrence of rg_lru over consecutive tokens of one request in the channels [begin, end), whole groups of
// kChannelGroup: with w and f = sigmoid(write + write_bias) and sigmoid(forget + forget_bias), out = S = exp(−rate f) S
// + sqrt(1 − exp(−2 rate f)) w x. Arrays are addressed from channel 0.
struct GatedScan {
  int num_tokens, begin, end;
  bool is_first;               // the first token is the first one of its request: its S is w x
  const float *rate, *write_bias, *forget_bias;
  const float *before;         // S before the first token
  float *state;                // S after the last one; may be `before`
  const float *x;              // from the first token on; rows `stride` apart
  const float *write, *forget;  // rows gate_stride apart
  float *out;                  // rows out_stride apart
  size_t stride, gate_stride, out_stride;
};

}  // namespace foreword::kernels
