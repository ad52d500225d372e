// The table of kernels of one instruction set. The driver calls kernels only through it. The widths of packed panels
// belong to it too: a matrix is read by the instruction set that packed it.
#pragma once

#include "kernels/formats.h"
#include "kernels/recurrent.h"
#include "kernels/screen.h"

namespace foreword::kernels {

constexpr int kMostStreams = 8;

struct Isa {
  const char *name;
  int panel_width;
  bool bf16_dot;  // bf16 weights take bf16 activations; otherwise they are widened and take f32 activations

  // Packing. `pack_panel` writes panel `panel` of `matrix` from rows of `source`; `scratch` has `pack_scratch_bytes`.
  size_t (*panel_bytes)(Format format, int padded_cols);
  size_t (*pack_scratch_bytes)(int padded_cols);
  void (*pack_panel)(const SourceMatrix &source, const PackedMatrix &matrix, int panel, void *scratch);
  void (*decode_row)(const SourceMatrix &source, int row, float *out);

  // Products.
  size_t (*linear_scratch_bytes)();
  void (*linear)(const MatrixProduct &product);
  // `scratch`: padded_cols floats.
  void (*prepare_row)(const Activations &a, int row, const float *x, float *scratch);

  // Greedy tokens: see screen.h. `pack_screen` writes panel `panel` of the screen of `head`, unless that is `head`
  // itself, in Format::i8; and the panel's `errors`: infinity if it has outputs past the last one. Returns the most
  // that a logit of the panel or its bound can be per unit of `reach`; infinity if a weight is not finite. `scratch`
  // has `pack_scratch_bytes`. `screen_reach`: the reach of a row x, prepared for both; NaN if x is not finite.
  // `scratch`: padded_cols floats. `screen_rows`: `logits` are products with a screen, of row row_begin and panel
  // panel_begin first; errors and state from 0 on. At the first call state is {reach, slack, -infinity, -1}.
  float (*pack_screen)(const PackedMatrix &head, const PackedMatrix &screen, int panel, void *scratch, float *errors);
  float (*screen_reach)(const Activations &head, const Activations &screen, int row, const float *x, float *scratch);
  void (*screen_rows)(const float *logits, size_t stride, int row_begin, int row_end, int panel_begin, int panel_end,
                      const float *errors, ScreenedRow *state, ScreenHits &hits);

  // Adapters: see lora.cpp. `pack_lora` fills `pair`, whose format is set, and writes its factors to `memory`, or only
  // returns their bytes if that is null; `scratch`: padded_cols floats. `lora_shrink`: shrunk[t, r] = scale Σ_k a[t, k]
  // A[r, k] of the tokens t, for the ranks r of one vector; rows of `shrunk` are `stride` apart. `lora_expand`: out[t,
  // n] += Σ_r shrunk[t, r] B[n, r] for the outputs of panels [panel_begin, panel_end). Rows of `shrunk` and `out` are
  // addressed from token 0, and outputs from panel 0.
  size_t (*pack_lora)(const LoraSource &source, LoraPair *pair, uint8_t *memory, float *scratch);
  void (*lora_shrink)(const LoraPair &pair, const Activations &a, const int *tokens, int num_tokens, int vector,
                      LoraRow *shrunk, size_t stride);
  void (*lora_expand)(const LoraPair &pair, const LoraRow *shrunk, size_t stride, const int *tokens, int num_tokens,
                      int panel_begin, int panel_end, float *out, size_t out_stride);

  // Rows.
  void (*rms_norm)(const float *x, const float *weight, int size, float eps, float *out);
  // (x - mean) / sqrt(variance + eps) * weight + bias; `bias` may be null. `out` may be x.
  void (*layer_norm)(const float *x, const float *weight, const float *bias, int size, float eps, float *out);
  void (*gate_mul)(Gate gate, const float *g, const float *u, size_t size, float *out);
  // gate sigmoid(alpha gate) (up + 1), with gate = min(g, limit) and up = u within ±limit
  void (*clamped_gate_mul)(float alpha, float limit, const float *g, const float *u, size_t size, float *out);
  void (*activate)(Gate gate, size_t size, float *x);  // x = gate(x)
  // x = positive x² + beta x above 0, else negative (exp(min(x, eps)) − 1 − x) + beta x; numbers: {positive, negative,
  // beta, eps}
  void (*xielu)(const float *numbers, size_t size, float *x);
  void (*add_row)(const float *x, size_t size, float *out);
  void (*add_scaled)(float scale, const float *x, size_t size, float *out);  // out += scale x
  // rows[k] += Σ_j factors[k * count + j] rows[j], with all rows as they were before, at most kMostStreams
  void (*mix_rows)(const float *factors, int count, float *const *rows, size_t size);
  float (*dot)(const float *a, const float *b, int size);  // Σ a b; Σ a if b is null
  void (*softcap)(float cap, size_t size, float *x);

  // Recurrent layers.
  void (*convolve)(const Convolution &convolution);
  void (*scan_state)(const StateScan &scan);
  void (*scan_selective)(const SelectiveScan &scan);
  void (*scan_gated)(const GatedScan &scan);
  // out = exp(−rates softplus(x)), with x = steps + bias; exp(least_log sigmoid(rates x)) if least_log is not 0. `size`
  // is a multiple of kRowPadding.
  void (*channel_decays)(const float *steps, const float *bias, const float *rates, float least_log, size_t size,
                         float *out);
  // RMSNorm of `parts` consecutive parts of `size` floats; their weights are weight_stride apart, 0 if they are the
  // same.
  void (*norm_parts)(const float *x, const float *weight, size_t weight_stride, int parts, int size, float eps,
                     float *out);

  // Attention.
  void (*make_head)(const Head &head, float *out);
  void (*store_kv)(const KVLayer &kv, int64_t slot, int head, const float *k, const float *v, void *scratch);
  size_t (*attention_scratch_bytes)(const AttentionConfig &config);
  int (*attention_queries)(const AttentionConfig &config);  // largest number of queries in a tile
  void (*attend)(const KVLayer &kv, const AttentionConfig &config, const AttentionTile &tile, void *scratch);
  // Merges the partial results of `num_splits` consecutive splits, `split_stride` floats apart from tile.partial on, in
  // order, into tile.out. The partial results are overwritten.
  void (*merge_splits)(const AttentionConfig &config, const AttentionTile &tile, int num_splits, size_t split_stride);
  // The scores of an indexer: scores[i][key] = Σ_h weights[i][h] max(q_ih · key, 0) for the queries i and the keys of a
  // tile, whose key_begin is a multiple of kChunk. Numbers are written up to the next multiple of kChunk.
  void (*index_scores)(const KVLayer &kv, const AttentionConfig &config, const AttentionTile &tile,
                       const float *weights, size_t weight_stride, float *scores, size_t score_stride, void *scratch);

  // Sampling: see sampler.cpp. `scratch` has `sample_scratch_bytes`.
  size_t (*sample_scratch_bytes)(int vocab_size);
  // The maximum of each block [block_begin, block_end) of a row; NaN of a block that has one.
  void (*logit_maxima)(const float *logits, int vocab_size, int block_begin, int block_end, float *maxima);
  // Returns the first token with the largest logit of a row; -1 if it has no token to draw. Needs no scratch memory.
  int32_t (*greedy_token)(const float *logits, int vocab_size);
  // Reads a row before the two functions that follow, which may read `maxima` too: those of all its blocks; null if
  // they are not known. Has it a token to draw? Only then can it be drawn from.
  bool (*scan_row)(const float *logits, const float *maxima, int vocab_size, const SamplingRow &row, bool logprobs,
                   void *scratch);
  int32_t (*sample_row)(const SamplingRow &row, void *scratch);
  void (*row_logprobs)(int32_t token, int count, int32_t *ids, double *logprobs, int32_t *ranks, void *scratch);
  bool (*copy_logits)(const float *logits, int vocab_size, float *out);

  // Peak rates. Each runs `repeats` rounds of a fixed amount of work and returns the operations done, or the bytes
  // read.
  double (*peak_f32)(int64_t repeats);
  double (*peak_bf16)(int64_t repeats);
  double (*peak_i8)(int64_t repeats);
  size_t (*read_memory)(const uint8_t *data, size_t bytes);
};

}  // namespace foreword::kernels
