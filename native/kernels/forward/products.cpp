#include "kernels/forward/products.h"

#include <algorithm>

namespace foreword::kernels {
namespace {

// A product is also divided by rows when there are fewer panels than this per thread, and enough rows.
constexpr int kPanelsPerThread = 8, kRowsPerCut = 48;
// Gate and up outputs held in scratch memory before they are multiplied.
constexpr int kGateFloats = 16384;

}  // namespace

void ProductInput::reserve(int rows, int cols, const KindSet &kinds, int num_threads) {
  shared.reserve(rows, cols, kinds);
  own.resize(size_t(num_threads));
  for (ActivationBuffer &buffer : own) buffer.reserve(kFewRows, cols, kinds);
}

Products::Products(Model &model)
    : isa_(model.isa), pool_(model.pool), activation_(model.config.activation), scratch_(size_t(model.pool.size())) {
  for (Scratch &scratch : scratch_) {
    scratch.linear.reserve(isa_.linear_scratch_bytes());
    scratch.rotated.reserve(size_t(model.widest_input()));
    scratch.gate.reserve(kGateFloats);
    scratch.up.reserve(kGateFloats);
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

// The first weights of this thread's share of its team's panels of all matrices side by side.
const uint8_t *Products::first_weights(int thread, const Linear *l) const {
  if (!l) return nullptr;
  const ThreadPool::Team &team = pool_.team(thread);
  int panel = member_share(num_panels(*l, team.group), team).begin;
  for (const Linear::Part &part : l->parts) {
    const PackedMatrix &matrix = part.matrix[team.group];
    const Share own = team_share(matrix.num_panels, pool_, team.group);
    if (panel < own.end - own.begin) return matrix.panel(own.begin + panel);
    panel -= own.end - own.begin;
  }
  return nullptr;
}

// A share is a range of the team's panels of all matrices side by side; with few panels, of panels × cuts of the rows.
void Products::linear(int thread, const Linear &l, const ActivationSet &a, Share rows, float *out, Store store,
                      const Linear *next, const LoraStep *lora) const {
  const ThreadPool::Team &team = pool_.team(thread);
  const int num_rows = rows.end - rows.begin, count = num_panels(l, team.group);
  int cuts = 1;
  if (count < kPanelsPerThread * team.size) cuts = std::clamp(num_rows / kRowsPerCut, 1, team.size);
  const Share share = member_share(count * cuts, team);
  void *scratch = scratch_[size_t(thread)].linear.data();
  for (int cut = share.begin / std::max(1, count); cut < cuts && cut * count < share.end; ++cut) {
    const Share r = share_of(num_rows, cut, cuts);
    const int begin = std::max(share.begin - cut * count, 0);
    const int end = std::min(share.end - cut * count, count);
    int first = 0;
    for (const Linear::Part &part : l.parts) {
      const PackedMatrix &matrix = part.matrix[team.group];
      const Share own = team_share(matrix.num_panels, pool_, team.group);
      const int last = first + own.end - own.begin, to_panel = own.begin - first;
      const int p0 = std::max(begin, first) + to_panel, p1 = std::min(end, last) + to_panel;
      if (p0 < p1) {
        const uint8_t *following = first_weights(thread, next);
        if (end > last) {
          const PackedMatrix &after = (&part + 1)->matrix[team.group];
          following = after.panel(team_share(after.num_panels, pool_, team.group).begin);
        }
        isa_.linear({matrix, a.of(matrix), rows.begin + r.begin, rows.begin + r.end, p0, p1, out + part.offset,
                     size_t(l.stride), store, following, scratch});
        if (lora) {
          lora->expand(matrix, int(&part - l.parts.data()), {rows.begin + r.begin, rows.begin + r.end}, p0, p1,
                       out + part.offset, size_t(l.stride));
        }
      }
      first = last;
    }
  }
}

// Both halves of a few panels are computed into scratch memory, then multiplied.
void Products::gated(int thread, const Mlp &mlp, const ActivationSet &a, Share rows, float *out,
                     const LoraStep *lora) const {
  const ThreadPool::Team &team = pool_.team(thread);
  const PackedMatrix &gate = mlp.gate.parts[0].matrix[team.group], &up = mlp.up.parts[0].matrix[team.group];
  const int width = isa_.panel_width, max_rows = kGateFloats / width;
  const Share all = team_share(gate.num_panels, pool_, team.group), part = member_share(all.end - all.begin, team);
  const Share panels{all.begin + part.begin, all.begin + part.end};
  const Scratch &own = scratch_[size_t(thread)];
  for (int row = rows.begin; row < rows.end; row += max_rows) {
    const int row_end = std::min(rows.end, row + max_rows), count = row_end - row;
    const int step = std::max(1, std::min(8, kGateFloats / (count * width)));
    for (int p = panels.begin; p < panels.end; p += step) {
      const int p_end = std::min(panels.end, p + step);
      const uint8_t *next_gate = p_end < panels.end ? gate.panel(p_end) : first_weights(thread, &mlp.down);
      const size_t wide = size_t((p_end - p) * width);
      // The kernels address outputs from row 0 and panel 0.
      const ptrdiff_t origin = -ptrdiff_t(row) * ptrdiff_t(wide) - ptrdiff_t(p) * width;
      auto half = [&](const PackedMatrix &matrix, int place, float *to, const uint8_t *next) {
        isa_.linear({matrix, a.of(matrix), row, row_end, p, p_end, to + origin, wide, Store::assign, next,
                     own.linear.data()});
        if (lora) lora->expand(matrix, place, {row, row_end}, p, p_end, to + origin, wide);
      };
      half(gate, 0, own.gate.data(), up.panel(p));
      half(up, 1, own.up.data(), next_gate);
      for (int r = 0; r < count; ++r) {
        const size_t at = size_t(r) * wide;
        isa_.gate_mul(activation_, own.gate.data() + at, own.up.data() + at, wide,
                      out + size_t(row + r) * mlp.gate.stride + size_t(p) * width);
      }
    }
  }
}

}  // namespace foreword::kernels
