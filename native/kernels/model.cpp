#include "kernels/model.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace foreword::kernels {

ActivationKind activation_kind(Format format, bool exact, const Isa &isa) {
  switch (format) {
    case Format::f32: return ActivationKind::f32;
    case Format::bf16: return isa.bf16_dot ? ActivationKind::bf16 : ActivationKind::f32;
    case Format::i8: return ActivationKind::i8_rotated;
    default: return exact ? ActivationKind::i15 : ActivationKind::i8;
  }
}

namespace {

// What a row of `padded` inputs consists of.
struct RowParts {
  RowParts(ActivationKind kind, size_t padded) {
    const bool bytes = kind == ActivationKind::i8 || kind == ActivationKind::i8_rotated;
    const size_t element = kind == ActivationKind::f32 ? 4 : bytes ? 1 : 2;
    pieces = (padded * element + kPieceBytes - 1) / kPieceBytes;
    const bool floats = kind == ActivationKind::f32 || kind == ActivationKind::bf16;
    blocks = floats ? 0 : kind == ActivationKind::i8_rotated ? 1 : padded / kBlock;
  }
  size_t pieces, blocks;
};

// The layout of `rows` rows in the memory at `p`; returns its size. The pieces of a row are an odd number of lines
// apart, so that they are in different sets of the caches.
size_t lay_out(ActivationKind kind, int rows, int cols, uint8_t *p, Activations *a) {
  const size_t count = size_t(rows) | 1, padded = size_t((cols + kBlock - 1) / kBlock * kBlock);
  const auto [pieces, blocks] = RowParts(kind, padded);
  const size_t data = count * pieces * kPieceBytes;
  a->kind = kind;
  a->padded_cols = int(padded);
  a->piece_stride = count * kPieceBytes;
  a->block_stride = count;
  a->data = p;
  a->blocks = reinterpret_cast<ActivationBlock *>(p + data);
  return data + std::max((count * blocks + kRowsPastEnd) * sizeof(ActivationBlock), size_t(kRowsPastEnd * kPieceBytes));
}

}  // namespace

void ActivationBuffer::reserve(int rows, int cols, const KindSet &kinds) {
  used_ = kinds;
  for (int kind = 0; kind < kNumActivationKinds; ++kind) {
    Activations unused;
    if (kinds[kind]) memory_[kind].reserve(lay_out(ActivationKind(kind), rows, cols, nullptr, &unused));
  }
}

ActivationSet ActivationBuffer::view(int rows, int cols) const {
  ActivationSet set;
  set.used = used_;
  for (int kind = 0; kind < kNumActivationKinds; ++kind) {
    if (used_[kind]) lay_out(ActivationKind(kind), rows, cols, memory_[kind].data(), &set.kinds[kind]);
  }
  return set;
}

void ActivationSet::copy_rows(const ActivationSet &from, const int *from_rows, Share rows) const {
  for (int kind = 0; kind < kNumActivationKinds; ++kind) {
    if (!used[kind] || !from.used[kind]) continue;
    const Activations &source = from.kinds[kind], &to = kinds[kind];
    const RowParts parts(to.kind, size_t(to.padded_cols));
    for (size_t i = 0; i < parts.pieces; ++i) {  // the pieces of all rows are adjacent
      const uint8_t *piece = source.data + i * source.piece_stride;
      uint8_t *out = to.data + i * to.piece_stride;
      for (int row = rows.begin; row < rows.end; ++row) {
        std::memcpy(out + size_t(row) * kPieceBytes, piece + size_t(from_rows[row]) * kPieceBytes, kPieceBytes);
      }
    }
    for (size_t i = 0; i < parts.blocks; ++i) {
      const ActivationBlock *blocks = source.blocks + i * source.block_stride;
      ActivationBlock *out = to.blocks + i * to.block_stride;
      for (int row = rows.begin; row < rows.end; ++row) out[row] = blocks[from_rows[row]];
    }
  }
}

Model::Model(const ModelConfig &config, const KVConfig &kv_config, const Isa &isa, int num_threads,
             CpuGroups groups)
    : config(config),
      recurrent(kv_config.recurrent),
      isa(isa),
      pool(num_threads, std::move(groups)),
      kv(kv_config),
      padded_dim(kv_config.heads.padded_dim),
      heads{kv_config.heads},
      arenas_(size_t(pool.num_teams())) {
  heads.front().num_heads = config.num_heads;
  heads.insert(heads.end(), kv_config.more_heads.begin(), kv_config.more_heads.end());
  if (pool.num_teams() > 1) kv.use_small_pages();
}

void Model::touch_cache() {
  pool.run([&](int thread) {
    const ThreadPool::Team &team = pool.team(thread);
    const Share blocks = member_share(kv.config().num_ids(), team);
    const Share heads = team_share(kv.config().heads.num_kv_heads, pool, team.group);
    if (heads.begin < heads.end) kv.touch(blocks.begin, blocks.end, heads.begin, heads.end);
  });
}

// Calls f(view, group, panel, scratch) for each panel, on a thread of the team that has it.
template <class F>
void Model::for_panels(const PackedMatrix *views, F &&f) {
  const size_t scratch_bytes = (isa.pack_scratch_bytes(views->padded_cols) + 63) / 64 * 64;
  Mapping scratch(scratch_bytes * size_t(pool.size()));
  pool.run([&](int thread) {
    const ThreadPool::Team &team = pool.team(thread);
    const Share panels = team_share(views->num_panels, pool, team.group);
    const Share share = member_share(panels.end - panels.begin, team);
    uint8_t *own = scratch.data() + scratch_bytes * size_t(thread);
    for (int panel = panels.begin + share.begin; panel < panels.begin + share.end; ++panel) {
      f(views[team.group], team.group, panel, own);
    }
  });
}

std::unique_ptr<PackedMatrix[]> Model::lay_out(int rows, int cols, Format format, bool exact) {
  auto views = std::make_unique<PackedMatrix[]>(size_t(pool.num_teams()));
  PackedMatrix *m = views.get();
  m->format = format;
  m->activations = activation_kind(format, exact, isa);
  m->index = int(matrices_.size());
  m->rows = rows;
  m->cols = cols;
  m->padded_cols = (cols + kBlock - 1) / kBlock * kBlock;
  widest_input_ = std::max(widest_input_, m->padded_cols);
  m->num_panels = (rows + isa.panel_width - 1) / isa.panel_width;
  m->panel_bytes = isa.panel_bytes(format, m->padded_cols);
  for (int team = 1; team < pool.num_teams(); ++team) views[size_t(team)] = *m;
  return views;
}

template <class F>
const PackedMatrix *Model::add_matrix(int rows, int cols, Format format, bool exact, F &&pack) {
  auto views = lay_out(rows, cols, format, exact);
  const PackedMatrix *m = views.get();
  for (int team = pool.num_teams() - 1; team >= 0; --team) {
    const Share own = team_share(m->num_panels, pool, team);
    uint8_t *memory = arenas_[size_t(team)].allocate(m->panel_bytes * size_t(own.end - own.begin));
    views[size_t(team)].panels = memory - m->panel_bytes * size_t(own.begin);
  }
  std::vector<int> packed_on(size_t(m->num_panels), -1);
  for_panels(m, [&](const PackedMatrix &view, int group, int panel, void *scratch) {
    pack(view, group, panel, scratch);
    packed_on[size_t(panel)] = current_cpu();
  });
  matrices_.push_back(std::move(views));
  packed_on_.push_back(std::move(packed_on));
  return matrices_.back().get();
}

const PackedMatrix *Model::pack(const SourceMatrix &source, Format format, bool exact) {
  return add_matrix(source.rows, source.cols, format, exact,
                    [&](const PackedMatrix &view, int, int panel, void *scratch) {
                      isa.pack_panel(source, view, panel, scratch);
                    });
}

const PackedMatrix *Model::attach(const uint8_t *panels, size_t bytes, int rows, int cols, Format format, bool exact) {
  auto views = lay_out(rows, cols, format, exact);
  PackedMatrix *m = views.get();
  const size_t needed = product(m->panel_bytes, size_t(m->num_panels));
  if (bytes != needed) {
    throw std::invalid_argument("panels: " + std::to_string(bytes) + " bytes, the matrix has " +
                                std::to_string(needed));
  }
  if (reinterpret_cast<uintptr_t>(panels) % 64) throw std::invalid_argument("panels are not aligned to 64 bytes");
  if (pool.num_teams() > 1) throw std::invalid_argument("panels: each team of threads has those that it packs");
  m->panels = const_cast<uint8_t *>(panels);  // nothing writes to panels after packing
  attached_bytes_ += bytes;
  matrices_.push_back(std::move(views));
  packed_on_.emplace_back(size_t(m->num_panels), -1);
  return m;
}

const PackedMatrix *Model::again(const PackedMatrix *matrix) {
  const size_t teams = size_t(pool.num_teams());
  auto views = std::make_unique<PackedMatrix[]>(teams);
  std::copy_n(matrix, teams, views.get());
  for (size_t team = 0; team < teams; ++team) views[team].index = int(matrices_.size());
  matrices_.push_back(std::move(views));
  packed_on_.push_back(packed_on(*matrix));
  return matrices_.back().get();
}

void Model::set_screen(const PackedMatrix *matrix, const float *errors, float most) {
  const PackedMatrix *head = lm_head.parts.at(0).matrix;
  screen = {make_linear({matrix}), errors, most, 3 * matrix->panel_bytes <= 2 * head->panel_bytes};
}

void Model::make_screen() {
  if (logits_bias) return;
  const PackedMatrix *head = lm_head.parts.at(0).matrix;
  float *errors = reinterpret_cast<float *>(
      arenas_[0].allocate(sizeof(float) * size_t(head->num_panels) * size_t(isa.panel_width)));
  std::vector<float> most(size_t(head->num_panels));
  const auto pack = [&](const PackedMatrix &view, int group, int panel, void *scratch) {
    most[size_t(panel)] = isa.pack_screen(head[group], view, panel, scratch, errors + panel * isa.panel_width);
  };
  const PackedMatrix *matrix = head;
  if (head->format == Format::i8) {
    for_panels(head, pack);
  } else {
    matrix = add_matrix(head->rows, head->cols, Format::i8, false, pack);
  }
  const float largest = *std::max_element(most.begin(), most.end());
  if (std::isfinite(largest)) set_screen(matrix, errors, largest);
}

size_t Model::packed_bytes() const {
  size_t bytes = attached_bytes_;
  for (const Arena &arena : arenas_) bytes += arena.used();
  return bytes;
}

int Model::most_rotary_pairs() const {
  size_t most = 0;
  for (const Rope &rope : ropes) most = std::max(most, rope.inv_freq.size());
  return int(most);
}

int Model::qkv_stride(bool of_recurrent) const {
  int most = 0;
  for (const Layer &layer : layers) {
    if (bool(layer.recurrent) == of_recurrent) most = std::max(most, layer.qkv.stride);
  }
  return most;
}

Vector Model::copy_vector(const float *data, int size) {
  float *copy = reinterpret_cast<float *>(arenas_[0].allocate(sizeof(float) * size_t(padded_row(size))));
  std::memcpy(copy, data, sizeof(float) * size_t(size));
  return copy;
}

size_t Model::add_lora(int id, const std::vector<std::pair<const PackedMatrix *, LoraSource>> &sources,
                       std::map<Vector, std::vector<float>> vectors) {
  auto padded = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
  LoraAdapter adapter;
  adapter.pairs.resize(matrices_.size());
  size_t bytes = 0;
  for (const auto &[matrix, source] : sources) {
    LoraPair &pair = adapter.pairs[size_t(matrix->index)];
    pair.format = matrix->format == Format::f32 ? LoraFormat::f32 : LoraFormat::i8;
    bytes += padded(isa.pack_lora(source, &pair, nullptr, nullptr));
    adapter.takes_bytes = adapter.takes_bytes || pair.format == LoraFormat::i8;
    adapter.num_vectors = std::max(adapter.num_vectors, pair.num_vectors);
  }
  adapter.memory = Mapping(bytes);
  uint8_t *next = adapter.memory.data();
  Buffer<float> scratch;
  scratch.reserve(size_t(widest_input_));
  for (const auto &[matrix, source] : sources) {
    next += padded(isa.pack_lora(source, &adapter.pairs[size_t(matrix->index)], next, scratch.data()));
  }
  auto changes = [&](const Linear &l) { return !l.parts.empty() && adapter.pair_of(*l.parts[0].matrix).padded_rank; };
  for_each_moe([&](const Moe &moe) {
    for (const Mlp &expert : moe.experts) {
      adapter.changes_experts |= changes(expert.gate) || changes(expert.up) || changes(expert.down);
    }
  });
  for (const auto &[vector, change] : vectors) bytes += sizeof(float) * change.size();
  adapter.vectors = std::move(vectors);
  loras.insert_or_assign(id, std::move(adapter));
  return bytes;
}

Linear Model::make_linear(const std::vector<const PackedMatrix *> &matrices) {
  Linear linear;
  for (const PackedMatrix *m : matrices) {
    linear.cols = m->cols;
    linear.parts.push_back({m, linear.stride});
    linear.stride += padded_row(m->rows);
  }
  return linear;
}

}  // namespace foreword::kernels
