// Products of parts of rows with a matrix each: those of heads, or of blocks of channels. The tokens of a block are
// multiplied by the matrix of a head by one thread, which reads what it prepares.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/forward/context.h"

namespace foreword::kernels {

// The rows of a head are far from each other: the processor does not foresee them.
template <bool IsWritten>
void prefetch_row(const float *row, int size) {
  for (int i = 0; i < size; i += 16) __builtin_prefetch(row + i, IsWritten);
}

class HeadProducts {
 public:
  // Outputs of a product: those of a token and a head, of which `out` has the part [outputs.begin, outputs.end).
  // ahead: a token whose outputs follow.
  struct Outputs {
    int token, ahead, head;
    const float *out;
    Share outputs;
  };

  explicit HeadProducts(int cols) : cols_(cols), padded_(cols) {}

  // Adds the matrices of all layers, each [rows, cols], and the memory of each thread.
  void add(const std::vector<const std::vector<Linear> *> &all, int num_threads) {
    for (const std::vector<Linear> *heads : all) {
      for (const Linear &head : *heads) head.add_kinds(kinds_);
    }
    prepared_.resize(size_t(num_threads));
    padded_.reserve(num_threads);
  }
  // Reserves the memory of a step.
  void reserve(const PassContext &ctx) {
    const KindSet kinds = ctx.with_loras(kinds_);
    for (ActivationBuffer &own : prepared_) own.reserve(kTokens, cols_, kinds);
  }

  // Calls write(Outputs) for the products of from(token, head), `cols` floats, with the matrix of the head and the
  // adapters of the step, for this thread's share of all tokens and heads.
  template <class From, class Write>
  void run(PassContext &ctx, int thread, const std::vector<Linear> &heads, From &&from, Write &&write) const {
    const int num_tokens = ctx.input.num_tokens, blocks = (num_tokens + kTokens - 1) / kTokens;
    const int num_heads = int(heads.size());
    ctx.pool.divide(thread, ctx.pool.team(thread), blocks * num_heads, 1, [&](Share part, int) {
      for (int unit = part.begin; unit < part.end; ++unit) {
        multiply(ctx, thread, heads, share_of(num_tokens, unit / num_heads, blocks), unit % num_heads, from, write);
      }
    });
  }

 private:
  static constexpr int kTokens = LoraStep::kTokensAlone;  // their rows stay in the caches until they are multiplied
  static constexpr int kRowsAhead = 8;                    // rows between the one in use and the one that is prefetched

  template <class From, class Write>
  void multiply(PassContext &ctx, int thread, const std::vector<Linear> &heads, Share tokens, int head, From &&from,
                Write &&write) const {
    const Linear &own = heads[size_t(head)];
    const PackedMatrix &matrix = *own.parts[0].matrix;
    const int width = ctx.isa.panel_width;
    const Share rows{0, tokens.end - tokens.begin};
    const ActivationSet set =
        ctx.products.prepare_own(thread, prepared_[size_t(thread)], cols_, rows.end, [&](int r) -> const float * {
          const float *source = from(tokens.begin + r, head);
          prefetch_row<false>(from(std::min(tokens.begin + r + kRowsAhead, tokens.end - 1), head), cols_);
          if (cols_ % kBlock == 0) return source;
          std::copy_n(source, cols_, padded_.row(thread));
          return padded_.row(thread);
        });
    const LoraRows loras = ctx.shrink_alone(thread, matrix, set, tokens);
    const Linear *next = head + 1 < int(heads.size()) ? &heads[size_t(head) + 1] : nullptr;
    auto write_rows = [&](float *out, size_t stride, Share part, Share panels) {
      const Share of_part{tokens.begin + part.begin, tokens.begin + part.end};
      loras.expand_part(matrix, 0, of_part, panels, out, stride);
      const Share outputs{panels.begin * width, std::min(panels.end * width, matrix.rows)};
      for (int r = part.begin; r < part.end; ++r, out += stride) {
        const int t = tokens.begin + r;
        write(Outputs{t, std::min(t + kRowsAhead, tokens.end - 1), head, out, outputs});
      }
    };
    ctx.products.alone(thread, own, set, rows, next, write_rows);
  }

  const int cols_;
  KindSet kinds_{};                         // those that the matrices take
  std::vector<ActivationBuffer> prepared_;  // [threads], the inputs of a block
  FloatRows padded_;                        // [threads, cols], a row with padding
};

}  // namespace foreword::kernels
