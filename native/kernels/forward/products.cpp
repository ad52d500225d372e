#include "kernels/forward/products.h"

#include <algorithm>

namespace foreword::kernels {
namespace {

// With this many rows per thread a product is divided by rows alone: a thread prepared its rows, and they are in its
// caches. It is also divided by rows when there are fewer panels than this per thread, and enough rows.
constexpr int kOwnRows = 128, kPanelsPerThread = 8, kRowsPerCut = 48;

// Writes zeros to the columns [begin, stride) of rows, after the last panel: those of a layer before may have been
// longer, and inputs of a product are prepared in whole blocks.
void clear_rest(float *out, Share rows, size_t begin, size_t stride) {
  for (int r = rows.begin; begin < stride && r < rows.end; ++r) {
    std::fill(out + size_t(r) * stride + begin, out + size_t(r + 1) * stride, 0.f);
  }
}

}  // namespace

void ProductInput::reserve(int rows, int cols, const KindSet &kinds, int num_threads) {
  shared.reserve(rows, cols, kinds);
  own.resize(size_t(num_threads));
  for (ActivationBuffer &buffer : own) buffer.reserve(kFewRows, cols, kinds);
}

Products::Products(Model &model)
    : isa_(model.isa),
      pool_(model.pool),
      activation_(model.config.activation),
      gate_alpha_(model.config.gate_alpha),
      gate_limit_(model.config.gate_limit),
      gate_scale_(model.config.gate_scale),
      scratch_(size_t(model.pool.size())) {
  for (Scratch &scratch : scratch_) {
    scratch.linear.reserve(isa_.linear_scratch_bytes());
    scratch.rotated.reserve(size_t(model.widest_input()));
    scratch.gate.reserve(kPartFloats);
    scratch.up.reserve(kPartFloats);
  }
}

// The panels of a team in all matrices.
int Products::num_panels(const Linear &l, int team) const {
  int count = 0;
  for (const Linear::Part &part : l.parts) {
    const Share own = team_share(part.matrix->num_panels, pool_, team);
    count += own.end - own.begin;
  }
  return count;
}

// Into how many parts a team divides the rows of a product.
int Products::num_cuts(int num_rows, int count, const ThreadPool::Team &team) const {
  if (num_rows >= kOwnRows * team.size) return team.size;
  return count < kPanelsPerThread * team.size ? std::clamp(num_rows / kRowsPerCut, 1, team.size) : 1;
}

// The first weights of this thread's share of its team's panels of all matrices side by side.
const uint8_t *Products::first_weights(int thread, const Linear *l, int num_rows) const {
  if (!l) return nullptr;
  const ThreadPool::Team &team = pool_.team(thread);
  const int count = num_panels(*l, team.group), cuts = num_cuts(num_rows, count, team);
  int panel = member_share(count * cuts, team).begin % std::max(1, count);
  for (const Linear::Part &part : l->parts) {
    const PackedMatrix &matrix = part.matrix[team.group];
    const Share own = team_share(matrix.num_panels, pool_, team.group);
    if (panel < own.end - own.begin) return matrix.panel(own.begin + panel);
    panel -= own.end - own.begin;
  }
  return nullptr;
}

void Products::linear(int thread, const Linear &l, const ActivationSet &a, Share rows, float *out, Store store,
                      const Linear *next, const LoraRows &loras, int place) const {
  const int group = pool_.team(thread).group;
  for_share(thread, rows, num_panels(l, group), [&](Share r, Share panels, int end) {
    int first = 0;
    for (const Linear::Part &part : l.parts) {
      const PackedMatrix &matrix = part.matrix[group];
      const Share own = team_share(matrix.num_panels, pool_, group);
      const int last = first + own.end - own.begin, to_panel = own.begin - first;
      const int p0 = std::max(panels.begin, first) + to_panel, p1 = std::min(panels.end, last) + to_panel;
      if (p0 < p1) {
        const uint8_t *following;
        if (p1 < own.end && end > panels.end) {
          following = matrix.panel(p1);
        } else if (end > last) {
          const PackedMatrix &after = (&part + 1)->matrix[group];
          following = after.panel(team_share(after.num_panels, pool_, group).begin);
        } else {
          following = first_weights(thread, next, rows.end - rows.begin);
        }
        isa_.linear({matrix, a.of(matrix), r.begin, r.end, p0, p1, out + part.offset, size_t(l.stride), store,
                     following, scratch_[size_t(thread)].linear.data()});
        loras.expand(matrix, place + int(&part - l.parts.data()), r, {p0, p1}, out + part.offset, size_t(l.stride));
        if (store == Store::assign && p1 == matrix.num_panels && &part == &l.parts.back()) {
          clear_rest(out, r, size_t(part.offset + p1 * isa_.panel_width), size_t(l.stride));
        }
      }
      first = last;
    }
  });
}

void Products::panel(int thread, const Linear &l, const ActivationSet &a, int row, int panel, float *out) const {
  const PackedMatrix &matrix = l.parts[0].matrix[pool_.team(thread).group];
  const Part part{{row, row + 1}, {panel, panel + 1}, size_t(isa_.panel_width), -1};
  isa_.linear(product(thread, matrix, a, part, out, nullptr));
}

void Products::gated(int thread, const Mlp &mlp, const ActivationSet &a, Share rows, float *out, const Linear &next,
                     const LoraRows &loras) const {
  const uint8_t *following = first_weights(thread, &next, rows.end - rows.begin);
  for_parts(thread, mlp.first().parts[0].matrix[pool_.team(thread).group], rows,
            [&](const Part &part) { gate(thread, {mlp, rows, out, loras}, a, part, following); });
}

// Both halves of a few panels are computed into scratch memory, then multiplied.
void Products::gate(int thread, const MlpRows &own, const ActivationSet &a, const Part &part,
                    const uint8_t *next) const {
  const Mlp &mlp = own.mlp;
  const int group = pool_.team(thread).group, width = isa_.panel_width;
  const PackedMatrix &first = mlp.first().parts[0].matrix[group], &up = mlp.up.parts[0].matrix[group];
  const bool has_gate = &first != &up;
  const Scratch &scratch = scratch_[size_t(thread)];
  const auto [rows, panels, stride, ahead] = part;
  auto half = [&](const PackedMatrix &matrix, int place, float *to, const uint8_t *following) {
    const MatrixProduct product = this->product(thread, matrix, a, part, to, following);
    isa_.linear(product);
    own.loras.expand(matrix, place, rows, panels, product.out, stride);
  };
  if (has_gate) half(first, 0, scratch.gate.data(), up.panel(panels.begin));
  half(up, has_gate, scratch.up.data(), ahead >= 0 ? first.panel(ahead) : next);
  const size_t column = size_t(panels.begin) * size_t(width);
  for (int row = rows.begin; row < rows.end; ++row) {
    const size_t at = size_t(row - rows.begin) * stride;
    float *gate = scratch.gate.data() + at, *x = scratch.up.data() + at;
    float *to = own.out + size_t(row) * size_t(mlp.up.stride) + column;
    if (mlp.up_bias) isa_.add_row(mlp.up_bias + column, stride, x);
    if (has_gate && mlp.gate_bias) isa_.add_row(mlp.gate_bias + column, stride, gate);
    if (has_gate && gate_limit_ > 0.f) {
      isa_.clamped_gate_mul(gate_alpha_, gate_limit_, gate, x, stride, to);
    } else if (has_gate) {
      for (size_t i = 0; gate_scale_ != 1.f && i < stride; ++i) gate[i] *= gate_scale_;
      for (size_t i = 0; mlp.limit > 0.f && i < stride; ++i) {  // NaN remains
        gate[i] = std::min(gate[i], mlp.limit);
        x[i] = std::clamp(x[i], -mlp.limit, mlp.limit);
      }
      isa_.gate_mul(mlp.limit > 0.f ? Gate::silu : activation_, gate, x, stride, to);
    } else {
      if (mlp.xielu) {
        isa_.xielu(mlp.xielu, stride, x);
      } else {
        isa_.activate(activation_, stride, x);
      }
      std::copy_n(x, stride, to);
    }
  }
  if (panels.end == up.num_panels) clear_rest(own.out, rows, column + stride, size_t(mlp.up.stride));
}

}  // namespace foreword::kernels
