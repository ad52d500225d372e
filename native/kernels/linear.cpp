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
// Staging: with many rows, formats that are expensive to unpack (bf16 without bf16 dot products, 4 bit) are unpacked
// once per panel into f32 or q8 panels in scratch memory; the numbers and their order are the same.

#include "kernels/isa_functions.h"
#include "kernels/linear_tiles.h"

#if defined(FOREWORD_SIMD_BF16)
namespace foreword::kernels::avx512_vnni {
std::remove_pointer_t<decltype(Isa::linear)> linear;
}
#endif

namespace foreword::kernels::FOREWORD_ISA {
namespace {

// ---------------------------------------------------------------------------------------------- staging

constexpr int kStageRows = 2 * kRowsBlock;  // with more rows than this, unpacking weights first is faster

constexpr Format staged_format(Format f) {
  if (f == Format::bf16 && !kBf16Dot) return Format::f32;
  if (f == Format::q4) return Format::q8;
  if (f == Format::q4_min) return Format::q8_min;
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

// Nibbles to bytes that hold weight + 128: q - 8 + 128 for q4, q + 128 for q4_min.
void stage_q4(Format from, const uint8_t *weights, int cols, uint8_t *out) {
  const size_t scale_bytes = block_scale_bytes(from);
  const uint32_t offset = (from == Format::q4 ? 120u : 128u) * 0x01010101u;
  for (int k = 0; k < cols; k += kBlock) {
    std::memcpy(out, weights, scale_bytes);
    const uint8_t *in = weights + scale_bytes;
    uint8_t *q = out + scale_bytes;
    for (int i = 0; i < 4 * kPanelWidth; ++i) {
      uint32_t word;
      std::memcpy(&word, in + 4 * i, 4);
      const uint32_t low = (word & 0x0f0f0f0fu) + offset, high = ((word >> 4) & 0x0f0f0f0fu) + offset;
      std::memcpy(q + 4 * i, &low, 4);
      std::memcpy(q + 4 * (i + 4 * kPanelWidth), &high, 4);
    }
    weights += block_bytes(from);
    out += block_bytes(staged_format(from));
  }
}

// ---------------------------------------------------------------------------------------------- tiles to a product

struct Range {
  int begin, end;
};

struct Output {
  float *data;  // of the tile's first row and output
  size_t stride;
  Store store;
};

// The sums of a chunk's rows, kept for the next chunk: kPanelWidth numbers per row. `from` is null at the first chunk,
// `to` at the last one.
struct Carry {
  uint8_t *from, *to;
  static constexpr size_t kRowBytes = sizeof(float) * kPanelWidth;
};

template <class Kernel, int R, int P>
void run_tile(Tile &t, const Carry &carry, const Output &out) {
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

// Prefetches `panels` panels from `next` on during `tiles` passes over a whole panel.
Stream panels_ahead(const PackedMatrix &w, const uint8_t *next, int panels, int tiles) {
  return stream_of(next, w.panel_bytes * size_t(panels), w.padded_cols / kBlock * tiles);
}

const float *scales_of(const PackedMatrix &w, const uint8_t *panel) {
  return w.format == Format::i8 ? reinterpret_cast<const float *>(panel) : nullptr;
}

// One or two rows, where the product is bound by memory: two panels at a time, one at an odd end.
template <class Kernel, int R>
void run_few_rows(const PackedMatrix &w, const Activations &a, int row, Range panels, Output out, const uint8_t *next) {
  for (int p = panels.begin; p < panels.end;) {
    const uint8_t *panel = w.panel(p);
    const int at_once = smaller(panels.end - p, 2);
    const uint8_t *following = p + at_once < panels.end ? w.panel(p + at_once) : next;
    const Output o{out.data + size_t(p) * kPanelWidth, out.stride, out.store};
    Tile t{panel + input_offset(w.format, 0),  scales_of(w, panel), w.panel_bytes, a, row, 0, w.padded_cols,
           panels_ahead(w, following, at_once, 1)};
    if (at_once == 2) {
      run_tile<Kernel, R, 2>(t, {}, o);
    } else {
      run_tile<Kernel, R, 1>(t, {}, o);
    }
    p += at_once;
  }
}

constexpr int kMostRows = 480;  // in one pass over the panels

// Inputs of a chunk: whole pieces, chunks of nearly equal size. Its weights stay in the first-level cache for all rows.
constexpr size_t kChunkBytes = 16384;
int chunk_inputs(Format f, const Activations &a) {
  const int piece = piece_inputs(a.kind), pieces = (a.padded_cols + piece - 1) / piece;
  const size_t piece_bytes = input_offset(f, piece) - input_offset(f, 0);
  const int most = int(larger(kChunkBytes / piece_bytes, size_t(1))), chunks = (pieces + most - 1) / most;
  return (pieces + chunks - 1) / chunks * piece;
}

struct Scratch {
  uint8_t *staged, *carry;
};
constexpr size_t kStagedBytes = 2 * kChunkBytes;

template <class Kernel, class StagedKernel>
void run_product(const PackedMatrix &w, const Activations &a, Range rows, Range panels, Output out, const uint8_t *next,
                 const Scratch &scratch) {
  const int num_rows = rows.end - rows.begin, cols = w.padded_cols;
  out.data += size_t(rows.begin) * out.stride;
  if (num_rows == 1) return run_few_rows<Kernel, 1>(w, a, rows.begin, panels, out, next);
  if (num_rows == 2) return run_few_rows<Kernel, 2>(w, a, rows.begin, panels, out, next);

  const Format to = num_rows > kStageRows ? staged_format(w.format) : w.format;
  const bool staged = to != w.format;
  const int tile_rows = staged ? StagedKernel::kRows : Kernel::kRows, tiles = (num_rows + tile_rows - 1) / tile_rows;
  const int chunk = staged || tiles > 1 ? chunk_inputs(to, a) : cols;
  for (int p = panels.begin; p < panels.end; ++p) {
    const uint8_t *panel = w.panel(p);
    const Output o{out.data + size_t(p) * kPanelWidth, out.stride, out.store};
    Stream stream = panels_ahead(w, p + 1 < panels.end ? w.panel(p + 1) : next, 1, tiles);
    for (int k = 0; k < cols; k += chunk) {
      const int k_end = smaller(k + chunk, cols);
      const Carry carry{k > 0 ? scratch.carry : nullptr, k_end < cols ? scratch.carry : nullptr};
      const uint8_t *weights = panel + input_offset(w.format, k);
      Tile t{weights, scales_of(w, panel), w.panel_bytes, a, rows.begin, k, k_end, {}};
      if (!staged) {
        run_rows<Kernel>(t, stream, rows.end, carry, o);
      } else {
        to == Format::f32 ? stage_bf16(weights, k_end - k, scratch.staged)
                          : stage_q4(w.format, weights, k_end - k, scratch.staged);
        t.weights = scratch.staged;
        run_rows<StagedKernel>(t, stream, rows.end, carry, o);
      }
    }
  }
}

template <int Planes>
void run_blocks(const PackedMatrix &w, const Activations &a, Range rows, Range panels, Output out, const uint8_t *next,
                const Scratch &scratch) {
  using Q4 = BlockKernel<Format::q4, Planes>;
  using Q4Min = BlockKernel<Format::q4_min, Planes>;
  using Q8 = BlockKernel<Format::q8, Planes>;
  using Q8Min = BlockKernel<Format::q8_min, Planes>;
  using Q8Half = BlockKernel<Format::q8_half, Planes>;
  switch (w.format) {
    case Format::q4: return run_product<Q4, Q8>(w, a, rows, panels, out, next, scratch);
    case Format::q4_min: return run_product<Q4Min, Q8Min>(w, a, rows, panels, out, next, scratch);
    case Format::q8: return run_product<Q8, Q8>(w, a, rows, panels, out, next, scratch);
    case Format::q8_min: return run_product<Q8Min, Q8Min>(w, a, rows, panels, out, next, scratch);
    case Format::q8_half: return run_product<Q8Half, Q8Half>(w, a, rows, panels, out, next, scratch);
    default: return;
  }
}

// Rows of activations in one pass over the panels: they stay in the second-level cache.
int rows_per_pass(const Activations &a) {
  const size_t rows = (size_t(384) << 10) / (size_t(a.padded_cols) * activation_bytes(a.kind));
  return int(smaller(larger(rows / 12 * 12, size_t(48)), size_t(kMostRows)));
}

}  // namespace

size_t linear_scratch_bytes() { return kStagedBytes + Carry::kRowBytes * kMostRows; }

void linear(const PackedMatrix &w, const Activations &a, int row_begin, int row_end, int panel_begin, int panel_end,
            float *out, size_t out_stride, Store store, const uint8_t *next, void *memory) {
#if defined(FOREWORD_SIMD_BF16)
  if (w.format != Format::bf16) {  // the same instructions without bf16
    return avx512_vnni::linear(w, a, row_begin, row_end, panel_begin, panel_end, out, out_stride, store, next, memory);
  }
#endif
  const Range panels{panel_begin, panel_end};
  const Output output{out, out_stride, store};
  const Scratch scratch{static_cast<uint8_t *>(memory), static_cast<uint8_t *>(memory) + kStagedBytes};
  const int most = rows_per_pass(a), passes = (row_end - row_begin + most - 1) / most;
  const int pass = passes ? (row_end - row_begin + passes - 1) / passes : 1;
  for (int row = row_begin; row < row_end; row += pass) {
    const Range rows{row, smaller(row_end, row + pass)};
#if defined(FOREWORD_SIMD_BF16)
    run_product<Bf16Kernel, Bf16Kernel>(w, a, rows, panels, output, next, scratch);
#else
    switch (w.format) {
      case Format::f32: run_product<F32Kernel, F32Kernel>(w, a, rows, panels, output, next, scratch); break;
      case Format::bf16: run_product<Bf16Kernel, F32Kernel>(w, a, rows, panels, output, next, scratch); break;
      case Format::i8: run_product<I8Kernel, I8Kernel>(w, a, rows, panels, output, next, scratch); break;
      default:
        if (a.kind == ActivationKind::i15) {
          run_blocks<2>(w, a, rows, panels, output, next, scratch);
        } else {
          run_blocks<1>(w, a, rows, panels, output, next, scratch);
        }
    }
#endif
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
