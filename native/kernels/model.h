// A decoder: its packed weights, KV cache and threads. It is described by sizes and kinds of layers, never by a model's
// name.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kv_cache.h"
#include "kernels/isa.h"
#include "kernels/memory.h"
#include "kernels/thread_pool.h"

namespace foreword::kernels {

using KindSet = std::array<bool, kNumActivationKinds>;

// Matrices with one input. Their outputs are side by side in a row, each from a multiple of kRowPadding on.
struct Linear {
  struct Part {
    const PackedMatrix *matrix;  // [teams]: the matrix as each team of threads has it
    int offset;                  // the place of its first output in the row
  };
  std::vector<Part> parts;
  int cols = 0;
  int stride = 0;  // floats of an output row

  // Adds the kinds of input that the matrices take.
  void add_kinds(KindSet &kinds) const {
    for (const Part &part : parts) kinds[size_t(part.matrix->activations)] = true;
  }
};

// See screen.h. linear: without parts if there is none. errors: [num_panels * panel_width]. most: the most that a logit
// can be per unit of reach. saves_reads: it has at most two thirds of the
// bytes of the output projection.
struct Screen {
  Linear linear;
  const float *errors = nullptr;
  float most = 0.f;
  bool saves_reads = false;
};

using Vector = const float *;  // padded with zeros to padded_row(size); null if the layer has none

struct LowRank;

// RMSNorm, or LayerNorm, which alone may have a bias. Without a weight there is no norm. scale: of its result, where
// that is added to the residual stream. kept: it is added to `keep` times the stream after the norm with this weight,
// and with kept_bias.
// gate: PassContext::norm_rows multiplies the result y by sigmoid(silu(y lowᵀ) highᵀ); null: by nothing.
struct Norm {
  Vector weight = nullptr, bias = nullptr;
  float scale = 1.f;
  Vector kept = nullptr, kept_bias = nullptr;
  float keep = 1.f;
  bool is_aside = false;  // the product before it stays in PassContext::branch, and is not added to x
  const LowRank *gate = nullptr;
  // If given, x becomes kept_scales x + scales branch + offsets.
  Vector scales = nullptr, offsets = nullptr, kept_scales = nullptr;

  explicit operator bool() const { return weight != nullptr; }
};

// A sum of products of low rank: each part of `low` is the input of the matrices of one of `high`, whose outputs are
// in the places of those that they are added to. low without parts: there is none.
struct LowRank {
  Linear low;
  std::vector<Linear> high;
};

// gate: without parts if there is none.
struct Mlp {
  Linear gate, up, down;
  Linear both;         // gate and up, if the gate has a cutoff, which is known of whole rows alone, or `added`
  LowRank added;       // to `both`
  float cutoff = 0.f;  // the gate is act(max(g − mean − cutoff · deviation, 0))
  float limit = 0.f;   // the gate is silu(min(g, limit)), and up is within ±limit; 0: none
  Vector gate_bias = nullptr, up_bias = nullptr, down_bias = nullptr;
  Vector inner_norm = nullptr;  // RMSNorm of the input of `down`
  Vector xielu = nullptr;       // the numbers of the activation xIELU, in place of that of the model; see Isa

  const Linear &first() const { return gate.parts.empty() ? up : gate; }
};

// The MLP of a router: RouterSpec. carry: null if it carries nothing.
struct RouterMlp {
  Linear in, first, second;
  Vector in_bias = nullptr, first_bias = nullptr, second_bias = nullptr, norm = nullptr, carry = nullptr;
};

constexpr int kMostExperts = 1 << 10;  // per layer

struct Moe {
  Linear router, shared_gate;
  std::unique_ptr<RouterMlp> router_mlp;  // before `router`
  std::vector<Mlp> experts;
  std::unique_ptr<Mlp> shared;
  int experts_per_token = 0;
  bool norm_topk = true, sigmoid = false;  // sigmoid: of scores, in place of softmax
  float softcap = 0.f;                     // caps the scores; 0: none
  float sparse_mix = -1.f;                 // see MoeSpec; below 0: none
  int num_groups = 1, groups_per_token = 1;
  bool zeroes_groups = false;   // the experts of other groups are chosen by 0
  int identities = 0;           // experts behind the others whose output is their input
  int empties = 0;              // experts behind those whose output is 0
  bool ranks_outputs = false;   // experts are chosen by the outputs of the router, not by probabilities
  float scale = 1.f, sum_eps = 0.f;  // sum_eps: added to the sum that norm_topk divides by
  Vector scores_bias = nullptr;  // added to the router's scores
  Vector router_bias = nullptr;  // added to what experts are chosen by, for the choice alone
  bool scales_inputs = false;    // probabilities multiply the inputs of experts, not their outputs
  Linear latent_in, latent_out;  // before and after the experts; without parts: these take and give hidden numbers

  // If the router, the experts and the shared expert have norms of their own. router_norm: ones, as the router's matrix
  // has the scale of its inputs. expert_scales: of probabilities.
  Norm router_norm, experts_norm, post_experts_norm, post_shared_norm;
  Vector expert_scales = nullptr;

  const Mlp &expert() const { return experts[0]; }
  int num_choices() const { return int(experts.size()) + identities + empties; }
  // The product of a router that reads the input of the layer.
  const Linear &first_router() const { return router_mlp ? router_mlp->in : router; }
  // Returns whether the experts read other numbers than the router, so that their sum is not the output either.
  bool has_own_inputs() const { return experts_norm || !latent_in.parts.empty(); }
  // Returns whether the input of the router is read again after it was prepared for products.
  bool reads_again() const { return has_own_inputs() || scales_inputs || identities > 0; }
  // The inputs and outputs of an expert.
  int outer() const { return expert().first().cols; }
};

// The parts of a recurrent layer, in place of attention; rate = exp(a_log). conv: [conv_kernel, channel_stride].
// is_normed_first: norm(y) silu(z) of mamba2, in place of norm(y silu(z)). least_step: of dt. z_scale: of z.
// write_scale: of the factor of what gated_delta writes. least_log: of its decays, see RecurrentSpec; 0: they have
// none. sigmoid_gate: sigmoid(z) in place of silu(z). joint_norm: the norm of mamba2 is over all heads. norm_eps: of
// norm. inner: the products dt_low, k and q of mamba1, with norms of theirs or without. step, gate: the second products
// of dt and of z, if they have two. gates: of each block of rg_lru, the products of write and, behind them, of forget;
// rate is 8 softplus(a) there; of each head of q and of k of mixed_qkv, the second convolution, [value_dim,
// heads_kernel · value_dim], with gates_bias in the places of q and k. late_bias: of the values of the token before.
struct Recurrent {
  Vector conv = nullptr, conv_bias = nullptr, dt_bias = nullptr, rate = nullptr, skip = nullptr, norm = nullptr;
  bool is_normed_first = false;
  float least_step = 0.f, z_scale = 1.f, write_scale = 1.f, least_log = 0.f, norm_eps = 0.f;
  bool sigmoid_gate = false, joint_norm = false;
  Linear inner, step, gate;
  std::vector<Linear> gates;
  Vector write_bias = nullptr, forget_bias = nullptr, gates_bias = nullptr, late_bias = nullptr;
  Vector inner_norms[3] = {};
  float inner_eps = 0.f;
};

// The indexer of a layer: IndexerSpec. Its keys and the weights of its heads are further parts of the first product.
struct Indexer {
  Linear q;  // its input is that of Latent::q_b
  Vector norm = nullptr, norm_bias = nullptr;
};

// Latent attention: MlaSpec. Its first product has q (or q_a) and kv_a; q_b without parts: q needs no second product.
// With joins_latents q_b may have a second part, the gates. k_b, v_b: of each head, [kv_rank, nope_dim] and [value_dim,
// kv_rank].
struct Latent {
  Linear q_b;
  Vector q_norm = nullptr, kv_norm = nullptr;
  std::vector<Linear> k_b, v_b;
  std::unique_ptr<Indexer> indexer;  // without one in a model that has some: it takes what the last one chose
};

// Growth of queries with their position p: they are multiplied by 1 + scale ln(1 + ⌊(p + offset) / interval⌋).
struct QueryGrowth {
  int64_t interval = 0;  // 0: they do not
  float scale = 0.f;
  int64_t offset = 1;

  float at(int64_t position) const {
    return interval ? 1.f + scale * std::log1p(float((position + offset) / interval)) : 1.f;
  }
};

// The use of a layer's separate inputs: x += norm((act(x gateᵀ) * inputs) outᵀ). gate without parts: it has none.
struct PerLayer {
  Linear gate, out;
  Norm norm;
};

// The update of the streams by a layer, see StreamsSpec. Matrices are rows of floats, one after the other.
struct StreamUpdate {
  Norm norm, laurel_norm;
  Vector router = nullptr, predict = nullptr, correct = nullptr;  // [K, hidden], [K, K, K], [K, K]
  Vector scale = nullptr;  // that of the first stream, where the layer's own inputs are made; null: none
  Linear laurel_left, laurel_right;
};

// The matrix of a sum of streams, its base and scales, see ConnectionsSpec: parts · K rows of K · hidden floats, one
// after the other. parts: 1 after the last layer, where nothing is added to the streams, else 2.
struct Mix {
  int parts = 0;
  Vector matrix = nullptr, base = nullptr, scale = nullptr;
};

// aside: the last product of a layer whose output is not added to x, see AsideSpec; without parts: it is added.
// follows_aside: the layer before is such a layer.
// qkv without parts: the layer has neither attention nor a state; neither mlp nor moe: it has none of both. late_moe:
// experts beside the mlp, with its input; their output is added after the mlp of the following layer.
// beside: the input of its first product is that of the layer before, which has neither mlp nor moe.
// stream: it is the first of a run of layers, whose output is this one of two streams, see LayerSpec; −1: it is not.
// last_stream: that of the run before; the first layer of the model has stream_begin instead.
struct Layer {
  Norm attn_norm, mlp_norm, post_attn_norm, post_mlp_norm;
  Vector q_norm = nullptr, k_norm = nullptr;  // for a head, or for all heads together: joint_qk_norm
  bool centred_qk = false;    // q_norm and k_norm are LayerNorm, with padded_dim weights for each head
  Vector q_norm_bias = nullptr, k_norm_bias = nullptr;
  Vector v_norm = nullptr;                    // for a head
  float qk_eps = 0.f;                         // that of q_norm and k_norm
  Vector q_bias = nullptr, k_bias = nullptr, v_bias = nullptr, o_bias = nullptr;
  Vector inner_norm = nullptr;                // RMSNorm of the input of `o`, of attention
  Vector q_scales = nullptr, k_scales = nullptr;  // for all heads, after the rotary embedding
  Vector sinks = nullptr;  // for all heads
  Vector slopes = nullptr;  // for all heads: see AttentionConfig
  Linear qkv, o;  // in a recurrent layer: all projections of its input, and the output projection
  LowRank added;  // to qkv
  std::unique_ptr<LowRank> attn_norm_gate, mlp_norm_gate;
  Linear aside;
  bool follows_aside = false;
  int stream = -1, last_stream = -1;
  Vector stream_begin = nullptr;
  Vector input_bias = nullptr;  // added to a row of qkv, of all tokens at once
  bool takes_qkv = false;  // qkv is that of the layer before, which makes queries, keys and values of it
  bool gated = false;  // qkv, or Latent::q_b, has one part more, the gates of the attention's output
  bool writes = true;  // qkv has keys; otherwise the layer reads those that another one wrote to its group and slot
  int v_part = 2;      // the part of qkv with values, or keys if these are the values too
  int heads = 0;       // index of the shape of its heads
  PerLayer per_layer;
  float scale = 1.f;   // a factor of the layer's output
  std::unique_ptr<StreamUpdate> streams;
  Mix attn_mix, mlp_mix;
  std::unique_ptr<Recurrent> recurrent;  // in place of attention
  std::unique_ptr<Latent> latent;        // for latent attention
  std::unique_ptr<Mlp> mlp;
  std::unique_ptr<Moe> moe, late_moe;
  int rope = -1;  // index of its rotary embedding; −1: none
  int64_t sliding_window = 0;
  bool chunked = false;  // a query at p sees keys from p − p mod sliding_window on
  bool skips_spans = false;  // a query in a span sees no later keys either; equal in all layers of a KV group
  bool beside = false;
  bool parallel_mlp = false;  // its MLP reads the input of its first product, or mlp_norm of the same rows
  QueryGrowth query_growth;
  int group = 0, slot = 0;

  bool is_aside() const { return !aside.parts.empty(); }
  bool has_attention() const { return !qkv.parts.empty() && !recurrent; }
};

struct Rope {
  std::vector<double> inv_freq;
  double scale;
  std::vector<int> axes;  // by pair, the axis of the position that rotates it; empty: one axis

  // The cosine and sine of each pair. position(j): what pair j is rotated by.
  template <class F>
  void angles(F &&position, float *cosines, float *sines) const {
    for (size_t j = 0; j < inv_freq.size(); ++j) {
      const double angle = double(position(j)) * inv_freq[j];
      cosines[j] = float(std::cos(angle) * scale);
      sines[j] = float(std::sin(angle) * scale);
    }
  }
};

// The inputs that layers have of their own, see PerLayerSpec. size 0: they have none.
struct PerLayerConfig {
  int size = 0;
  float norm_eps = 0.f, embedding_scale = 0.f, scale = 0.f;
  SourceMatrix embedding{};
  Linear in;
  Vector norm = nullptr;
};

// Before the first and after the last layer. num_streams 1: x alone.
struct StreamsConfig {
  int num_streams = 1;
  Linear into;              // for all streams but the first, side by side
  std::vector<Linear> out;  // one for each of them
};

// num_streams 0: the model has no hyper-connections.
struct ConnectionsConfig {
  int num_streams = 0;
  float magnitude = 0.f, eps = 0.f;
  Mix out;  // after the last layer
};

// kv_rank 0: the model has no latent attention.
struct LatentConfig {
  int q_rank = 0, kv_rank = 0, nope_dim = 0, rope_dim = 0, value_dim = 0;
  bool joins_latents = false;
  float norm_eps = 0.f;

  int query_dim() const { return rope_dim + nope_dim; }
  int query_inputs() const { return joins_latents ? 2 * q_rank : q_rank; }
};

// topk 0: the model has no indexer.
struct IndexConfig {
  int num_heads = 0, head_dim = 0, topk = 0;
  float norm_eps = 0.f;
};

struct ModelConfig {
  int hidden_size, num_heads, num_kv_heads, head_dim, vocab_size, num_groups;
  float norm_eps, query_scale, embedding_scale;
  Gate activation;
  float attn_softcap, final_softcap;  // 0: none
  float gate_scale = 1.f, logit_scale = 1.f;  // gate_scale: of the input of `activation` in a gated MLP
  bool joint_qk_norm = false, layer_norm = false;
  bool head_gates = false;  // a gate of attention is one number per head
  bool softplus_gates = false;  // it is the softplus of its product, in place of the sigmoid
  bool rounds_inputs = false;  // inputs of the products of layers are rounded to 8 bits, with a scale per token
  float gate_alpha = 0.f, gate_limit = 0.f;  // for a clamped gate in place of `activation`; limit 0: none
  LatentConfig latent = {};
  IndexConfig index = {};
  float clip_qkv = 0.f;  // the largest magnitude of queries, keys and values after joint norms; 0: none
};

// The input of a product in each kind that some matrix takes.
struct ActivationSet {
  Activations kinds[kNumActivationKinds];
  KindSet used{};

  const Activations &of(const PackedMatrix &matrix) const { return kinds[size_t(matrix.activations)]; }
  // Row r of `rows` becomes the prepared row from_rows[r] of as many inputs, in the kinds that both have.
  void copy_rows(const ActivationSet &from, const int *from_rows, Share rows) const;
};

// `exact`: integer weights take 15-bit activations.
ActivationKind activation_kind(Format format, bool exact, const Isa &isa);

// Memory for activations, reusable for any shape up to the reserved one.
class ActivationBuffer {
 public:
  void reserve(int rows, int cols, const KindSet &kinds);
  // `rows` rows of `cols` inputs laid out in the memory.
  ActivationSet view(int rows, int cols) const;

 private:
  Buffer<uint8_t> memory_[kNumActivationKinds];
  KindSet used_{};
};

// An adapter: the change of each matrix, by its index.
struct LoraAdapter {
  std::vector<LoraPair> pairs;
  int num_vectors = 0;       // vectors of ranks, the most of a pair
  bool takes_bytes = false;  // a pair has 8 bit; pairs of floats take what their matrix does
  bool changes_experts = false;
  std::map<Vector, std::vector<float>> vectors;  // the changes of small matrices, which the model has as vectors
  Mapping memory;

  const LoraPair &pair_of(const PackedMatrix &matrix) const { return pairs[size_t(matrix.index)]; }
  // The change of a vector; null: none.
  Vector change_of(Vector vector) const {
    const auto found = vectors.find(vector);
    return found == vectors.end() ? nullptr : found->second.data();
  }
};

class Model {
 public:
  Model(const ModelConfig &config, const KVConfig &kv, const Isa &isa, int num_threads,
        CpuGroups groups = {});

  // Packing copies `source`. `set_embedding` does not: its rows are read in every step.
  // Every team packs its share of the panels into memory of its own, which so is near its processors. The result,
  // [teams], has that share's addresses in each entry.
  const PackedMatrix *pack(const SourceMatrix &source, Format format, bool exact);
  // Adds a matrix whose panels were packed before, by this instruction set, and stay where they are: `bytes` from
  // `panels` on, aligned to 64. They are only read. Throws std::invalid_argument if they are not as many as it has, or
  // with several teams of threads.
  const PackedMatrix *attach(const uint8_t *panels, size_t bytes, int rows, int cols, Format format, bool exact);
  // Adds a matrix again, with the same panels: the adapters of one change nothing of the other.
  const PackedMatrix *again(const PackedMatrix *matrix);
  // The processor that each panel of a matrix was packed on; −1 where the system does not tell.
  const std::vector<int> &packed_on(const PackedMatrix &matrix) const { return packed_on_[size_t(matrix.index)]; }
  Vector copy_vector(const float *data, int size);
  // Packs the screen of lm_head, which is complete; none if a weight is not finite.
  void make_screen();
  // Takes a screen that was packed before.
  void set_screen(const PackedMatrix *matrix, const float *errors, float most);
  bool has_screen() const { return !screen.linear.parts.empty(); }
  // The matrices have the same number of inputs.
  Linear make_linear(const std::vector<const PackedMatrix *> &matrices);
  void set_embedding(const SourceMatrix &source) { embedding = source; }

  // Makes the system provide the memory of the whole cache now, near the processors of the team that uses it.
  void touch_cache();

  // `sources`: matrix and its change. Returns the bytes of the adapter.
  size_t add_lora(int id, const std::vector<std::pair<const PackedMatrix *, LoraSource>> &sources,
                  std::map<Vector, std::vector<float>> vectors);

  size_t packed_bytes() const;
  // Inputs of the widest packed matrix, padded.
  int widest_input() const { return widest_input_; }
  // Pairs of dimensions that a layer rotates, at most.
  int most_rotary_pairs() const;
  // Floats of the longest row of the first product of attention layers, or of recurrent ones; 0 without such layers.
  int qkv_stride(bool of_recurrent) const;

  const ModelConfig config;
  const RecurrentConfig recurrent;
  const Isa &isa;
  ThreadPool pool;
  KVCache kv;
  SourceMatrix embedding{};
  SourceMatrix positions{};  // a row for each position; without data: none
  PerLayerConfig per_layer;
  StreamsConfig streams;
  ConnectionsConfig connections;
  Vector embed_scale = nullptr, embed_offset = nullptr;  // the input of the first layer is embed_scale x + embed_offset
  Norm embed_norm, final_norm, logits_norm;  // the last one times logit_scale; it is that of `head`, if there is one
  Linear head;  // logits are of norm(act(norm(x) headᵀ)); without parts: of norm(x)
  Vector logits_bias = nullptr;  // models that have it have no screen
  Linear lm_head;
  Screen screen;
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
  int num_axes = 0;  // axes of rotary positions; 0: they have one for all pairs
  std::map<int, LoraAdapter> loras;  // by id
  int padded_dim;  // that of the first of `heads`
  std::vector<HeadShape> heads;  // those of the model, then others that some layers have
  const HeadShape &heads_of(const Layer &layer) const { return heads[size_t(layer.heads)]; }

  template <class F>
  void for_each_moe(F &&f) const {
    for (const Layer &layer : layers) {
      for (const Moe *moe : {layer.moe.get(), layer.late_moe.get()}) {
        if (moe) f(*moe);
      }
    }
  }

 private:
  // A matrix for each team, without panels.
  std::unique_ptr<PackedMatrix[]> lay_out(int rows, int cols, Format format, bool exact);
  template <class F>
  void for_panels(const PackedMatrix *views, F &&f);
  // Adds a matrix of these rows, columns and format. pack(view, group, panel, scratch) writes a panel of it.
  template <class F>
  const PackedMatrix *add_matrix(int rows, int cols, Format format, bool exact, F &&pack);

  std::vector<Arena> arenas_;  // [teams]
  size_t attached_bytes_ = 0;
  int widest_input_ = 0;
  std::vector<std::unique_ptr<PackedMatrix[]>> matrices_;  // [teams] each
  std::vector<std::vector<int>> packed_on_;                // by matrix, [panels]
};

}  // namespace foreword::kernels
