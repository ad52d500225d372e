// Sampling a row of logits x[0..V) without sorting the vocabulary. By definition:
//
//   temperature 0:  argmax x, ties to the lowest id
//   otherwise:      order the tokens by (x descending, id ascending);  p_i = exp((x_i - max x) / temperature)
//     min-p         keep p_i >= min_p * p_max (0: all)
//     top-k         of those, keep the first k (0: all)
//     top-p         of those, renormalised, keep the shortest prefix whose sum is >= top_p (1 or more: all)
//     draw          argmax of x_i / temperature + g_i over the kept tokens, ties to the lowest id, with
//                   g_i = -log(-log(u_i)),  u_i = ((h_i >> 40) + 0.5) * 2^-24,  h_i = hash(seed, position, i):
//
//   h = seed + position * 0x9E3779B97F4A7C15 + i * 0xBF58476D1CE4E5B9          (mod 2^64)
//   h ^= h >> 30;  h *= 0xBF58476D1CE4E5B9;  h ^= h >> 27;  h *= 0x94D049BB133111EB;  h ^= h >> 31
//
// A row that has a NaN, or whose maximum is infinite, has no such token: the result is -1.
//
// So a draw is a function of (seed, position, logits) alone. Sums, quotients and logarithms are in double precision.
//
// The kept tokens are always a prefix of the order, described by its last token, the "edge". The algorithm:
//   block maxima (256 logits per block) bound every search: a block whose maximum is below a threshold is skipped;
//   top-k: the k-th largest block maximum is a lower bound of the k-th largest logit; collect, then select;
//   top-p: lower a threshold until the mass above it suffices; then select by mass inside what was collected;
//   draw:  u <= 1 - 2^-25 bounds g, so the noise of a token far below the best so far need not be computed.

#include "kernels/isa_functions.h"

#include <cmath>

namespace foreword::kernels::FOREWORD_ISA {
namespace {

constexpr int kLogitBlock = 256;

struct Token {
  float x;
  int32_t id;
};

// In the order of the definition.
FW_INLINE bool before(Token a, Token b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }

struct Row {
  const float *x;
  int size;
  float *block_max;  // [blocks]
  int blocks;
  Token *found;      // [size]
  float max;
};

int block_end(const Row &row, int block) { return smaller(row.size, (block + 1) * kLogitBlock); }

bool has_nan(const float *x, int size) {
  for (int i = 0; i < size; ++i) {
    if (x[i] != x[i]) return true;
  }
  return false;
}

// Also false if there is nothing to draw: a NaN, or an infinite maximum. A sum of logits is NaN if one of them is; it
// may be NaN for infinities too, hence the second look.
bool find_block_maxima(Row &row) {
  row.max = -__builtin_inff();
  for (int b = 0; b < row.blocks; ++b) {
    const int begin = b * kLogitBlock, end = block_end(row, b);
    F32 largest = set1(-__builtin_inff()), sums = set1(0.f);
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const F32 x = load(row.x + i);
      largest = max_f32(largest, x);
      sums = add(sums, x);
    }
    float m = reduce_max(largest), sum = reduce_add(sums);
    for (; i < end; ++i) m = larger(m, row.x[i]), sum += row.x[i];
    if (sum != sum && has_nan(row.x + begin, end - begin)) return false;
    row.block_max[b] = m;
    row.max = larger(row.max, m);
  }
  return __builtin_isfinite(row.max);
}

int32_t first_of_value(const Row &row, float value) {
  for (int b = 0; b < row.blocks; ++b) {
    if (row.block_max[b] != value) continue;
    for (int i = b * kLogitBlock; i < block_end(row, b); ++i) {
      if (row.x[i] == value) return i;
    }
  }
  return -1;
}

// Calls f(token) for every x >= threshold, ids ascending.
template <class F>
FW_INLINE void for_each_at_least(const Row &row, float threshold, F &&f) {
  const F32 t = set1(threshold);
  for (int b = 0; b < row.blocks; ++b) {
    if (!(row.block_max[b] >= threshold)) continue;
    const int end = block_end(row, b);
    int i = b * kLogitBlock;
    for (; i + kLanes <= end; i += kLanes) {
      for (uint32_t lanes = lanes_at_least(load(row.x + i), t); lanes; lanes &= lanes - 1) {
        const int id = i + __builtin_ctz(lanes);
        f(Token{row.x[id], id});
      }
    }
    for (; i < end; ++i) {
      if (row.x[i] >= threshold) f(Token{row.x[i], i});
    }
  }
}

int collect(const Row &row, float threshold) {
  int count = 0;
  for_each_at_least(row, threshold, [&](Token t) FW_LAMBDA { row.found[count++] = t; });
  return count;
}

// Moves the first `rank + 1` tokens of found[begin, end) in order to its front, in any order, with the rank-th at its
// place. Not a library function, which the instruction sets would share.
void select(Token *found, int begin, int end, int rank) {
  while (end - begin > 1) {
    const Token pivot = found[begin + (end - begin - 1) / 2];  // not the last: both parts get smaller
    int i = begin - 1, j = end;
    for (;;) {
      do ++i; while (before(found[i], pivot));
      do --j; while (before(pivot, found[j]));
      if (i >= j) break;
      const Token t = found[i];
      found[i] = found[j];
      found[j] = t;
    }
    if (rank <= j) end = j + 1; else begin = j + 1;
  }
}

// The k largest logits to the front of `found`.
void collect_top_k(const Row &row, int k) {
  float threshold = -__builtin_inff();
  if (k <= row.blocks) {  // k blocks reach the k-th largest maximum, so at least k logits do
    Token *maxima = row.found;
    for (int b = 0; b < row.blocks; ++b) maxima[b] = {row.block_max[b], b};
    select(maxima, 0, row.blocks, k - 1);
    threshold = maxima[k - 1].x;
  }
  const int count = collect(row, threshold);
  if (k < count) select(row.found, 0, count, k - 1);
}

double mass(float x, float max, double temperature) {
  return std::exp(double(x) / temperature - double(max) / temperature);
}

// The shortest prefix of found[0, count) in order with at least `target` mass, moved to the front; returns its length.
int select_mass(Token *found, int count, float max, double temperature, double target) {
  int begin = 0, end = count;  // the edge is in [begin, end); everything before `begin` is kept
  while (end - begin > 1) {
    const int middle = begin + (end - begin - 1) / 2;
    select(found, begin, end, middle);
    double sum = 0.;
    for (int i = begin; i <= middle; ++i) sum += mass(found[i].x, max, temperature);
    if (sum >= target) {
      end = middle + 1;
    } else {
      begin = middle + 1;
      target -= sum;
    }
  }
  return smaller(count, begin + 1);
}

// Σ exp((x - max) / T) of the whole row: single-precision exponentials, summed in double.
double total_mass(const Row &row, double temperature) {
  const F32 m = set1(row.max), t = set1(float(1. / temperature));
  double total = 0.;
  for (int b = 0; b < row.blocks; ++b) {
    const int end = block_end(row, b);
    F32 sum = set1(0.f);
    int i = b * kLogitBlock;
    for (; i + kLanes <= end; i += kLanes) sum = add(sum, exp_f32(mul(sub(load(row.x + i), m), t)));
    total += double(reduce_add(sum));
    for (; i < end; ++i) total += mass(row.x[i], row.max, temperature);
  }
  return total;
}

// Top-p over the whole vocabulary: the kept tokens to the front of `found`; returns how many.
int collect_top_p(const Row &row, double temperature, double top_p) {
  const double target = top_p * total_mass(row, temperature);
  for (double depth = 4.;; depth *= 1.6) {
    const bool everything = depth > 80.;
    const float threshold = everything ? -__builtin_inff() : row.max - float(depth * temperature);
    const int count = collect(row, threshold);
    double sum = 0.;
    for (int i = 0; i < count; ++i) sum += mass(row.found[i].x, row.max, temperature);
    if (sum >= target || everything) return select_mass(row.found, count, row.max, temperature, target);
  }
}

// Of the first `kept` tokens found (-1: of all) those with x / T >= max / T + log(min_p), to the front; returns how
// many.
int keep_min_p(const Row &row, int kept, double temperature, double min_p) {
  const double least = double(row.max) / temperature + std::log(min_p);
  if (kept < 0) {  // collect with a margin, then compare exactly
    const double x = least * temperature;
    kept = collect(row, float(x - 1e-5 * (1. + std::fabs(x))));
  }
  int count = 0;
  for (int i = 0; i < kept; ++i) {
    if (double(row.found[i].x) / temperature >= least) row.found[count++] = row.found[i];
  }
  return count;
}

FW_INLINE uint64_t hash(uint64_t seed, int64_t position, int32_t id) {
  uint64_t h = seed + uint64_t(position) * 0x9E3779B97F4A7C15ull + uint64_t(id) * 0xBF58476D1CE4E5B9ull;
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
  return h ^ (h >> 31);
}

double uniform(uint64_t h) { return (double(h >> 40) + 0.5) * 0x1p-24; }
double gumbel(double u) { return -std::log(-std::log(u)); }

constexpr double kLargestGumbel = 17.4;  // -log(-log(1 - 2^-25)) = 17.33

struct Draw {
  const SamplingRow &row;
  double temperature;
  double best = -__builtin_inf();
  int32_t id = 0;

  // A token needs noise above -z = best - x / T to win, that is u > exp(-e^z), and exp(-e^z) >= 1 - e^z: with a smaller
  // u the logarithms are skipped.
  FW_INLINE void offer(Token t) {
    const double score = double(t.x) / temperature, z = score - best;
    if (z < -kLargestGumbel) return;
    const double u = uniform(hash(row.seed, row.position, t.id));
    if (z < -3. && u < 1. - std::exp(z) - 1e-9) return;
    const double value = score + gumbel(u);
    if (value > best || (value == best && t.id < id)) best = value, id = t.id;
  }
};

// The draw over every token of the vocabulary. The bound of `offer` is evaluated per vector in single precision, with a
// margin for rounding; for every token within the bound only the hash is computed.
void draw_from_all(const Row &row, Draw &draw) {
  const float inverse = float(1. / draw.temperature);
  for (int b = 0; b < row.blocks; ++b) {
    const double shift = double(row.max) / draw.temperature - draw.best;
    const double top = (double(row.block_max[b]) - double(row.max)) / draw.temperature + shift;
    if (top < -kLargestGumbel) continue;
    const int end = block_end(row, b);
    int i = b * kLogitBlock;
    for (; i + kLanes <= end; i += kLanes) {
      const double best_shift = double(row.max) / draw.temperature - draw.best;
      const F32 z = fma(sub(load(row.x + i), set1(row.max)), set1(inverse), set1(float(best_shift)));
      float limit[kLanes];  // of h >> 40
      store(limit, sub(set1(16777214.f), mul(exp_f32(z), set1(1.001f * 16777216.f))));
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint64_t h = hash(draw.row.seed, draw.row.position, i + lane);
        if (float(h >> 40) >= limit[lane]) draw.offer({row.x[i + lane], i + lane});
      }
    }
    for (; i < end; ++i) draw.offer({row.x[i], i});
  }
}

}  // namespace

size_t sample_scratch_bytes(int vocab_size) {
  const size_t size = size_t(vocab_size), blocks = size / kLogitBlock + 1;
  return (size + blocks) * sizeof(Token) + blocks * sizeof(float);
}

int32_t sample_row(const float *logits, int vocab_size, const SamplingRow &options, void *scratch) {
  Row row{};
  row.x = logits;
  row.size = vocab_size;
  row.blocks = (vocab_size + kLogitBlock - 1) / kLogitBlock;
  row.found = static_cast<Token *>(scratch);
  row.block_max = reinterpret_cast<float *>(row.found + vocab_size + row.blocks);
  if (!find_block_maxima(row)) return -1;
  if (!(options.temperature > 0.f)) return first_of_value(row, row.max);

  const double temperature = double(options.temperature), top_p = double(options.top_p);
  const bool use_k = options.top_k > 0 && options.top_k < vocab_size;
  const bool use_min = options.min_p > 0.f, use_p = options.top_p < 1.f;
  int kept = -1;  // tokens at the front of `found`; -1: every token
  if (use_k) {
    collect_top_k(row, options.top_k);
    kept = options.top_k;
  }
  if (use_min) kept = keep_min_p(row, kept, temperature, double(options.min_p));
  if (use_p && kept >= 0) {
    double total = 0.;
    for (int i = 0; i < kept; ++i) total += mass(row.found[i].x, row.max, temperature);
    kept = select_mass(row.found, kept, row.max, temperature, top_p * total);
  } else if (use_p) {
    kept = collect_top_p(row, temperature, top_p);
  }

  Draw draw{options, temperature};
  draw.offer({row.max, first_of_value(row, row.max)});  // a high first score excludes most of the others
  if (kept < 0) draw_from_all(row, draw);
  for (int i = 0; i < kept; ++i) draw.offer(row.found[i]);
  return draw.id;
}

}  // namespace foreword::kernels::FOREWORD_ISA
