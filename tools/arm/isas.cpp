// Every instruction set of this build against the scalar one: the logits of a small decoder over mixed steps, for each
// number format of weights and cache, tiled blocks and others, with and without a sliding window. Prints the relative
// root mean square difference; the exit status is the number of combinations that differ by more than rounding
// explains, and of greedy tokens that do not have the largest logit. Two kernels that this decoder does not use are
// compared alone: attention whose keys are its values, and the convolution of recurrent layers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "kernels/dispatch.h"
#include "kernels/forward/forward.h"

using namespace foreword::kernels;

namespace {

constexpr int kHidden = 96, kHeads = 3, kHeadDim = 32, kInner = 160, kVocab = 200, kLayers = 2, kLongest = 100;
constexpr int kRank = 8;  // of an adapter
// One activation that rounds to the next of 255 steps changes the logits by up to half of this.
constexpr double kLimit = 0.02;

struct Case {
  Format weights;
  bool exact;
  KVFormat cache;
  int block_size, window;
};

class Decoder {
 public:
  Decoder(const Isa &isa, const Case &c)
      : case_(c),
        model_({kHidden, kHeads, 1, kHeadDim, kVocab, 1, 1e-5f, 1.f / std::sqrt(float(kHeadDim)), 1.f, Gate::silu, 0.f, 0.f},
               {c.cache, 2 * blocks() + 1, c.block_size, kLayers, HeadShape::of(1, kHeadDim, kHeads, kHeadDim), false, {}}, isa, 1) {
    model_.set_embedding(matrix(kVocab, kHidden, 1.f));
    Rope rope{{}, 1., {}};
    for (int j = 0; j < kHeadDim / 2; ++j) rope.inv_freq.push_back(std::pow(10000., -2. * j / kHeadDim));
    model_.ropes.push_back(rope);
    for (int i = 0; i < kLayers; ++i) {
      Layer layer;
      layer.attn_norm.weight = vector();
      layer.mlp_norm.weight = vector();
      layer.qkv = model_.make_linear({pack(kHeads * kHeadDim, kHidden), pack(kHeadDim, kHidden), pack(kHeadDim, kHidden)});
      layer.o = linear(kHidden, kHeads * kHeadDim);
      layer.mlp = std::make_unique<Mlp>(Mlp{linear(kInner, kHidden), linear(kInner, kHidden), linear(kHidden, kInner), {}});
      layer.rope = 0;
      layer.slot = i;
      layer.sliding_window = c.window;
      model_.layers.push_back(std::move(layer));
    }
    std::vector<std::pair<const PackedMatrix *, LoraSource>> factors;
    for (const PackedMatrix *m : packed_) {
      const float *a = numbers(size_t(kRank * m->cols), 0.2f), *b = numbers(size_t(kRank * m->rows), 0.2f);
      factors.push_back({m, {a, b, kRank, m->rows, m->cols, 0.5f}});
    }
    model_.add_lora(1, factors, {});
    model_.final_norm.weight = vector();
    model_.logits_norm = model_.final_norm;
    model_.lm_head = linear(kVocab, kHidden);
    forward_ = std::make_unique<ForwardPass>(model_);
    // Scattered; 5 divides neither of the numbers of blocks, so that no two entries are one block.
    for (int i = 0; i < 2 * blocks(); ++i) table_.push_back(1 + (i * 5) % (2 * blocks()));
  }

  // Computes count tokens from position start on for each request; its logits. The first request has an adapter.
  std::vector<float> step(const std::vector<std::pair<int, int>> &requests) {
    std::vector<int32_t> ids, query_start_loc{0}, seq_lens, rows, loras;
    std::vector<int64_t> positions, slots, logits_indices;
    for (const auto &[start, count] : requests) {
      const int row = int(rows.size());
      for (int p = start; p < start + count; ++p) {
        ids.push_back((p * 37 + row * 11) % kVocab);
        positions.push_back(p);
        slots.push_back(int64_t(table_[size_t(row * blocks() + p / case_.block_size)]) * case_.block_size + p % case_.block_size);
      }
      rows.push_back(row);
      loras.push_back(row == 0);
      query_start_loc.push_back(int32_t(ids.size()));
      seq_lens.push_back(start + count);
      logits_indices.push_back(int64_t(ids.size()) - 1);
    }
    const auto run = [&](const std::vector<int64_t> &at, bool greedy) {
      ForwardInput input{};
      input.num_tokens = int(ids.size());
      input.num_reqs = int(rows.size());
      input.num_logits = int(at.size());
      input.input_ids = ids.data();
      input.positions = positions.data();
      input.query_start_loc = query_start_loc.data();
      input.seq_lens = seq_lens.data();
      input.idx_mapping = rows.data();
      input.logits_indices = at.data();
      input.greedy = greedy;
      input.lora_ids = loras.data();
      input.groups = {{slots.data(), table_.data(), 2, blocks(), false}};
      return forward_->run(input);
    };
    const auto row_of = [&](const float *logits, size_t i) { return logits + i * size_t(forward_->logits_stride()); };

    std::vector<int64_t> all(ids.size());
    std::iota(all.begin(), all.end(), 0);
    std::vector<int32_t> largest;
    const float *logits = run(all, false);
    for (size_t i = 0; i < all.size(); ++i) {
      const float *row = row_of(logits, i);
      largest.push_back(int32_t(std::max_element(row, row + kVocab) - row));
    }
    logits = run(all, true);
    const int32_t *greedy = forward_->known(logits, int(all.size())).greedy_tokens;
    for (size_t i = 0; greedy && i < all.size(); ++i) wrong_tokens_ += greedy[i] != largest[i];

    std::vector<float> out;
    logits = run(logits_indices, false);
    for (size_t b = 0; b < rows.size(); ++b) out.insert(out.end(), row_of(logits, b), row_of(logits, b) + kVocab);
    return out;
  }

  // Greedy tokens so far, of every token, that have not the largest logit.
  int wrong_tokens() const { return wrong_tokens_; }

 private:
  int blocks() const { return kLongest / case_.block_size + 1; }  // of a request

  const float *numbers(size_t count, float scale) {
    auto &values = kept_.emplace_back(count);
    for (float &x : values) x = scale * (float(random_()) * 0x1p-31f - 1.f);
    return values.data();
  }
  SourceMatrix matrix(int rows, int cols, float scale) {
    const float *data = numbers(size_t(rows) * size_t(cols), scale);
    return {Source::f32, rows, cols, sizeof(float) * size_t(cols), reinterpret_cast<const uint8_t *>(data)};
  }
  const PackedMatrix *pack(int rows, int cols) {
    return packed_.emplace_back(model_.pack(matrix(rows, cols, 0.3f), case_.weights, case_.exact));
  }
  Linear linear(int rows, int cols) { return model_.make_linear({pack(rows, cols)}); }
  Vector vector() { return model_.copy_vector(numbers(kHidden, 1.f), kHidden); }

  const Case case_;
  std::mt19937 random_{1};
  std::deque<std::vector<float>> kept_;  // the embedding is read later
  std::vector<const PackedMatrix *> packed_;
  Model model_;
  std::unique_ptr<ForwardPass> forward_;
  std::vector<int32_t> table_;
  int wrong_tokens_ = 0;
};

// Prompts, decodes, a chunk beside a decode, one row alone. Adds the wrong greedy tokens to `wrong`.
std::vector<float> logits(const Isa &isa, const Case &c, int &wrong) {
  Decoder decoder(isa, c);
  std::vector<float> all;
  for (const auto &requests : std::vector<std::vector<std::pair<int, int>>>{
           {{0, 70}, {0, 5}}, {{70, 1}, {5, 1}}, {{71, 1}, {6, 9}}, {{72, 1}}}) {
    const std::vector<float> some = decoder.step(requests);
    all.insert(all.end(), some.begin(), some.end());
  }
  wrong += decoder.wrong_tokens();
  return all;
}

std::vector<float> random_numbers(size_t count) {
  std::mt19937 random(1);
  std::vector<float> values(count);
  for (float &x : values) x = float(random()) * 0x1p-31f - 1.f;
  return values;
}

// Attention whose keys are its values, of the last queries of a request. The numbers of keys fill no tile.
std::vector<float> latent_attention(const Isa &isa, KVFormat format, int block_size) {
  constexpr int kDim = 96, kKeys = 75, kQueries = 3;
  const int blocks = kKeys / block_size + 1;
  const KVCache cache({format, blocks, block_size, 1, HeadShape::of(1, kDim, kHeads, kDim), true, {}});
  const KVLayer kv = cache.layer(0);
  const AttentionConfig config{kHeads, 1, kDim, kDim, kDim, 0.f, 0, false, format == KVFormat::i8};
  Buffer<uint8_t> scratch;
  scratch.reserve(isa.attention_scratch_bytes(config));

  const std::vector<float> keys = random_numbers(kKeys * kDim), queries = random_numbers(kQueries * kHeads * kDim);
  std::vector<int32_t> table(size_t(blocks), 0);
  std::iota(table.rbegin(), table.rend(), 0);
  for (int i = 0; i < kKeys; ++i) {
    const int64_t slot = int64_t(table[size_t(i / block_size)]) * block_size + i % block_size;
    isa.store_kv(kv, slot, 0, keys.data() + i * kDim, nullptr, scratch.data());
  }
  std::vector<float> out(queries.size());
  AttentionTile tile{};
  tile.num_queries = kQueries;
  tile.first_position = kKeys - kQueries;
  tile.queries = queries.data();
  tile.query_stride = tile.out_stride = kHeads * kDim;
  tile.block_table = table.data();
  tile.key_end = kKeys;
  tile.out = out.data();
  isa.attend(kv, config, tile, scratch.data());
  return out;
}

// The convolution of one token, and of so many that some are computed together and some alone.
std::vector<float> convolutions(const Isa &isa, bool silu) {
  constexpr int kKernel = 4, kChannels = 64;
  std::vector<float> all;
  for (const int tokens : {1, 4, 7}) {
    std::vector<float> rows = random_numbers(size_t(tokens) * kChannels);
    const std::vector<float> weights = random_numbers(kKernel * kChannels);
    std::vector<float> past = random_numbers((kKernel - 1) * kChannels);
    isa.convolve({.rows = rows.data(),
                  .past = past.data(),
                  .last = past.data(),
                  .weights = weights.data(),
                  .bias = silu ? weights.data() : nullptr,
                  .stride = kChannels,
                  .channel_stride = kChannels,
                  .num_tokens = tokens,
                  .kernel = kKernel,
                  .begin = 0,
                  .end = kChannels,
                  .silu = silu});
    all.insert(all.end(), rows.begin(), rows.end());
    all.insert(all.end(), past.begin(), past.end());
  }
  return all;
}

// The recurrence of mamba1 over one token, and over so many that some are computed together and some alone.
std::vector<float> selective_scans(const Isa &isa) {
  constexpr int kKeys = 5, kChannels = 2 * kChannelGroup;
  std::vector<float> all;
  for (const int tokens : {1, 4, 7}) {
    const size_t values = size_t(tokens) * kChannels;
    const std::vector<float> x = random_numbers(values), gate = random_numbers(values), step = random_numbers(values);
    const std::vector<float> k = random_numbers(size_t(tokens) * kKeys), q = random_numbers(size_t(tokens) * kKeys);
    const std::vector<float> bias = random_numbers(kChannels), skip = random_numbers(kChannels);
    std::vector<float> rate = random_numbers(kChannels * kKeys), state = random_numbers(rate.size()), out(values);
    for (float &one : rate) one = std::exp(one);
    isa.scan_selective({.num_tokens = tokens,
                        .key_dim = kKeys,
                        .begin = 0,
                        .end = kChannels,
                        .rate = rate.data(),
                        .before = state.data(),
                        .state = state.data(),
                        .step_bias = bias.data(),
                        .skip = skip.data(),
                        .x = x.data(),
                        .gate = gate.data(),
                        .step = step.data(),
                        .k = k.data(),
                        .q = q.data(),
                        .out = out.data(),
                        .stride = kChannels,
                        .step_stride = kChannels,
                        .key_stride = kKeys,
                        .out_stride = kChannels});
    all.insert(all.end(), out.begin(), out.end());
    all.insert(all.end(), state.begin(), state.end());
  }
  return all;
}

// The recurrence of rg_lru over the first tokens of a request, and over further ones.
std::vector<float> gated_scans(const Isa &isa) {
  constexpr int kChannels = 2 * kChannelGroup;
  std::vector<float> all;
  for (const int tokens : {1, 7}) {
    const size_t values = size_t(tokens) * kChannels;
    const std::vector<float> x = random_numbers(values), write = random_numbers(values), forget = random_numbers(values);
    const std::vector<float> bias = random_numbers(kChannels);
    std::vector<float> rate = random_numbers(kChannels), state = random_numbers(kChannels), out(values);
    for (float &one : rate) one = std::exp(one);
    isa.scan_gated({.num_tokens = tokens,
                    .begin = 0,
                    .end = kChannels,
                    .is_first = tokens == 7,
                    .rate = rate.data(),
                    .write_bias = bias.data(),
                    .forget_bias = bias.data(),
                    .before = state.data(),
                    .state = state.data(),
                    .x = x.data(),
                    .write = write.data(),
                    .forget = forget.data(),
                    .out = out.data(),
                    .stride = kChannels,
                    .gate_stride = kChannels,
                    .out_stride = kChannels});
    all.insert(all.end(), out.begin(), out.end());
    all.insert(all.end(), state.begin(), state.end());
  }
  return all;
}

// The activation of positive numbers, of negative ones and of 0.
std::vector<float> xielus(const Isa &isa) {
  const float numbers[] = {0.8f, 0.7f, 0.5f, -1e-6f};
  std::vector<float> x = random_numbers(64);
  x[0] = 0.f;
  isa.xielu(numbers, x.size(), x.data());
  return x;
}

double difference(const std::vector<float> &got, const std::vector<float> &want) {
  double error = 0., size = 0.;
  for (size_t i = 0; i < want.size(); ++i) {
    error += double(got[i] - want[i]) * double(got[i] - want[i]);
    size += double(want[i]) * double(want[i]);
  }
  return std::sqrt(error / size);
}

}  // namespace

int main() {
  const char *const weights[] = {"f32", "bf16", "i8", "q4", "q4_min", "q8", "q8_min", "q8_half"}, *const caches[] = {"f32", "bf16", "i8"};
  const std::vector<const Isa *> isas = usable_isas();
  const Isa &scalar = *isas.back();
  int different = 0;
  for (size_t i = 0; i + 1 < isas.size(); ++i) {
    const Isa &isa = *isas[i];
    for (const int block_size : {16, 12}) {
      for (int cache = 0; cache < 3; ++cache) {
        const auto out = [&](const Isa &of) { return latent_attention(of, KVFormat(cache), block_size); };
        const double d = difference(out(isa), out(scalar));
        different += !(d < kLimit);
        std::printf("%-12s keys as values  cache %-5s blocks of %d  %.1e\n", isa.name, caches[cache], block_size, d);
      }
    }
    for (const bool silu : {false, true}) {
      const double d = difference(convolutions(isa, silu), convolutions(scalar, silu));
      different += !(d < 1e-5);
      std::printf("%-12s convolution%s  %.1e\n", isa.name, silu ? ", silu" : "", d);
    }
    for (const auto &[name, of] : {std::pair{"selective scan", selective_scans}, std::pair{"gated scan", gated_scans},
                                   std::pair{"xIELU", xielus}}) {
      const double d = difference(of(isa), of(scalar));
      different += !(d < 1e-5);
      std::printf("%-12s %s  %.1e\n", isa.name, name, d);
    }
  }
  for (int w = 0; w < 8; ++w) {
    for (int exact = 0; exact <= (w > int(Format::i8) ? 1 : 0); ++exact) {
      for (int cache = 0; cache < 3; ++cache) {
        const Case c{Format(w), exact == 1, KVFormat(cache), (w + cache) % 2 ? 16 : 12, cache == w % 3 ? 40 : 0};
        const std::vector<float> want = logits(scalar, c, different);
        for (size_t i = 0; i + 1 < isas.size(); ++i) {
          const Isa &isa = *isas[i];
          const double d = difference(logits(isa, c, different), want);
          different += !(d < kLimit);
          std::printf("%-12s %-8s%s cache %-5s blocks of %d  %.1e\n", isa.name, weights[w], exact ? " exact" : "      ",
                      caches[cache], c.block_size, d);
        }
      }
    }
  }
  return different;
}
