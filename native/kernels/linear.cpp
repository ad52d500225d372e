// out[r, n] = Σ_k a[r, k] w[n, k] from packed panels.
//
// The work is divided into register tiles of R rows × P panels whose accumulators stay in registers:
//
//            panel (kPanelVectors vectors)
//   row 0    acc acc        for each k:  load the panel's weights for k once,
//   row 1    acc acc                     broadcast a[r, k], multiply-add into the R × vectors accumulators
//   ...
//
// Many rows: tall tiles of one panel, so that a loaded weight is used R times. One or two rows: several panels at once,
// so that enough independent accumulators hide the latency of the multiply-add.
//
// Determinism: an output is always one accumulator over increasing k, independent of the tile, the other rows, the
// thread and the staging below. So a row's result does not depend on its batch.
//
// Staging: with many rows, formats that are expensive to unpack (bf16 without bf16 dot products, 4 bit where
// kStageNibbles) are unpacked once per panel into f32 or q8 panels in scratch memory; the numbers and their order are
// the same.

#include "kernels/isa_functions.h"
#include "kernels/linear_tiles.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

// ---------------------------------------------------------------------------------------------- staging

constexpr int kStageRows = 2 * kRowsBlock;  // with more rows than this, unpacking weights first is faster

constexpr Format staged_format(Format f) {
  if (f == Format::bf16 && !kBf16Dot) return Format::f32;
  if ((f == Format::q4 || has_table(f)) && kStageNibbles) return Format::q8;
  if (f == Format::q4_min && kStageNibbles) return Format::q8_min;
  return f;
}

void stage_bf16(const uint8_t *weights, int cols, uint8_t *out) {
  const uint16_t *w = reinterpret_cast<const uint16_t *>(weights);
  float *o = reinterpret_cast<float *>(out);
  for (int k = 0; k < cols; k += 2, w += 2 * kPanelWidth, o += 2 * kPanelWidth) {
    for (int v = 0; v < V; ++v) {
      const I32 pairs = load_pairs(w + 2 * kLanes * v);
      store(o + kLanes * v, even_of_pairs(pairs));
      store(o + kPanelWidth + kLanes * v, odd_of_pairs(pairs));
    }
  }
}

// Nibbles to bytes that hold weight + kDotBias. The weight is q - 8 for q4, q for q4_min, that of a table for others.
void stage_q4(Format from, const uint8_t *weights, int cols, uint8_t *out) {
  const size_t scale_bytes = block_scale_bytes(from);
  for (int k = 0; k < cols; k += kBlock, weights += block_bytes(from), out += block_bytes(staged_format(from))) {
    std::memcpy(out, weights, scale_bytes);
    if (has_table(from)) {
      widen_by_table(table_of(from), weights + scale_bytes, uint8_t(kDotFlip), out + scale_bytes);
      continue;
    }
    widen_nibbles(weights + scale_bytes, (from == Format::q4 ? 120u : 128u) * 0x01010101u, 0x80808080u ^ kDotFlip,
                  out + scale_bytes);
  }
}

// ---------------------------------------------------------------------------------------------- tiles to a product

struct Output {
  float *data;  // the place of the tile's first row and output
  size_t stride;
  Store store;
};

// The sums of a chunk's rows, kept for the next chunk: kPanelWidth numbers per row. `from` is null at the first chunk,
// `to` at the last one.
struct Carry {
  uint8_t *from, *to;
  static constexpr size_t kRowBytes = sizeof(float) * kPanelWidth;
};

// Not inlined: a tile of one or two rows has two callers.
template <class Kernel, int R, int P>
[[gnu::noinline]] void run_tile(Tile &t, const Carry &carry, const Output &out) {
  using Sum = typename Kernel::Sum;
  static_assert(sizeof(Sum) == sizeof(F32));
  Sum sums[R][P * V];
  auto at = [](uint8_t *base, int r, int v) FW_LAMBDA { return base + Carry::kRowBytes * r + sizeof(Sum) * v; };
  if (carry.from) {
    FW_UNROLL for (int r = 0; r < R; ++r) {
      FW_UNROLL for (int v = 0; v < P * V; ++v) std::memcpy(&sums[r][v], at(carry.from, r, v), sizeof(Sum));
    }
  } else {
    Kernel::template begin<R, P>(t, sums);
  }
  Kernel::template add<R, P>(t, sums);
  if (carry.to) {
    FW_UNROLL for (int r = 0; r < R; ++r) {
      FW_UNROLL for (int v = 0; v < P * V; ++v) std::memcpy(at(carry.to, r, v), &sums[r][v], sizeof(Sum));
    }
    return;
  }
  F32 result[R][P * V];
  Kernel::template end<R, P>(t, sums, result);
  FW_UNROLL for (int r = 0; r < R; ++r) {
    FW_UNROLL for (int v = 0; v < P * V; ++v) {
      float *o = out.data + r * out.stride + v * kLanes;
      store(o, out.store == Store::add ? add(load(o), result[r][v]) : result[r][v]);
    }
  }
}

using TileFunction = void (*)(Tile &, const Carry &, const Output &);

template <class Kernel, int... R>
TileFunction tall_tile(int rows, std::integer_sequence<int, R...>) {
  static constexpr TileFunction kTable[] = {run_tile<Kernel, R + 1, 1>...};
  return kTable[rows - 1];
}

// Rows [t.row, row_end) against one chunk of a panel, in tiles of nearly equal height.
template <class Kernel>
void run_rows(Tile t, Stream &stream, int row_end, Carry carry, Output out) {
  t.stream = stream;
  while (t.row < row_end) {
    const int left = row_end - t.row;
    const int tiles = (left + Kernel::kRows - 1) / Kernel::kRows;
    const int rows = (left + tiles - 1) / tiles;
    tall_tile<Kernel>(rows, std::make_integer_sequence<int, Kernel::kRows>{})(t, carry, out);
    t.row += rows;
    out.data += size_t(rows) * out.stride;
    if (carry.from) carry.from += Carry::kRowBytes * size_t(rows);
    if (carry.to) carry.to += Carry::kRowBytes * size_t(rows);
  }
  stream = t.stream;
}

// Prefetches `panels` panels from `panel` on during `tiles` passes over a whole panel.
Stream panels_ahead(const MatrixProduct &product, int panel, int panels, int tiles) {
  const PackedMatrix &w = product.w;
  return stream_of(product.panel_ahead(panel), w.panel_bytes * size_t(panels), w.padded_cols / kBlock * tiles);
}

const float *scales_of(const PackedMatrix &w, const uint8_t *panel) {
  return w.format == Format::i8 ? reinterpret_cast<const float *>(panel) : nullptr;
}

Output output_of(const MatrixProduct &product, int panel) {
  return {product.panel_out(panel, kPanelWidth), product.out_stride, product.store};
}

// One or two rows, where the product is bound by memory: two panels at a time if their sums fit registers, one at an
// odd end.
template <class Kernel, int R>
void run_few_rows(const MatrixProduct &product) {
  constexpr int kPanels = 2 * R * V * Kernel::kSums <= kMostSums ? 2 : 1;
  const PackedMatrix &w = product.w;
  for (int p = product.panel_begin; p < product.panel_end;) {
    const uint8_t *panel = w.panel(p);
    const int at_once = smaller(product.panel_end - p, kPanels);
    const Output out = output_of(product, p);
    Tile t{panel + input_offset(w.format, 0), scales_of(w, panel), BiasedTables::of(w.format), w.panel_bytes, product.a,
           product.row_begin, 0, w.padded_cols, panels_ahead(product, p + at_once, at_once, 1)};
    if (at_once == kPanels) {
      run_tile<Kernel, R, kPanels>(t, {}, out);
    } else {
      run_tile<Kernel, R, 1>(t, {}, out);
    }
    p += at_once;
  }
}

constexpr int kMostRows = 480;  // in one pass over the panels

// Inputs of a chunk, nearly as many in all chunks of a panel. Its weights, staged or not, stay in the second-level
// cache for all rows, and are read in order.
constexpr size_t kChunkBytes = 65536;
int chunk_inputs(Format f, int cols) {
  const size_t block_bytes = input_offset(f, kBlock) - input_offset(f, 0);
  const int blocks = cols / kBlock, most = int(kChunkBytes / block_bytes), chunks = (blocks + most - 1) / most;
  return (blocks + chunks - 1) / chunks * kBlock;
}

template <class Kernel, class StagedKernel>
void run_product(const MatrixProduct &product) {
  const PackedMatrix &w = product.w;
  const int num_rows = product.num_rows(), row_end = product.row_end, cols = w.padded_cols;
  if (num_rows == 1) return run_few_rows<Kernel, 1>(product);
  if (num_rows == 2) return run_few_rows<Kernel, 2>(product);

  const Format to = num_rows > kStageRows ? staged_format(w.format) : w.format;
  const bool staged = to != w.format;
  const int tile_rows = staged ? StagedKernel::kRows : Kernel::kRows, tiles = (num_rows + tile_rows - 1) / tile_rows;
  const int chunk = staged || tiles > 1 ? chunk_inputs(to, cols) : cols;
  uint8_t *staged_weights = static_cast<uint8_t *>(product.scratch), *sums = staged_weights + kChunkBytes;
  for (int p = product.panel_begin; p < product.panel_end; ++p) {
    const uint8_t *panel = w.panel(p);
    const Output out = output_of(product, p);
    Stream stream = panels_ahead(product, p + 1, 1, tiles);
    for (int k = 0; k < cols; k += chunk) {
      const int k_end = smaller(k + chunk, cols);
      const Carry carry{k > 0 ? sums : nullptr, k_end < cols ? sums : nullptr};
      const uint8_t *weights = panel + input_offset(w.format, k);
      Tile t{weights, scales_of(w, panel), BiasedTables::of(w.format), w.panel_bytes, product.a, product.row_begin,
             k, k_end, {}};
      if (!staged) {
        run_rows<Kernel>(t, stream, row_end, carry, out);
      } else {
        to == Format::f32 ? stage_bf16(weights, k_end - k, staged_weights)
                          : stage_q4(w.format, weights, k_end - k, staged_weights);
        t.weights = staged_weights;
        run_rows<StagedKernel>(t, stream, row_end, carry, out);
      }
    }
  }
}

template <Format F, int Planes>
void run_blocks(const MatrixProduct &product) {
  run_product<BlockKernel<F, Planes>, BlockKernel<staged_format(F), Planes>>(product);
}

using ProductFunction = void (*)(const MatrixProduct &);

// Products without pairs and staging: with bf16 dot products, those of FOREWORD_QUADS are the same and already there.
template <class Kernel>
ProductFunction shared_product() {
  if constexpr (kBf16Dot) {
    return FOREWORD_QUADS::linear;
  } else {
    return run_product<Kernel, Kernel>;
  }
}

template <Format F>
ProductFunction shared_blocks(bool planes) {
  return planes ? shared_product<BlockKernel<F, 2>>() : shared_product<BlockKernel<F, 1>>();
}

ProductFunction product_of(Format format, ActivationKind kind) {
  const bool planes = kind == ActivationKind::i15;
  switch (format) {
    case Format::f32: return shared_product<F32Kernel>();
    case Format::bf16: return run_product<Bf16Kernel, std::conditional_t<kBf16Dot, Bf16Kernel, F32Kernel>>;
    case Format::i8: return shared_product<I8Kernel>();
    case Format::q4: return planes ? run_blocks<Format::q4, 2> : run_blocks<Format::q4, 1>;
    case Format::q4_min: return planes ? run_blocks<Format::q4_min, 2> : run_blocks<Format::q4_min, 1>;
    case Format::q8: return shared_blocks<Format::q8>(planes);
    case Format::q8_min: return shared_blocks<Format::q8_min>(planes);
    case Format::q8_half: return shared_blocks<Format::q8_half>(planes);
    default: return planes ? run_blocks<Format::fp4, 2> : run_blocks<Format::fp4, 1>;  // those with a table
  }
}

// Rows of activations in one pass over the panels: they stay in the second-level cache.
int rows_per_pass(const Activations &a) {
  const size_t rows = (size_t(384) << 10) / (size_t(a.padded_cols) * activation_bytes(a.kind));
  return int(smaller(larger(rows / 12 * 12, size_t(48)), size_t(kMostRows)));
}

}  // namespace

// Staged weights, then sums between chunks.
size_t linear_scratch_bytes() { return kChunkBytes + Carry::kRowBytes * kMostRows; }

void linear(const MatrixProduct &product) {
  const ProductFunction run = product_of(product.w.format, product.a.kind);
  const int most = rows_per_pass(product.a), passes = larger((product.num_rows() + most - 1) / most, 1);
  const int rows = (product.num_rows() + passes - 1) / passes;
  MatrixProduct pass = product;
  for (; pass.row_begin < product.row_end; pass.row_begin += rows) {
    pass.row_end = smaller(pass.row_begin + rows, product.row_end);
    run(pass);
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
