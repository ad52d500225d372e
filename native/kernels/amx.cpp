// The level avx512_amx: avx512_bf16 with tiles of AMX for products of bf16 and of 8 bit per channel, for block formats
// (amx_blocks.h), and for attention (amx_attention.h). A panel of packed weights is two columns of tiles as it is, and
// the pieces of activations are rows of tiles:
//
//                       B0  B1       outputs 0 … 15 and 16 … 31 of a panel
//   rows  0 … 15   A0   C00 C01      a step: 64 bytes of inputs, 64 numbers of int8 or 32 of bf16
//   rows 16 … 31   A1   C10 C11
//
// An output is one sum over increasing k, independent of the other rows. For bf16 every number of rows takes this way,
// since tiles add in another order than vectors. Sums of integers are exact: few rows are multiplied by vectors.
//
// Tiles may have rows past the last one of the product (kRowsPastEnd in formats.h). Their sums are not used.

#include "kernels/amx_blocks.h"
#include "kernels/isa_functions.h"

namespace foreword::kernels::avx512_bf16 {
FW_ISA_FUNCTIONS(FW_DECLARE, FW_NONE, FW_NONE)
}  // namespace foreword::kernels::avx512_bf16

namespace foreword::kernels::FOREWORD_ISA {
namespace {

static_assert(kPanelWidth == 2 * kTileRows);
constexpr size_t kStepWeights = 2 * kTileRows * kTileBytes;  // bytes of a panel of one step
constexpr int kVectorRows = 4;                     // up to this many rows of int8 are multiplied by vectors
constexpr int kVectorRowsBlocks = 12;              // this many rows of block formats
constexpr int kMostRows = 512;                     // rows in a pass over the panels of block formats
// Weights of a panel that stay in the first-level cache beside the rows that meet them, and by themselves.
constexpr size_t kBesideRows = size_t(24) << 10, kAlone = size_t(40) << 10;
constexpr size_t kSumRowBytes = kPanelWidth * 4;

enum : int { C00, C01, C10, C11, A0, A1, B0, B1 };

template <Format F>
struct TileFormat;
template <>
struct TileFormat<Format::bf16> {
  using Input = uint16_t;
  static constexpr int kInputBytes = 2;
  template <int C, int A, int B>
  static FW_INLINE void dot() { dot_bf16<C, A, B>(); }
};
template <>
struct TileFormat<Format::i8> {
  using Input = int8_t;
  static constexpr int kInputBytes = 1;
  template <int C, int A, int B>
  static FW_INLINE void dot() { dot_i8<C, A, B>(); }
};

// Shapes of steps of `bytes` bytes per row, for tiles of `rows` rows.
void set_shapes(int rows, int bytes) {
  TileShapes shapes;
  for (int tile = C00; tile <= C11; ++tile) shapes.rows[tile] = uint8_t(rows), shapes.row_bytes[tile] = kTileBytes;
  for (int tile : {A0, A1}) shapes.rows[tile] = uint8_t(rows), shapes.row_bytes[tile] = uint16_t(bytes);
  for (int tile : {B0, B1}) shapes.rows[tile] = uint8_t(bytes / 4), shapes.row_bytes[tile] = kTileBytes;
  set_tile_shapes(shapes);
}

// Sums of up to two tiles of rows.
using Sums = uint8_t[2 * kTileRows][kSumRowBytes];

// `Once`: so that the weights stay in the first-level cache.
template <int T, bool Once>
FW_INLINE void load_rows(const uint8_t *x) {
  if constexpr (Once) {
    tile_load_once<T>(x, kPieceBytes);
  } else {
    tile_load<T>(x, kPieceBytes);
  }
}

// Adds inputs [k, k_end) to the sums of 1 or 2 tiles of rows from `row` on, which begin at zero with the first input.
// `w`: the weights of input k.
template <Format F, int Tiles, bool Once>
FW_INLINE void add_inputs(const Activations &a, int row, const uint8_t *w, int k, int k_end, Sums &sums,
                          Stream &ahead) {
  using Numbers = TileFormat<F>;
  constexpr int kPiece = kPieceBytes / Numbers::kInputBytes, kStep = kTileBytes / Numbers::kInputBytes;
  uint8_t *first = sums[0], *second = sums[kTileRows];
  if (k == 0) {
    tile_zero<C00>(), tile_zero<C01>();
    if constexpr (Tiles == 2) tile_zero<C10>(), tile_zero<C11>();
  } else {
    tile_load<C00>(first, kSumRowBytes), tile_load<C01>(first + kTileBytes, kSumRowBytes);
    if constexpr (Tiles == 2) tile_load<C10>(second, kSumRowBytes), tile_load<C11>(second + kTileBytes, kSumRowBytes);
  }
  for (; k < k_end; k += kStep, w += kStepWeights) {
    const auto *x = reinterpret_cast<const uint8_t *>(activation_at<const typename Numbers::Input>(a, row, k, kPiece));
    load_rows<A0, Once>(x);
    tile_load<B0>(w, 2 * kTileBytes);
    Numbers::template dot<C00, A0, B0>();
    tile_load<B1>(w + kTileBytes, 2 * kTileBytes);
    Numbers::template dot<C01, A0, B1>();
    if constexpr (Tiles == 2) {
      load_rows<A1, Once>(x + kTileRows * kPieceBytes);
      Numbers::template dot<C10, A1, B0>();
      Numbers::template dot<C11, A1, B1>();
    }
    ahead.advance();
  }
  tile_store<C00>(first, kSumRowBytes), tile_store<C01>(first + kTileBytes, kSumRowBytes);
  if constexpr (Tiles == 2) tile_store<C10>(second, kSumRowBytes), tile_store<C11>(second + kTileBytes, kSumRowBytes);
}

// The outputs of `rows` rows from `row` on, of panel `index`, from their sums.
template <Format F>
FW_INLINE void finish_rows(const MatrixProduct &product, int row, int rows, int index, const Sums &sums) {
  const uint8_t *panel = product.w.panel(index);
  float *out = product.panel_out(index, kPanelWidth) + size_t(row - product.row_begin) * product.out_stride;
  const ActivationBlock *blocks = product.a.blocks + row;
  for (int i = 0; i < rows; ++i, out += product.out_stride) {
    FW_UNROLL for (int n = 0; n < kPanelWidth; n += kLanes) {
      F32 y;
      if constexpr (F == Format::i8) {
        I32 sum;
        std::memcpy(&sum, sums[i] + 4 * n, sizeof sum);
        const F32 scale = mul(load(reinterpret_cast<const float *>(panel) + n), set1(blocks[i].scale));
        y = mul(to_f32(add_i32(sum, set1_i32(blocks[i].neg_bias_sum))), scale);
      } else {
        y = load(reinterpret_cast<const float *>(sums[i]) + n);
      }
      store(out + n, product.store == Store::add ? add(load(out + n), y) : y);
    }
  }
}

template <Format F>
void tile_product(const MatrixProduct &product) {
  const PackedMatrix &w = product.w;
  Sums &sums = *static_cast<Sums *>(product.scratch);
  constexpr int kStep = kTileBytes / TileFormat<F>::kInputBytes, kRows = 2 * kTileRows;
  const int cols = w.padded_cols, whole_cols = cols / kStep * kStep, tail = (cols - whole_cols) * kTileBytes / kStep;
  const int tile_rows = smaller(product.num_rows(), kTileRows);
  const int passes = (product.num_rows() + kRows - 1) / kRows;  // over the weights of a panel
  const bool once = w.panel_bytes > kBesideRows && w.panel_bytes <= kAlone;

  auto add = [&](int row, const uint8_t *panel, int k, int k_end, Stream &ahead) FW_LAMBDA {
    const uint8_t *weights = panel + input_offset(F, k);
    if (product.row_end - row <= kTileRows) {
      add_inputs<F, 1, false>(product.a, row, weights, k, k_end, sums, ahead);
    } else if (once) {
      add_inputs<F, 2, true>(product.a, row, weights, k, k_end, sums, ahead);
    } else {
      add_inputs<F, 2, false>(product.a, row, weights, k, k_end, sums, ahead);
    }
  };

  set_shapes(tile_rows, kTileBytes);
  for (int p = product.panel_begin; p < product.panel_end; ++p) {
    const uint8_t *panel = w.panel(p);
    Stream ahead = stream_of(product.panel_ahead(p + 1), w.panel_bytes, larger(whole_cols / kStep * passes, 1));
    for (int row = product.row_begin; row < product.row_end; row += kRows) {
      if (whole_cols) add(row, panel, 0, whole_cols, ahead);
      if (tail) {
        set_shapes(tile_rows, tail);
        add(row, panel, whole_cols, cols, ahead);
        set_shapes(tile_rows, kTileBytes);
      }
      finish_rows<F>(product, row, smaller(product.row_end - row, kRows), p, sums);
    }
  }
  release_tiles();
}

using ProductFunction = void (*)(const MatrixProduct &);

// By tiles; null where vectors are as fast.
ProductFunction product_of(const PackedMatrix &w, ActivationKind kind, int rows) {
  if (w.format == Format::bf16) return tile_product<Format::bf16>;
  if (w.format == Format::i8) return rows > kVectorRows ? tile_product<Format::i8> : nullptr;
  if (kind != ActivationKind::i15 || rows <= kVectorRowsBlocks) return nullptr;
  switch (w.format) {
    case Format::q4: return BlockProduct<Format::q4>::run;
    case Format::q4_min: return BlockProduct<Format::q4_min>::run;
    case Format::q8: return BlockProduct<Format::q8>::run;
    case Format::q8_min: return BlockProduct<Format::q8_min>::run;
    default: return has_table(w.format) ? BlockProduct<Format::fp4>::run : nullptr;
  }
}

}  // namespace

size_t linear_scratch_bytes() {
  return larger(avx512_bf16::linear_scratch_bytes(), kSumRowBytes * kMostRows + sizeof(BlockScratch));
}

void linear(const MatrixProduct &product) {
  const ProductFunction run = product_of(product.w, product.a.kind, product.num_rows());
  if (!run) return avx512_bf16::linear(product);
  MatrixProduct pass = product;
  for (; pass.row_begin < product.row_end; pass.row_begin += kMostRows) {
    pass.row_end = smaller(pass.row_begin + kMostRows, product.row_end);
    run(pass);
  }
}

// ---------------------------------------------------------------------------------------------- peak rates

namespace {

// The numbers are other than zero, because such products take more power.
template <Format F>
double peak(int64_t repeats) {
  alignas(64) uint8_t numbers[kTileRows * kTileBytes];
  for (size_t i = 0; i < sizeof numbers; ++i) numbers[i] = uint8_t(i % 2 ? 0x3f ^ (i << 7) : i * 37);
  set_shapes(kTileRows, kTileBytes);
  tile_load<A0>(numbers, kTileBytes), tile_load<A1>(numbers, kTileBytes);
  tile_load<B0>(numbers, kTileBytes), tile_load<B1>(numbers, kTileBytes);
  for (int64_t n = 0; n < repeats; n += 16) {  // a round is 16 times the work of a round of vectors
    TileFormat<F>::template dot<C00, A0, B0>();
    TileFormat<F>::template dot<C01, A0, B1>();
    TileFormat<F>::template dot<C10, A1, B0>();
    TileFormat<F>::template dot<C11, A1, B1>();
  }
  release_tiles();
  return 4. * 2. * kTileRows * kTileRows * (kTileBytes / TileFormat<F>::kInputBytes) * double(repeats / 16);
}

}  // namespace

double peak_bf16(int64_t repeats) { return peak<Format::bf16>(repeats); }
double peak_i8(int64_t repeats) { return peak<Format::i8>(repeats); }

#define FW_ENTRY(name) .name = name,
#define FW_BF16_ENTRY(name) .name = avx512_bf16::name,
extern const Isa kIsa;
constinit const Isa kIsa = [] {
  Isa isa = {.name = "avx512_amx",
             .panel_width = kPanelWidth,
             .bf16_dot = true,
             FW_ISA_FUNCTIONS(FW_BF16_ENTRY, FW_ENTRY, FW_ENTRY)};
  isa.linear_scratch_bytes = linear_scratch_bytes;
  isa.linear = linear;
  isa.attention_scratch_bytes = attention_scratch_bytes;
  isa.attend = attend;
  isa.peak_bf16 = peak_bf16;
  isa.peak_i8 = peak_i8;
  return isa;
}();

}  // namespace foreword::kernels::FOREWORD_ISA
