// out[r, n] = Σ_k a[r, k] w[n, k] from packed panels.
//
// The work is cut into register tiles of R rows × P panels whose accumulators never leave the registers:
//
//            panel (kPanelVectors vectors)
//   row 0    acc acc        for each k:  load the panel's weights for k once,
//   row 1    acc acc                     broadcast a[r, k], multiply-add into the R × vectors accumulators
//   ...
//
// Many rows: tall tiles of one panel, so that a weight loaded is used R times. One or two rows: several panels at once, so
// that enough independent accumulators hide the latency of the multiply-add.
//
// Determinism: an output is always one accumulator that runs over k upwards, whatever the tile, the rows beside it, the
// thread or the staging below. So a row's result does not depend on the batch it came in.
//
// Staging: with many rows, formats that cost work to unpack (bf16 without bf16 dot products, 4 bit) are unpacked once a panel
// into f32 or q8 panels in scratch memory; the numbers and their order are the same.

#include "kernels/linear.h"

#include "kernels/packing.h"

namespace foreword::kernels::FOREWORD_LEVEL {
namespace {

constexpr int V = kPanelVectors;

// Lines to fetch ahead while a tile computes, spread over its groups of kBlock inputs.
struct Stream {
  const uint8_t *next;
  int lines_per_group;

  FW_INLINE void advance() {
    for (int i = 0; i < lines_per_group; ++i) prefetch<2>(next + 64 * i);
    next += 64 * lines_per_group;
  }
};

struct Tile {
  const uint8_t *panel;  // of the first panel
  size_t panel_bytes;
  int padded_cols;
  const Activations &a;
  int row;
  Stream stream;
};

// ---------------------------------------------------------------------------------------------- f32, bf16

struct F32Kernel {
  static constexpr int kRows = kRowsF32;
  template <int R, int P>
  static FW_INLINE void run(Tile &t, F32 (&acc)[R][P * V]) {
    const float *x = t.a.f32 + static_cast<size_t>(t.row) * t.a.stride;
    const size_t stride = t.a.stride;
    unroll<R>([&](auto r) FW_LAMBDA { unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = set1(0.f); }); });
    const float *w = reinterpret_cast<const float *>(t.panel);
    const size_t panel = t.panel_bytes / sizeof(float);
    for (int k = 0; k < t.padded_cols; k += kBlock) {
      t.stream.advance();
      for (int i = 0; i < kBlock; i += 2) {
        unroll<2>([&](auto j) FW_LAMBDA {
          F32 wv[P * V];
          unroll<P * V>([&](auto v) FW_LAMBDA { wv[v] = load(w + (v / V) * panel + (v % V) * kLanes); });
          unroll<R>([&](auto r) FW_LAMBDA {
            const F32 xv = set1(x[r * stride + j]);
            unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = fma(xv, wv[v], acc[r][v]); });
          });
          w += kPanelWidth;
        });
        x += 2;
      }
    }
  }
};

// bf16 weights widened in registers: a pair's even and odd members are one shift and one mask away from floats.
struct Bf16WideningKernel {
  static constexpr int kRows = kRowsF32;
  template <int R, int P>
  static FW_INLINE void run(Tile &t, F32 (&acc)[R][P * V]) {
    const float *x = t.a.f32 + static_cast<size_t>(t.row) * t.a.stride;
    const size_t stride = t.a.stride;
    unroll<R>([&](auto r) FW_LAMBDA { unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = set1(0.f); }); });
    const uint16_t *w = reinterpret_cast<const uint16_t *>(t.panel);
    const size_t panel = t.panel_bytes / sizeof(uint16_t);
    for (int k = 0; k < t.padded_cols; k += kBlock) {
      t.stream.advance();
      for (int i = 0; i < kBlock; i += 2) {
        I32 wv[P * V];
        unroll<P * V>([&](auto v) FW_LAMBDA { wv[v] = load_pairs(w + (v / V) * panel + (v % V) * 2 * kLanes); });
        F32 half[P * V];
        unroll<P * V>([&](auto v) FW_LAMBDA { half[v] = even_of_pairs(wv[v]); });
        unroll<R>([&](auto r) FW_LAMBDA {
          const F32 xv = set1(x[r * stride]);
          unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = fma(xv, half[v], acc[r][v]); });
        });
        unroll<P * V>([&](auto v) FW_LAMBDA { half[v] = odd_of_pairs(wv[v]); });
        unroll<R>([&](auto r) FW_LAMBDA {
          const F32 xv = set1(x[r * stride + 1]);
          unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = fma(xv, half[v], acc[r][v]); });
        });
        w += 2 * kPanelWidth;
        x += 2;
      }
    }
  }
};

#if defined(FOREWORD_SIMD_BF16)
struct Bf16DotKernel {
  static constexpr int kRows = kRowsF32;
  template <int R, int P>
  static FW_INLINE void run(Tile &t, F32 (&acc)[R][P * V]) {
    const uint16_t *x = t.a.bf16 + static_cast<size_t>(t.row) * t.a.stride;
    const size_t stride = t.a.stride;
    unroll<R>([&](auto r) FW_LAMBDA { unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = set1(0.f); }); });
    const uint16_t *w = reinterpret_cast<const uint16_t *>(t.panel);
    const size_t panel = t.panel_bytes / sizeof(uint16_t);
    for (int k = 0; k < t.padded_cols; k += kBlock) {
      t.stream.advance();
      for (int i = 0; i < kBlock; i += 4) {
        unroll<2>([&](auto j) FW_LAMBDA {
          I32 wv[P * V];
          unroll<P * V>([&](auto v) FW_LAMBDA { wv[v] = load_pairs(w + (v / V) * panel + (v % V) * 2 * kLanes); });
          unroll<R>([&](auto r) FW_LAMBDA {
            const I32 xv = pair(x + r * stride + 2 * j);
            unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = dot2(acc[r][v], wv[v], xv); });
          });
          w += 2 * kPanelWidth;
        });
        x += 4;
      }
    }
  }
};
using Bf16Kernel = Bf16DotKernel;
#else
using Bf16Kernel = Bf16WideningKernel;
#endif

// ---------------------------------------------------------------------------------------------- 8 bit a channel

// The integer sums of one block over the planes of the activations. They start at `offset(row)`, which takes the offset of the
// weights back out; with two planes at 0, and after the high plane become 128 sum + offset, so that the low plane completes
// Σ w (128 high + low) in the same registers.
template <int Planes, int R, int N, class Offset, class Dots>
FW_INLINE void integer_sums(I32 (&sum)[R][N], Offset &&offset, Dots &&dots) {
  unroll<R>([&](auto r) FW_LAMBDA {
    const I32 start = set1_i32(Planes == 1 ? offset(r) : 0);
    unroll<N>([&](auto n) FW_LAMBDA { sum[r][n] = start; });
  });
  dots(Index<0>{});
  if constexpr (Planes == 2) {
    unroll<R>([&](auto r) FW_LAMBDA {
      const I32 start = set1_i32(offset(r));
      unroll<N>([&](auto n) FW_LAMBDA { sum[r][n] = shift_7_add(sum[r][n], start); });
    });
    dots(Index<1>{});
  }
}

// Per block of 32 inputs an exact integer sum, which starts at -128 Σ a to take the weights' offset back out; then
// acc += sum * d_a. The scale of the output comes last.
template <int Planes>
struct I8Kernel {
  static constexpr int kRows = kRowsBlock;
  template <int R, int P>
  static FW_INLINE void run(Tile &t, F32 (&acc)[R][P * V]) {
    const int8_t *x = t.a.i8 + static_cast<size_t>(t.row) * t.a.stride;
    const ActivationBlock *facts = t.a.blocks + static_cast<size_t>(t.row) * t.a.block_stride;
    const size_t stride = t.a.stride, facts_stride = t.a.block_stride, panel = t.panel_bytes;
    unroll<R>([&](auto r) FW_LAMBDA { unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = set1(0.f); }); });
    const uint8_t *w = t.panel + sizeof(float) * kPanelWidth;
    for (int k = 0; k < t.padded_cols; k += kBlock) {
      t.stream.advance();
      I32 sum[R][P * V];
      integer_sums<Planes>(sum, [&](auto r) FW_LAMBDA { return facts[r * facts_stride].neg128_sum; }, [&](auto plane) FW_LAMBDA {
        const int8_t *xp = x + plane * t.padded_cols;
        unroll<kBlock / 4>([&](auto j) FW_LAMBDA {
          U8 wv[P * V];
          unroll<P * V>([&](auto v) FW_LAMBDA { wv[v] = load_u8(w + (v / V) * panel + (j * V + v % V) * 4 * kLanes); });
          unroll<R>([&](auto r) FW_LAMBDA {
            const I32 xv = quad(xp + r * stride + 4 * j);
            unroll<P * V>([&](auto v) FW_LAMBDA { sum[r][v] = dot4_biased(sum[r][v], wv[v], xv); });
          });
        });
      });
      unroll<R>([&](auto r) FW_LAMBDA {
        const F32 scale = set1(facts[r * facts_stride].scale);
        unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = fma(to_f32(sum[r][v]), scale, acc[r][v]); });
      });
      w += kBlock * kPanelWidth;
      x += kBlock;
      facts += 1;
    }
    unroll<P * V>([&](auto v) FW_LAMBDA {
      const F32 scale = load(reinterpret_cast<const float *>(t.panel + (v / V) * panel) + (v % V) * kLanes);
      unroll<R>([&](auto r) FW_LAMBDA { acc[r][v] = mul(acc[r][v], scale); });
    });
  }
};

// ---------------------------------------------------------------------------------------------- block formats

// Per block of 32: an exact integer sum, then acc += sum * (d_w * d_a) and, with a min, acc += m_w * (d_a Σ a).
template <Format Fmt, int Planes>
struct BlockKernel {
  static constexpr int kRows = kRowsBlock;
  static constexpr bool kHalves = Fmt == Format::q8_half;

  static FW_INLINE int32_t start(const ActivationBlock &b, int half) {
    if constexpr (Fmt == Format::q4) return b.neg8_sum;
    if constexpr (Fmt == Format::q4_min) return 0;
    if constexpr (kHalves) return b.neg128_half[half];
    return b.neg128_sum;
  }

  // Quads [begin, end) of the block. A 4-bit load gives quad j in its low and quad j + 4 in its high nibbles.
  template <int R, int P, int Begin, int End>
  static FW_INLINE void dots(const uint8_t *w, size_t panel, const int8_t *x, size_t stride, I32 (&sum)[R][P * V]) {
    constexpr int kLoads = is_4bit(Fmt) ? 4 : End - Begin;
    unroll<kLoads>([&](auto load_index) FW_LAMBDA {
      constexpr int j = Begin + load_index;
      U8 wv[P * V];
      unroll<P * V>([&](auto v) FW_LAMBDA {
        wv[v] = load_u8(w + (v / V) * panel + (j * V + v % V) * 4 * kLanes);
      });
      if constexpr (is_4bit(Fmt)) {
        unroll<R>([&](auto r) FW_LAMBDA {
          const I32 low = quad(x + r * stride + 4 * j), high = quad(x + r * stride + 4 * (j + 4));
          unroll<P * V>([&](auto v) FW_LAMBDA {
            sum[r][v] = dot4(sum[r][v], low_nibbles(wv[v]), low);
            sum[r][v] = dot4(sum[r][v], high_nibbles(wv[v]), high);
          });
        });
      } else {
        unroll<R>([&](auto r) FW_LAMBDA {
          const I32 xv = quad(x + r * stride + 4 * j);
          unroll<P * V>([&](auto v) FW_LAMBDA { sum[r][v] = dot4_biased(sum[r][v], wv[v], xv); });
        });
      }
    });
  }

  template <int R, int P>
  static FW_INLINE void run(Tile &t, F32 (&acc)[R][P * V]) {
    constexpr size_t kScales = block_scale_bytes(Fmt), kBytes = block_bytes(Fmt);
    const int8_t *x = t.a.i8 + static_cast<size_t>(t.row) * t.a.stride;
    const ActivationBlock *facts = t.a.blocks + static_cast<size_t>(t.row) * t.a.block_stride;
    const size_t stride = t.a.stride, facts_stride = t.a.block_stride, panel = t.panel_bytes;
    unroll<R>([&](auto r) FW_LAMBDA { unroll<P * V>([&](auto v) FW_LAMBDA { acc[r][v] = set1(0.f); }); });
    const uint8_t *block = t.panel;
    for (int k = 0; k < t.padded_cols; k += kBlock) {
      t.stream.advance();
      auto scales = [&](int v, int which) FW_LAMBDA {
        const uint8_t *p = block + (v / V) * panel + sizeof(uint16_t) * (which * kPanelWidth + (v % V) * kLanes);
        return load_f16(reinterpret_cast<const uint16_t *>(p));
      };
      unroll<kHalves ? 2 : 1>([&](auto half) FW_LAMBDA {
        I32 sum[R][P * V];
        constexpr int kBegin = kHalves ? 4 * half : 0, kEnd = kHalves ? 4 * half + 4 : 8;
        integer_sums<Planes>(sum, [&](auto r) FW_LAMBDA { return start(facts[r * facts_stride], half); },
                             [&](auto plane) FW_LAMBDA {
                               dots<R, P, kBegin, kEnd>(block + kScales, panel, x + plane * t.padded_cols, stride, sum);
                             });
        unroll<P * V>([&](auto v) FW_LAMBDA {
          const F32 d = scales(v, half);
          unroll<R>([&](auto r) FW_LAMBDA {
            const F32 scale = mul(d, set1(facts[r * facts_stride].scale));
            acc[r][v] = fma(to_f32(sum[r][v]), scale, acc[r][v]);
          });
        });
      });
      if constexpr (has_min(Fmt)) {
        unroll<P * V>([&](auto v) FW_LAMBDA {
          const F32 m = scales(v, 1);
          unroll<R>([&](auto r) FW_LAMBDA { acc[r][v] = fma(m, set1(facts[r * facts_stride].scaled_sum), acc[r][v]); });
        });
      }
      block += kBytes;
      x += kBlock;
      facts += 1;
    }
  }
};

// ---------------------------------------------------------------------------------------------- staging

constexpr int kStageRows = 2 * kRowsBlock;  // from more rows than this on, unpacking a panel first pays

constexpr Format staged_format(Format f) {
  if (f == Format::bf16 && !kBf16Dot) return Format::f32;
  if (f == Format::q4) return Format::q8;
  if (f == Format::q4_min) return Format::q8_min;
  return f;
}

void stage_bf16(const uint8_t *panel, int cols, uint8_t *out) {
  const uint16_t *w = reinterpret_cast<const uint16_t *>(panel);
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
void stage_q4(const PackedMatrix &w, const uint8_t *panel, uint8_t *out) {
  const Format to = staged_format(w.format);
  const size_t scale_bytes = block_scale_bytes(w.format);
  const uint32_t offset = (w.format == Format::q4 ? 120u : 128u) * 0x01010101u;
  for (int k = 0; k < w.padded_cols; k += kBlock) {
    std::memcpy(out, panel, scale_bytes);
    const uint8_t *in = panel + scale_bytes;
    uint8_t *q = out + scale_bytes;
    for (int i = 0; i < 4 * kPanelWidth; ++i) {
      uint32_t word;
      std::memcpy(&word, in + 4 * i, 4);
      const uint32_t low = (word & 0x0f0f0f0fu) + offset, high = ((word >> 4) & 0x0f0f0f0fu) + offset;
      std::memcpy(q + 4 * i, &low, 4);
      std::memcpy(q + 4 * (i + 4 * kPanelWidth), &high, 4);
    }
    panel += block_bytes(w.format);
    out += block_bytes(to);
  }
}

// ---------------------------------------------------------------------------------------------- tiles to a product

struct Output {
  float *data;  // of the tile's first row and output
  size_t stride;
  Store store;
};

template <class Kernel, int R, int P>
void run_tile(Tile &t, const Output &out) {
  F32 acc[R][P * V];
  Kernel::template run<R, P>(t, acc);
  unroll<R>([&](auto r) FW_LAMBDA {
    unroll<P * V>([&](auto v) FW_LAMBDA {
      float *o = out.data + r * out.stride + v * kLanes;
      store(o, out.store == Store::add ? add(load(o), acc[r][v]) : acc[r][v]);
    });
  });
}

using TileFunction = void (*)(Tile &, const Output &);

template <class Kernel, int... R>
TileFunction tall_tile(int rows, std::integer_sequence<int, R...>) {
  static constexpr TileFunction kTable[] = {run_tile<Kernel, R + 1, 1>...};
  return kTable[rows - 1];
}

// Rows [row, row_end) against one panel, in tiles of nearly equal height.
template <class Kernel>
void run_rows(Tile &t, int row_end, Output out) {
  while (t.row < row_end) {
    const int left = row_end - t.row;
    const int tiles = (left + Kernel::kRows - 1) / Kernel::kRows;
    const int rows = (left + tiles - 1) / tiles;
    tall_tile<Kernel>(rows, std::make_integer_sequence<int, Kernel::kRows>{})(t, out);
    t.row += rows;
    out.data += static_cast<size_t>(rows) * out.stride;
  }
}

int lines_per_group(const PackedMatrix &w, int tiles) {
  const int groups = w.padded_cols / kBlock * tiles;
  return static_cast<int>((w.panel_bytes / 64 + static_cast<size_t>(groups) - 1) / static_cast<size_t>(groups));
}

constexpr size_t kStreamAhead = 4096;  // bytes between the weights in use and those being fetched, with few rows

// A few rows: memory sets the pace. Two panels at a time where there are two.
template <class Kernel, int R>
void run_few_rows(const PackedMatrix &w, const Activations &a, int row, int panel_begin, int panel_end, Output out) {
  for (int p = panel_begin; p < panel_end;) {
    const uint8_t *panel = w.panels + static_cast<size_t>(p) * w.panel_bytes;
    const bool two = p + 2 <= panel_end;
    const Output o{out.data + static_cast<size_t>(p) * kPanelWidth, out.stride, out.store};
    Tile t{panel, w.panel_bytes, w.padded_cols, a, row, {panel + kStreamAhead, lines_per_group(w, 1)}};
    if (two) {
      t.stream.next = panel + 2 * w.panel_bytes;
      t.stream.lines_per_group *= 2;
      run_tile<Kernel, R, 2>(t, o);
    } else {
      run_tile<Kernel, R, 1>(t, o);
    }
    p += two ? 2 : 1;
  }
}

struct Range {
  int begin, end;
};

template <class Kernel, class StagedKernel>
void run_product(const PackedMatrix &w, const Activations &a, Range rows, Range panels, Output out, uint8_t *scratch) {
  const int num_rows = rows.end - rows.begin;
  out.data += static_cast<size_t>(rows.begin) * out.stride;
  if (num_rows == 1) return run_few_rows<Kernel, 1>(w, a, rows.begin, panels.begin, panels.end, out);
  if (num_rows == 2) return run_few_rows<Kernel, 2>(w, a, rows.begin, panels.begin, panels.end, out);

  const Format to = num_rows > kStageRows ? staged_format(w.format) : w.format;
  const int tile_rows = to != w.format ? StagedKernel::kRows : Kernel::kRows;
  const int tiles = (num_rows + tile_rows - 1) / tile_rows;
  for (int p = panels.begin; p < panels.end; ++p) {
    const uint8_t *panel = w.panels + static_cast<size_t>(p) * w.panel_bytes;
    Tile t{panel, w.panel_bytes, w.padded_cols, a, rows.begin, {panel + w.panel_bytes, lines_per_group(w, tiles)}};
    const Output o{out.data + static_cast<size_t>(p) * kPanelWidth, out.stride, out.store};
    if (to == w.format) {
      run_rows<Kernel>(t, rows.end, o);
    } else {
      to == Format::f32 ? stage_bf16(panel, w.padded_cols, scratch) : stage_q4(w, panel, scratch);
      t.panel = scratch;
      t.panel_bytes = panel_bytes(to, w.padded_cols);
      run_rows<StagedKernel>(t, rows.end, o);
    }
  }
}

template <int Planes>
void run_integers(const PackedMatrix &w, const Activations &a, Range rows, Range panels, Output out, uint8_t *scratch) {
  using I8 = I8Kernel<Planes>;
  using Q4 = BlockKernel<Format::q4, Planes>;
  using Q4Min = BlockKernel<Format::q4_min, Planes>;
  using Q8 = BlockKernel<Format::q8, Planes>;
  using Q8Min = BlockKernel<Format::q8_min, Planes>;
  using Q8Half = BlockKernel<Format::q8_half, Planes>;
  switch (w.format) {
    case Format::i8: return run_product<I8, I8>(w, a, rows, panels, out, scratch);
    case Format::q4: return run_product<Q4, Q8>(w, a, rows, panels, out, scratch);
    case Format::q4_min: return run_product<Q4Min, Q8Min>(w, a, rows, panels, out, scratch);
    case Format::q8: return run_product<Q8, Q8>(w, a, rows, panels, out, scratch);
    case Format::q8_min: return run_product<Q8Min, Q8Min>(w, a, rows, panels, out, scratch);
    case Format::q8_half: return run_product<Q8Half, Q8Half>(w, a, rows, panels, out, scratch);
    default: return;
  }
}

// Rows of activations that one pass over the panels uses: they stay in the second-level cache.
int rows_a_pass(const Activations &a) {
  const size_t element = a.kind == ActivationKind::f32 ? 4 : a.kind == ActivationKind::i8 ? 1 : 2;
  const size_t rows = (size_t{384} << 10) / (static_cast<size_t>(a.padded_cols) * element);
  return static_cast<int>(smaller(larger(rows / 12 * 12, size_t{48}), size_t{480}));
}

}  // namespace

size_t linear_scratch_bytes(int padded_cols) { return sizeof(float) * static_cast<size_t>(padded_cols) * kPanelWidth; }

void linear(const PackedMatrix &w, const Activations &a, int row_begin, int row_end, int panel_begin, int panel_end,
            float *out, size_t out_stride, Store store, void *scratch) {
  const Range panels{panel_begin, panel_end};
  const Output output{out, out_stride, store};
  uint8_t *stage = static_cast<uint8_t *>(scratch);
  const int most = rows_a_pass(a), passes = (row_end - row_begin + most - 1) / most;
  const int pass = passes ? (row_end - row_begin + passes - 1) / passes : 1;
  for (int row = row_begin; row < row_end; row += pass) {
    const Range rows{row, smaller(row_end, row + pass)};
    switch (w.format) {
      case Format::f32: run_product<F32Kernel, F32Kernel>(w, a, rows, panels, output, stage); break;
      case Format::bf16: run_product<Bf16Kernel, F32Kernel>(w, a, rows, panels, output, stage); break;
      default:
        if (a.kind == ActivationKind::i15) {
          run_integers<2>(w, a, rows, panels, output, stage);
        } else {
          run_integers<1>(w, a, rows, panels, output, stage);
        }
    }
  }
}

// ---------------------------------------------------------------------------------------------- activations

namespace {

// One block: the largest magnitude becomes ±127, or ±127 · 128 in two planes, `low` behind `q` then. The sums of the halves
// are exact in floats, as their terms are integers.
template <int Planes>
FW_INLINE void prepare_block(const float *x, int8_t *q, int8_t *low_plane, ActivationBlock *block) {
  constexpr float kSteps = Planes == 1 ? 127.f : 127.f * 128.f;
  constexpr int N = kBlock / kLanes;
  F32 v[N], largest = set1(0.f), sum[2] = {set1(0.f), set1(0.f)};
  unroll<N>([&](auto n) FW_LAMBDA {
    v[n] = load(x + n * kLanes);
    largest = max_f32(largest, abs_f32(v[n]));
  });
  const float top = reduce_max(largest);
  const F32 inverse = set1(top > 0.f ? kSteps / top : 0.f);
  unroll<N>([&](auto n) FW_LAMBDA {
    const F32 rounded = round_f32(mul(v[n], inverse));
    if constexpr (Planes == 1) {
      store_s8(q + n * kLanes, rounded);
    } else {
      const F32 high = round_f32(mul(rounded, set1(1.f / 128.f)));
      store_s8(q + n * kLanes, high);
      store_s8(low_plane + n * kLanes, fma(high, set1(-128.f), rounded));
    }
    sum[2 * n / N] = add(sum[2 * n / N], rounded);
  });
  const int32_t low = static_cast<int32_t>(reduce_add(sum[0])), high = static_cast<int32_t>(reduce_add(sum[1]));
  block->scale = top * (1.f / kSteps);
  block->scaled_sum = block->scale * static_cast<float>(low + high);
  block->neg8_sum = -8 * (low + high);
  block->neg128_sum = -kDotBias * (low + high);
  block->neg128_half[0] = -kDotBias * low;
  block->neg128_half[1] = -kDotBias * high;
}

template <int Planes>
void prepare_blocks(const Activations &a, int row, const float *x) {
  int8_t *q = a.i8 + static_cast<size_t>(row) * a.stride;
  ActivationBlock *block = a.blocks + static_cast<size_t>(row) * a.block_stride;
  for (int k = 0; k < a.padded_cols; k += kBlock) prepare_block<Planes>(x + k, q + k, q + a.padded_cols + k, block++);
}

}  // namespace

void prepare_row(const Activations &a, int row, const float *x) {
  switch (a.kind) {
    case ActivationKind::f32:
      std::memcpy(a.f32 + static_cast<size_t>(row) * a.stride, x, sizeof(float) * static_cast<size_t>(a.padded_cols));
      return;
    case ActivationKind::bf16:
      for (int k = 0; k < a.padded_cols; k += kLanes) {
        store_bf16(a.bf16 + static_cast<size_t>(row) * a.stride + k, load(x + k));
      }
      return;
    case ActivationKind::i8: return prepare_blocks<1>(a, row, x);
    case ActivationKind::i15: return prepare_blocks<2>(a, row, x);
  }
}

}  // namespace foreword::kernels::FOREWORD_LEVEL
