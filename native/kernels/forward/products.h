// Matrix products of a forward pass: preparing their input rows and dividing their output panels between the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/forward/lora_rows.h"

namespace foreword::kernels {

// Buffers for the prepared input of a product. Up to kFewRows rows are prepared by every thread into its own buffer,
// which is cheaper than a barrier; more rows are prepared by all threads together into the shared buffer.
struct ProductInput {
  static constexpr int kFewRows = 2;

  void reserve(int rows, int cols, const KindSet &kinds, int num_threads);

  ActivationBuffer shared;
  std::vector<ActivationBuffer> own;  // [num_threads]
};

// Every function below is called by all threads of the region and does the share of `thread` (ThreadPool::divide).
class Products {
  static constexpr int kPartFloats = 16384;  // outputs that are held in scratch memory

 public:
  explicit Products(Model &model);

  // Prepares rows [0, rows) of `cols` inputs, row r read from row(r), in every kind of `input`. On return all rows can
  // be read by this thread.
  template <class Row>
  ActivationSet prepare(int thread, const ProductInput &input, int cols, int rows, Row &&row) {
    if (rows > ProductInput::kFewRows) return prepare_shared(thread, input.shared, cols, rows, row);
    return prepare_own(thread, input.own[size_t(thread)], cols, rows, row);
  }
  // As prepare, by this thread alone.
  template <class Row>
  ActivationSet prepare_own(int thread, const ActivationBuffer &buffer, int cols, int rows, Row &&row) const {
    const ActivationSet set = buffer.view(rows, cols);
    for (int r = 0; r < rows; ++r) prepare_row(thread, set, r, row(r));
    return set;
  }
  // The inputs that the last call of `prepare` with this input prepared, of as many rows and columns.
  ActivationSet prepared(int thread, const ProductInput &input, int cols, int rows) const {
    return (rows > ProductInput::kFewRows ? input.shared : input.own[size_t(thread)]).view(rows, cols);
  }
  // after(set, r, x): row r is prepared from x = row(r).
  template <class Row, class After>
  ActivationSet prepare_shared(int thread, const ActivationBuffer &buffer, int cols, int rows, Row &&row,
                               After &&after) {
    const ActivationSet set = buffer.view(rows, cols);
    pool_.divide(thread, pool_.all(thread), rows, 1, [&](Share part, int) {
      for (int r = part.begin; r < part.end; ++r) {
        const float *x = row(r);
        prepare_row(thread, set, r, x);
        after(set, r, x);
      }
    });
    pool_.barrier();
    return set;
  }
  template <class Row>
  ActivationSet prepare_shared(int thread, const ActivationBuffer &buffer, int cols, int rows, Row &&row) {
    return prepare_shared(thread, buffer, cols, rows, row, [](const ActivationSet &, int, const float *) {});
  }
  // As prepare_shared, with row r the prepared row sources[r] of `from`.
  ActivationSet gather(int thread, const ActivationBuffer &buffer, const ActivationSet &from, int cols, int rows,
                       const int *sources) {
    const ActivationSet set = buffer.view(rows, cols);
    pool_.divide(thread, pool_.all(thread), rows, 1, [&](Share part, int) { set.copy_rows(from, sources, part); });
    pool_.barrier();
    return set;
  }

  // out (=, +=) a Wᵀ for `rows`. `next`: the product that this thread computes after this one, whose first weights are
  // prefetched; null if unknown. `loras`: the adapters of the rows, shrunk for these matrices, from that at `place` on.
  void linear(int thread, const Linear &l, const ActivationSet &a, Share rows, float *out, Store store,
              const Linear *next = nullptr, const LoraRows &loras = {}, int place = 0) const;

  // Computes a product with a matrix alone, without adapters, a few rows and panels at a time: f(out, stride, rows,
  // panels), with `out` in memory of this thread from the first row and panel on.
  template <class F>
  void in_parts(int thread, const Linear &l, const ActivationSet &a, Share rows, F &&f) const {
    const PackedMatrix &matrix = l.parts[0].matrix[pool_.team(thread).group];
    for_parts(thread, matrix, rows, [&](const Part &part) { compute(thread, matrix, a, part, nullptr, f); });
  }

  // As in_parts, of panels that depend on their number and the thread alone: no other thread gets them, of any product
  // with as many. `next`: such a product that this thread computes after this one; null if unknown.
  template <class F>
  void in_columns(int thread, const Linear &l, const ActivationSet &a, Share rows, const Linear *next, F &&f) const {
    const PackedMatrix &matrix = l.parts[0].matrix[pool_.team(thread).group];
    const Share all = team_share(matrix.num_panels, pool_, pool_.team(thread).group);
    const int count = all.end - all.begin;
    const Share pairs = member_share((count + 1) / 2, pool_.team(thread));
    const Share panels{all.begin + 2 * pairs.begin, all.begin + std::min(2 * pairs.end, count)};
    multiply(thread, matrix, a, rows, panels, next, f);
  }

  // As in_parts, of all panels of the team, by this thread alone. `next`: the matrix that it probably multiplies after
  // this one; null if unknown.
  template <class F>
  void alone(int thread, const Linear &l, const ActivationSet &a, Share rows, const Linear *next, F &&f) const {
    const PackedMatrix &matrix = l.parts[0].matrix[pool_.team(thread).group];
    multiply(thread, matrix, a, rows, team_share(matrix.num_panels, pool_, pool_.team(thread).group), next, f);
  }

  // One panel of a row, by this thread alone: out [panel_width].
  void panel(int thread, const Linear &l, const ActivationSet &a, int row, int panel, float *out) const;

  // out = act(a Wgateᵀ + gate_bias) * (a Wupᵀ + up_bias), or without a gate act(a Wupᵀ + up_bias), for `rows`. `next`:
  // as in linear.
  void gated(int thread, const Mlp &mlp, const ActivationSet &a, Share rows, float *out, const Linear &next,
             const LoraRows &loras = {}) const;

  // An MLP, the rows of the input that it takes, where its outputs are, and the adapters of the rows.
  struct MlpRows {
    const Mlp &mlp;
    Share rows;
    float *out;
    LoraRows loras;
  };
  // As gated, of `count` MLPs of one shape, whose panels are divided side by side: of(i) is the MlpRows of number i.
  template <class Of>
  void gated_each(int thread, int count, const ActivationSet &a, const Linear &next, Of &&of) const {
    const ThreadPool::Team &team = pool_.team(thread);
    auto first_of = [&](const Mlp &mlp) -> const PackedMatrix & { return mlp.first().parts[0].matrix[team.group]; };
    const Share all = team_share(first_of(of(0).mlp).num_panels, pool_, team.group);
    const int panels = all.end - all.begin;
    pool_.divide(thread, team, count * panels, 2, [&](Share part, int end) {
      for (int i = part.begin / panels; i < count && i * panels < part.end; ++i) {
        const MlpRows now = of(i);
        const int first = i * panels, last = first + panels, to_panel = all.begin - first;
        const uint8_t *following =
            end > last ? first_of(of(i + 1).mlp).panel(all.begin) : first_weights(thread, &next, 1);
        for_blocks(now.rows, {std::max(part.begin, first) + to_panel, std::min(part.end, last) + to_panel},
                   std::min(end, last) + to_panel,
                   [&](const Part &block) { gate(thread, now, a, block, following); });
      }
    });
  }

 private:
  struct Scratch {
    Buffer<uint8_t> linear;
    Buffer<float> rotated, gate, up;
  };

  void prepare_row(int thread, const ActivationSet &set, int r, const float *x) const {
    for (int kind = 0; kind < kNumActivationKinds; ++kind) {
      if (set.used[kind]) isa_.prepare_row(set.kinds[kind], r, x, scratch_[size_t(thread)].rotated.data());
    }
  }
  // Calls f(rows, panels, end) for parts of a product with `count` panels: of the panels of all cuts of the rows, one
  // cut after the other. `end`: of the panels in the same cut that this thread probably multiplies next.
  template <class F>
  void for_share(int thread, Share rows, int count, F &&f) const {
    const ThreadPool::Team &team = pool_.team(thread);
    const int num_rows = rows.end - rows.begin, cuts = num_cuts(num_rows, count, team);
    // An even number at a time: kernels multiply few rows by two panels at once.
    pool_.divide(thread, team, count * cuts, 2, [&](Share part, int end) {
      for (int cut = part.begin / std::max(1, count); cut < cuts && cut * count < part.end; ++cut) {
        const Share r = share_of(num_rows, cut, cuts);
        const Share panels{std::max(part.begin - cut * count, 0), std::min(part.end - cut * count, count)};
        f(Share{rows.begin + r.begin, rows.begin + r.end}, panels, std::min(end - cut * count, count));
      }
    });
  }

  // Outputs of a product that are held in scratch memory, rows `stride` apart. ahead: the panel that this thread
  // probably multiplies next; −1: none in this share.
  struct Part {
    Share rows, panels;
    size_t stride;
    int ahead;
  };
  // Calls f(part) for parts of this thread's share.
  template <class F>
  void for_parts(int thread, const PackedMatrix &matrix, Share rows, F &&f) const {
    const Share all = team_share(matrix.num_panels, pool_, pool_.team(thread).group);
    for_share(thread, rows, all.end - all.begin, [&](Share r, Share panels, int end) {
      for_blocks(r, {all.begin + panels.begin, all.begin + panels.end}, all.begin + end, f);
    });
  }
  // Calls f(part) for parts of these rows and panels. `end`: as in for_share.
  template <class F>
  void for_blocks(Share rows, Share panels, int end, F &&f) const {
    const int width = isa_.panel_width, most_rows = kPartFloats / width;
    for (int row = rows.begin; row < rows.end; row += most_rows) {
      const int row_end = std::min(rows.end, row + most_rows);
      const int step = std::clamp(kPartFloats / ((row_end - row) * width), 1, 8);
      for (int p = panels.begin; p < panels.end; p += step) {
        const int p_end = std::min(panels.end, p + step);
        f(Part{{row, row_end}, {p, p_end}, size_t((p_end - p) * width), p_end < end ? p_end : -1});
      }
    }
  }
  // The product of a part into scratch memory at `to`.
  MatrixProduct product(int thread, const PackedMatrix &matrix, const ActivationSet &a, const Part &part, float *to,
                        const uint8_t *next) const {
    // The kernels address outputs from row 0 and panel 0.
    const ptrdiff_t origin = ptrdiff_t(part.rows.begin) * ptrdiff_t(part.stride) +
                             ptrdiff_t(part.panels.begin) * isa_.panel_width;
    return {matrix, a.of(matrix), part.rows.begin, part.rows.end, part.panels.begin, part.panels.end, to - origin,
            part.stride, Store::assign, next, scratch_[size_t(thread)].linear.data()};
  }

  // Computes these panels: see in_parts. `next`: a matrix whose panels from the first of these on follow, or null.
  template <class F>
  void multiply(int thread, const PackedMatrix &matrix, const ActivationSet &a, Share rows, Share panels,
                const Linear *next, F &&f) const {
    const PackedMatrix *after = next ? &next->parts[0].matrix[pool_.team(thread).group] : nullptr;
    const uint8_t *following = after ? after->panel(panels.begin) : nullptr;
    for_blocks(rows, panels, panels.end, [&](const Part &part) { compute(thread, matrix, a, part, following, f); });
  }
  // Computes a part: see in_parts. `next`: the weights after those of its share.
  template <class F>
  void compute(int thread, const PackedMatrix &matrix, const ActivationSet &a, const Part &part, const uint8_t *next,
               F &&f) const {
    float *out = scratch_[size_t(thread)].gate.data();
    isa_.linear(product(thread, matrix, a, part, out, part.ahead < 0 ? next : matrix.panel(part.ahead)));
    f(out, part.stride, part.rows, part.panels);
  }

  // The outputs of a part of an MLP's panels. `next`: the weights after those of its share.
  void gate(int thread, const MlpRows &own, const ActivationSet &a, const Part &part, const uint8_t *next) const;

  int num_panels(const Linear &l, int team) const;
  int num_cuts(int num_rows, int count, const ThreadPool::Team &team) const;
  const uint8_t *first_weights(int thread, const Linear *l, int num_rows) const;

  const Isa &isa_;
  ThreadPool &pool_;
  const Gate activation_;
  const float gate_alpha_, gate_limit_, gate_scale_;
  std::vector<Scratch> scratch_;  // [num_threads]
};

}  // namespace foreword::kernels
