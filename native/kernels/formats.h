// The data shared by the driver (compiled once) and the kernels (compiled once per instruction set). Functions here
// must be always_inline: the linker keeps one copy of any other, possibly compiled for an instruction set that the
// machine lacks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/parameters.h"

namespace foreword::kernels {

// ---------------------------------------------------------------------------------------------- weights

// The number format of a packed matrix. A block is 32 consecutive inputs of one output.
enum class Format : uint8_t {
  f32,
  bf16,
  i8,       // 8 bit, one scale per output, of rotated weights; activations are integers (all formats from here on)
  q4,       // 4 bit, w = d (q - 8) per block
  q4_min,   // 4 bit, w = d q + m per block
  q8,       // 8 bit, w = d q per block
  q8_min,   // 8 bit, w = d q + m per block
  q8_half,  // 8 bit, w = d q per half block of 16
  fp4,      // 4 bit, w = d table_of(fp4)[q] per block; so are all formats from here on
  iq4,
  iq3_s,
  iq3_xxs,
  iq2_xxs,
  iq1_s,
};

// The number format of the activations of a product.
enum class ActivationKind : uint8_t {
  f32,
  bf16,
  i8,          // 8 bit, one scale per block
  i15,         // 15 bit in two 8-bit planes, q = 128 high + low, one scale per row: the tokens of a float computation,
               // for two 8-bit dot products; where kWords, in 16 bits
  i8_rotated,  // 8 bit, one scale per row, for weights of Format::i8; rotation.h
};
constexpr int kNumActivationKinds = 5;

constexpr int kBlock = 32;  // inputs that share a scale

// The formats of weights in files: floats, and block formats that are packed without conversion to floats: those of
// GGUF files, and 16 or 32 values in 8 bit after their d in float32.
enum class Source : uint8_t { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, mxfp4, iq4_nl, iq4_xs,
                              int8_16, int8_32 };

// A weight matrix [rows, cols] (outputs, inputs) packed in panels of `panel_width` outputs, one panel after the other,
// so that a product reads memory once and in order. N = panel_width, K = padded_cols (a multiple of kBlock), bias =
// kDotBias of the instruction set: 128, or 0 where its 8-bit dot product takes signed weights:
//
//   f32      [K][N] float
//   bf16     [K/2][N][2] bf16                      a pair of inputs of one bf16 dot instruction
//   i8       [N] float scale, [K/4][N][4] u8       q + bias; a quad of inputs of one 8-bit dot instruction
//   q8       K/32 times { [N] f16 d,          [8][N][4] u8 }     q + bias
//   q8_min   K/32 times { [N] f16 d, [N] f16 m, [8][N][4] u8 }   q + bias
//   q8_half  K/32 times { [2][N] f16 d,       [8][N][4] u8 }     q + bias
//   q4, fp4, …    K/32 times { [N] f16 d,     [4][N][4] u8 }     low nibble: quad j, high nibble: quad j + 4
//   q4_min   K/32 times { [N] f16 d, [N] f16 m, [4][N][4] u8 }
struct PackedMatrix {
  Format format;
  ActivationKind activations;  // the form of the other factor
  int rows, cols, padded_cols;
  int num_panels;
  int index;  // among the matrices of its model
  size_t panel_bytes;
  uint8_t *panels;  // 64-byte aligned

  __attribute__((always_inline)) const uint8_t *panel(int index) const { return panels + size_t(index) * panel_bytes; }
};

// A matrix in the format of a file: row r starts at data + r * row_bytes.
struct SourceMatrix {
  Source source;
  int rows, cols;
  size_t row_bytes;
  const uint8_t *data;
};

// The number format of an adapter's factors: floats, or 8 bit with one scale per rank, where A is of rotated inputs.
enum class LoraFormat : uint8_t { f32, i8 };

__attribute__((always_inline)) inline constexpr ActivationKind lora_input(LoraFormat format) {
  return format == LoraFormat::f32 ? ActivationKind::f32 : ActivationKind::i8_rotated;
}

// The change of a matrix [rows, cols] by an adapter: scale * (x Aᵀ) Bᵀ. The factors of a rank are each multiplied by a
// number that the rank's scale takes back. G inputs of an output are adjacent: 4 in i8, else 1. R = padded_rank,
// L = the lanes of a vector, N = panel_width; the padding is zeros:
//
//   a  R / L times { [L] float scale, [padded_cols/G][L][G] }     b  num_panels times { [R/G][N][G] }
struct LoraPair {
  LoraFormat format;
  int padded_rank;  // 0: the matrix is not changed
  int padded_cols, num_vectors;  // num_vectors is ceil(R / L)
  size_t vector_bytes, panel_bytes;  // sizes of a vector of ranks of `a`, and of a panel of `b`
  const uint8_t *a, *b;  // 64-byte aligned

  __attribute__((always_inline)) const uint8_t *vector(int index) const { return a + size_t(index) * vector_bytes; }
  __attribute__((always_inline)) const uint8_t *panel(int index) const { return b + size_t(index) * panel_bytes; }
};

// The factors of an adapter in rows: a [rank, cols], b [rows, rank].
struct LoraSource {
  const float *a, *b;
  int rank, rows, cols;
  float scale;
};

constexpr size_t kLoraAhead = 4096;  // bytes between the factors in use and those that are prefetched
constexpr int kMaxLoraRank = 256;  // a multiple of the lanes of every instruction set

// scale * x Aᵀ of a token, as the input of the product with Bᵀ. In i8 the numbers are 8 bit, and each vector of
// ranks has a scale and a start of its sums: −bias Σ q.
struct LoraRow {
  alignas(64) uint8_t numbers[kMaxLoraRank * sizeof(float)];
  float scale[kMaxLoraRank / 4];
  int32_t start[kMaxLoraRank / 4];
};

// ---------------------------------------------------------------------------------------------- activations

// Scale and sums of 32 activations of one row (i8_rotated: of the whole row) as integers, x ≈ scale * q. Integer
// accumulators start at the negated sums, to cancel the bias of the stored weights: Σ (w + bias) q − bias Σ q = Σ w q.
struct ActivationBlock {
  float scale;
  float sum;                 // multiplies the m of a block: scale * Σ q, or Σ q where the scale is the row's
  int32_t neg8_sum;          // −8 Σ q
  int32_t neg_bias_sum;      // −bias Σ q
  int32_t neg_bias_half[2];  // −bias Σ q of each half
  int32_t unused[2];
};

constexpr int kPieceBytes = 256;

// The input of a product, rows × padded_cols, divided into pieces of 256 bytes of a row: first the first pieces of all
// rows, then all second pieces, …. So rows of a tile are a constant distance apart.
struct Activations {
  ActivationKind kind;
  int padded_cols;
  size_t piece_stride;  // bytes from a row's piece to its next
  size_t block_stride;  // ActivationBlocks from a row's block to its next; blocks of consecutive rows are adjacent
  uint8_t *data;        // a piece is 64 floats, 128 bf16, 256 bytes, or for i15 128 bytes of each plane, high first
  ActivationBlock *blocks;  // the integer kinds
};

constexpr int kRowsPastEnd = 15;  // after the last piece: products may read them, whatever they contain

enum class Store : uint8_t { assign, add };

// out[r, n] (=, +=) Σ_k a[r, k] w[n, k]: rows [row_begin, row_end), the outputs of panels [panel_begin, panel_end).
struct MatrixProduct {
  const PackedMatrix &w;
  const Activations &a;
  int row_begin, row_end, panel_begin, panel_end;
  float *out;  // the address of row 0, output 0, in memory for whole panels
  size_t out_stride;
  Store store;
  const uint8_t *next;  // the weights that this thread reads after these, prefetched during the last panels, or null
  void *scratch;        // linear_scratch_bytes large

  __attribute__((always_inline)) int num_rows() const { return row_end - row_begin; }
  // The panel that is read at `index`: after the last one, the next weights.
  __attribute__((always_inline)) const uint8_t *panel_ahead(int index) const {
    return index < panel_end ? w.panel(index) : next;
  }
  // Returns the first output of a panel of `width`.
  __attribute__((always_inline)) float *panel_out(int index, int width) const {
    return out + size_t(row_begin) * out_stride + size_t(index) * size_t(width);
  }
};

// The weights of formats whose 4 bits are places in a table. Those of MXFP4 are times 2, of IQ1_S times 8.
constexpr int8_t kTables[][16] = {
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15},
    {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62},
    {8, 25, 43, -8, -25, -43},
    {1, 7, 9, -1, -7, -9},
};
constexpr int kNumTables = sizeof kTables / sizeof kTables[0];
__attribute__((always_inline)) inline constexpr bool has_table(Format f) { return f >= Format::fp4; }
__attribute__((always_inline)) inline constexpr const int8_t *table_of(Format f) {
  return kTables[int(f) - int(Format::fp4)];
}

enum class Gate : uint8_t { silu, gelu_tanh, gelu, relu, relu2, sigmoid };

// ---------------------------------------------------------------------------------------------- KV cache

enum class KVFormat : uint8_t { f32, bf16, i8 };

constexpr int kTile = 16;         // keys of a tile
constexpr int kChunk = 64;        // keys of one step of the online softmax; chunks start at multiples of it
constexpr int kSplit = 512;       // keys of one independent softmax; splits start at multiples of it, merged in order
constexpr int kChunkTiles = kChunk / kTile;
constexpr int kStateExtra = 16;   // floats of a row of a partial result after its padded_value: m, l and padding

// The layout of the keys and values of one layer. For a KV head of a block, with D = padded_dim of K, and with
// D = padded_value of V:
//
//   block_size a multiple of 16: tiles of 16 keys, each [K tile][V tile]
//       K  f32 [D][16]     bf16 [D/2][16][2]   i8 [D/4][16][4] u8 (q + bias), [16] float scale
//       V  f32 [16][D]     bf16 [8][D][2]      i8 [4][D][4] s8, [16] float scale
//       (keys in i8 are scaled, like the queries, and rotated: rotation.h)
//   any other block_size: token after token, each K then V: D elements (and a float scale in i8);
//       attention copies 64 of them at a time into tiles.
//   keys that are the values too (parts = 1): K alone; attention makes V of it, 64 keys at a time.
struct KVLayer {
  KVFormat format;
  bool tiled;
  int parts;  // 2: K and V
  int block_size, num_kv_heads, padded_dim, padded_value;
  size_t tile_bytes, both_tiles_bytes;  // bytes of a K tile; those with the V tile behind it, if there is one
  size_t token_bytes, both_bytes;       // bytes of K of one token, and those with V (layouts that are not tiled)
  size_t head_stride, block_stride;
  uint8_t *base;
};

// ---------------------------------------------------------------------------------------------- attention

constexpr float kLog2E = 1.44269504088896341f;  // in the scales of attention: its softmax computes powers of 2

struct AttentionConfig {
  int num_heads, num_kv_heads, padded_dim;
  int value_dim, padded_value;
  float softcap;           // 0: none; of scores times log2 e, like the queries
  int64_t sliding_window;  // 0: none
  bool chunked = false;    // a query at p sees keys from p − p mod sliding_window on
  bool rotated_values = false;  // the values are keys in i8
  int first_value = 0;  // outputs of a head before it may have any value
  const float *sinks = nullptr;  // [num_heads], a further score of each softmax, without a value; null: none
  // [num_heads], times log2 e: the score of a key falls by so much for each position before the query; null: none. Then
  // there is no softcap.
  const float *slopes = nullptr;
  // What is added to scores, times log2 e, by the distance of the key from the query: points to that of 0, with others
  // on both sides up to the end of a chunk of keys. Each head is `bias_stride` after the one before; null: nothing.
  const float *biases = nullptr;
  size_t bias_stride = 0;
};

// cos and sin of `pairs` angles of one token, times the scale of the rope.
struct RotaryRow {
  const float *cosines = nullptr, *sines = nullptr;
  int pairs = 0;  // 0: not rotated
};

// A query, key or value of `dim` numbers: factor * scales * rotate(norm(from + bias)). The norm is RMSNorm, or
// LayerNorm if `centred`, whose weight and bias are padded with zeros to whole vectors.
struct Head {
  int dim;
  const float *from, *bias, *norm, *scales;  // [dim]; the last three may be null
  float norm_eps;
  RotaryRow rotary;
  float factor;
  bool centred = false;
  const float *norm_bias = nullptr;
};

// The keys of a tile.
struct AttentionKeys {
  const int32_t *block_table;
  int kv_head;
  int64_t key_begin, key_end;
};

// Queries of one request against one KV head: rows are (query, head of the group).
struct AttentionTile {
  int num_queries;
  int64_t first_position;  // that of the first query
  int kv_head;
  const float *queries;  // [num_heads][padded_dim] floats per query, scaled so that scores are exponents of 2
  size_t query_stride;   // floats from query to query
  const int32_t *block_table;
  int64_t key_begin, key_end;  // the keys of this call; a split after the first begins at a multiple of kSplit
  float *out;                  // from the first query on: [num_heads * value_dim]
  size_t out_stride;
  float *partial;      // if not null, rows [O[padded_value], m, l, …] are written here instead of `out`
  AttentionKeys next;  // the keys this thread probably reads next, to be prefetched; block_table null: unknown
  // The positions of the keys that are counted by key_begin, key_end and first_position, upwards; null: they are these
  // numbers themselves.
  const int32_t *chosen = nullptr;
  int64_t query_position = 0;  // that of the first query, from which the distances of `biases` are
};

constexpr int kLogitBlock = 256;  // logits whose maximum bounds the searches of a sampled row
constexpr int num_logit_blocks(int vocab_size) { return (vocab_size + kLogitBlock - 1) / kLogitBlock; }

// The known properties of rows of logits [L, vocab_size]; null if they are not known.
struct KnownLogits {
  const float *maxima = nullptr;           // by block, [L, num_logit_blocks(vocab_size)]
  const int32_t *greedy_tokens = nullptr;  // [L]: the token with the largest logit of a row without logits, else −1
};

// The parameters of one draw; see sampler.cpp.
struct SamplingRow : Parameters {
  int64_t position;
};

}  // namespace foreword::kernels
