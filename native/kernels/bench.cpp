#include "kernels/bench.h"

#include <atomic>
#include <vector>

#include "kernels/clock.h"
#include "kernels/kv_cache.h"
#include "kernels/model.h"

namespace foreword::kernels {
namespace {

// Small pseudorandom numbers.
void fill(float *x, size_t count) {
  uint32_t state = 1;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    x[i] = float(int32_t(state)) * 1e-10f;
  }
}

template <class Work>
double best_of(int rounds, Work &&work) {
  double best = 1e30;
  for (int round = 0; round < rounds; ++round) {
    const double start = now();
    work();
    best = std::min(best, now() - start);
  }
  return best;
}

}  // namespace

double time_linear(const LinearShape &shape, const Isa &isa, ThreadPool &pool, int rounds) {
  const size_t outputs = size_t(shape.outputs), inputs = size_t(shape.inputs);
  Buffer<float> weights, x, out, rotated;
  fill(weights.reserve(outputs * inputs), outputs * inputs);
  const int stride = padded_row(shape.inputs), out_stride = padded_row(shape.outputs);
  fill(x.reserve(size_t(shape.rows) * stride), size_t(shape.rows) * stride);
  out.reserve(size_t(shape.rows) * out_stride);
  rotated.reserve(size_t(stride));

  const SourceMatrix source{Source::f32, shape.outputs, shape.inputs, inputs * sizeof(float),
                            reinterpret_cast<const uint8_t *>(weights.data())};
  const ActivationKind kind = activation_kind(shape.format, shape.exact, isa);
  Arena arena;
  std::vector<PackedMatrix> matrices;
  Buffer<uint8_t> scratch;
  const int padded = (shape.inputs + kBlock - 1) / kBlock * kBlock;
  const size_t own = (std::max(isa.pack_scratch_bytes(padded), isa.linear_scratch_bytes()) + 63) / 64 * 64;
  scratch.reserve(own * size_t(pool.size()));
  for (int copy = 0; copy < shape.copies; ++copy) {
    const int num_panels = (shape.outputs + isa.panel_width - 1) / isa.panel_width;
    PackedMatrix m{shape.format, kind, shape.outputs, shape.inputs, padded, num_panels,
                   isa.panel_bytes(shape.format, padded), nullptr};
    m.panels = arena.allocate(m.panel_bytes * size_t(m.num_panels));
    pool.run([&](int thread) {
      const Share share = share_of(m.num_panels, thread, pool.size());
      for (int p = share.begin; p < share.end; ++p) isa.pack_panel(source, m, p, scratch.data() + own * size_t(thread));
    });
    matrices.push_back(m);
  }

  KindSet kinds{};
  kinds[int(kind)] = true;
  ActivationBuffer buffer;
  buffer.reserve(shape.rows, shape.inputs, kinds);
  const ActivationSet set = buffer.view(shape.rows, shape.inputs);
  for (int r = 0; r < shape.rows; ++r) {
    isa.prepare_row(set.kinds[int(kind)], r, x.data() + size_t(r) * stride, rotated.data());
  }

  const double seconds = best_of(rounds, [&] {
    pool.run([&](int thread) {
      for (const PackedMatrix &m : matrices) {
        const Share share = share_of(m.num_panels, thread, pool.size());
        const uint8_t *next = &m < &matrices.back() ? (&m + 1)->panel(share.begin) : nullptr;
        isa.linear(m, set.kinds[int(kind)], 0, shape.rows, share.begin, share.end, out.data(), size_t(out_stride),
                   Store::assign, next, scratch.data() + own * size_t(thread));
        pool.barrier();
      }
    });
  });
  return seconds / shape.copies;
}

double time_attention(const AttentionShape &shape, const Isa &isa, ThreadPool &pool, int rounds) {
  constexpr int kBlockSize = 16;
  const int dim = (shape.head_dim + kTile - 1) / kTile * kTile;
  const int blocks = (shape.context + kBlockSize - 1) / kBlockSize;
  KVCache cache(
      {shape.format, 1 + shape.num_reqs * blocks, kBlockSize, shape.copies, shape.num_kv_heads, shape.head_dim, dim});
  const AttentionConfig config{shape.num_heads, shape.num_kv_heads, shape.head_dim, dim, 0.f, 0};
  const size_t own = (isa.attention_scratch_bytes(config) + 63) / 64 * 64;
  const size_t tokens = size_t(shape.num_reqs) * size_t(shape.queries);
  const size_t q_stride = size_t(shape.num_heads) * dim, out_stride = size_t(shape.num_heads) * shape.head_dim;
  Buffer<uint8_t> scratch;
  Buffer<float> q, out;
  scratch.reserve(own * size_t(pool.size()));
  fill(q.reserve(tokens * q_stride), tokens * q_stride);
  out.reserve(tokens * out_stride);

  // Blocks in a scattered order, as in a pool in use.
  std::vector<int32_t> table(size_t(shape.num_reqs * blocks));
  const int total = shape.num_reqs * blocks;
  int step = total * 5 / 13 | 1;
  while (total % step == 0 && step > 1) step += 2;
  for (int i = 0; i < total; ++i) table[size_t(i)] = 1 + int32_t(int64_t(i) * step % total);
  for (int copy = 0; copy < shape.copies; ++copy) {
    const KVLayer kv = cache.layer(copy);
    for (int64_t slot = kBlockSize; slot < int64_t(total + 1) * kBlockSize; ++slot) {
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        isa.store_kv(kv, slot, head, q.data(), q.data(), scratch.data());
      }
    }
  }

  const int per_tile = isa.attention_queries(config), tiles = (shape.queries + per_tile - 1) / per_tile;
  const int tasks = shape.num_reqs * tiles * shape.num_kv_heads;
  const double seconds = best_of(rounds, [&] {
    std::vector<std::atomic<int>> next(size_t(shape.copies));
    pool.run([&](int thread) {
      for (int copy = 0; copy < shape.copies; ++copy) {
        const KVLayer kv = cache.layer(copy);
        for (int i; (i = next[size_t(copy)].fetch_add(1, std::memory_order_relaxed)) < tasks;) {
          const int head = i % shape.num_kv_heads, tile = tiles - 1 - i / shape.num_kv_heads % tiles;
          const int req = i / shape.num_kv_heads / tiles, first = tile * per_tile;
          const size_t token = size_t(req) * shape.queries + first;
          AttentionTile t{};
          t.num_queries = std::min(per_tile, shape.queries - first);
          t.first_position = shape.context - shape.queries + first;
          t.kv_head = head;
          t.queries = q.data() + token * q_stride;
          t.query_stride = q_stride;
          t.block_table = table.data() + size_t(req) * blocks;
          t.key_end = t.first_position + t.num_queries;
          t.out = out.data() + token * out_stride;
          t.out_stride = out_stride;
          const int later = std::min(tasks - 1, i + pool.size());
          t.next = {table.data() + size_t(later / shape.num_kv_heads / tiles) * blocks, later % shape.num_kv_heads, 0,
                    shape.context};
          isa.attend(kv, config, t, scratch.data() + own * size_t(thread));
        }
        pool.barrier();
      }
    });
  });
  return seconds / shape.copies;
}

}  // namespace foreword::kernels
