// Sampling a row of logits x[0..V) without sorting the vocabulary. By definition:
//
//   temperature 0:  argmax x, ties to the lowest id
//   otherwise:      order the tokens by (x descending, id ascending);  s_i = (x_i - max x) / temperature, p_i = e^s_i
//     min-p         keep p_i >= min_p * p_max (0: all)
//     top-n-sigma   keep s_i >= -n * standard deviation of the finite s (0 or less: all)
//     top-k         of those, keep the first k (0: all)
//     top-p         of those, renormalised, keep the shortest prefix whose sum is >= top_p (1 or more: all)
//     typical-p     of those, renormalised, order by |s_i - sum of p s|, then as before; keep the shortest prefix whose
//                   sum is >= typical_p (1 or more: all)
//     XTC           of those, renormalised, if u_(-1) < xtc_probability and at least two have p_i >= xtc_threshold:
//                   drop all of these but the last
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
// The vocabulary is never sorted. The algorithm:
//   block maxima (256 logits per block) bound every search: a block whose maximum is below a threshold is skipped. A
//   model that computed few rows knows them;
//   scan: else one pass over the memory for them, and where needed for the sums of e^s relative to the maximum so far,
//   whose arithmetic overlaps the reads;
//   top-k: the k-th largest block maximum is a lower bound of the k-th largest logit; collect, then select;
//   top-p: lower a threshold until the mass above it suffices; then select by mass inside what was collected;
//   typical-p: the same with a growing distance from the mean;
//   XTC: collect the tokens above the threshold; what it drops is all that comes before the last of them;
//   draw:  u <= 1 - 2^-25 bounds g, so the noise of a token far below the best so far need not be computed.

#include "kernels/isa_functions.h"

#include <cmath>

namespace foreword::kernels::FOREWORD_ISA {
namespace {

constexpr float kLowest = -__FLT_MAX__;  // the lowest logit that a kept token can have

struct Token {
  float x;
  int32_t id;
};

// In the order of the definition.
FW_INLINE bool before(Token a, Token b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }

// Σ e^s and Σ s e^s over tokens: single-precision exponentials, summed in double.
struct Moments {
  double total, first;
};

// A scanned row, at the beginning of the scratch memory.
struct Row {
  const float *x;
  int size;
  const float *block_max;  // [blocks]
  int blocks;
  Token *found;      // [size]
  float max;
  bool has_choice;     // no NaN, and a finite maximum
  double temperature;  // that of `sums`; 0: there are none
  Moments sums;        // over the whole row
};

int block_end(int size, int block) { return smaller(size, (block + 1) * kLogitBlock); }
int block_end(const Row &row, int block) { return block_end(row.size, block); }

bool has_nan(const float *x, int size) {
  for (int i = 0; i < size; ++i) {
    if (x[i] != x[i]) return true;
  }
  return false;
}

double mass(float x, float max, double temperature) {
  return std::exp(double(x) / temperature - double(max) / temperature);
}

Moments block_moments(const Row &row, int block, float max, double temperature) {
  constexpr double kLn2 = 0.693147180559945309;
  const F32 m = set1(max), scale = set1(float(1. / (temperature * kLn2)));
  const int end = block_end(row, block);
  F32 total = set1(0.f), first = set1(0.f);
  int i = block * kLogitBlock;
  for (; i + kLanes <= end; i += kLanes) {
    const F32 s = max_f32(mul(sub(load(row.x + i), m), scale), set1(-126.f)), p = exp2_f32(s);
    total = add(total, p);
    first = fma(s, p, first);
  }
  Moments sum{double(reduce_add(total)), double(reduce_add(first)) * kLn2};
  for (; i < end; ++i) {
    if (row.x[i] < kLowest) continue;
    const double p = mass(row.x[i], max, temperature);
    sum.total += p;
    sum.first += p * (double(row.x[i]) - double(max)) / temperature;
  }
  return sum;
}

// The sums so far are relative to a maximum of `old`; a larger one is found.
void rescale(Moments &sum, float old, float max, double temperature) {
  if (sum.total == 0.) return;
  const double shift = (double(old) - double(max)) / temperature, scale = std::exp(shift);
  sum = {scale * sum.total, scale * (sum.first + shift * sum.total)};
}

Moments moments(const Row &row, double temperature) {
  if (temperature == row.temperature) return row.sums;
  Moments sum{0., 0.};
  for (int b = 0; b < row.blocks; ++b) {
    const Moments part = block_moments(row, b, row.max, temperature);
    sum.total += part.total;
    sum.first += part.first;
  }
  return sum;
}

// The maximum of a block; NaN if it has one. A sum of logits is NaN if one of them is; it may be NaN for infinities
// too, hence the second look.
FW_INLINE float block_maximum(const float *x, int size, int block) {
  constexpr int kAhead = 1024;  // 4 KiB: hides the latency of memory
  const int begin = block * kLogitBlock, end = block_end(size, block);
  F32 largest = set1(-__builtin_inff()), sums = set1(0.f);
  int i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    prefetch<3>(x + i + kAhead);
    const F32 xs = load(x + i);
    largest = max_f32(largest, xs);
    sums = add(sums, xs);
  }
  float m = reduce_max(largest), sum = reduce_add(sums);
  for (; i < end; ++i) m = larger(m, x[i]), sum += x[i];
  return sum != sum && has_nan(x + begin, end - begin) ? __builtin_nanf("") : m;
}

// maximum(b): of block b. A block's exponentials are computed while the next one is read.
template <bool Sums, class F>
void scan(Row &row, F &&maximum) {
  float max = -__builtin_inff(), base = max;  // the sums are relative to `base`
  const auto add_block = [&](int b) FW_LAMBDA {
    if (max > base) rescale(row.sums, base, max, row.temperature), base = max;
    if (!(row.block_max[b] >= kLowest)) return;
    const Moments part = block_moments(row, b, base, row.temperature);
    row.sums.total += part.total;
    row.sums.first += part.first;
  };
  row.has_choice = false;
  for (int b = 0; b < row.blocks; ++b) {
    const float m = maximum(b);
    if (m != m) return;
    if constexpr (Sums) {
      if (b) add_block(b - 1);
    }
    max = larger(max, m);
  }
  if constexpr (Sums) add_block(row.blocks - 1);
  row.max = max;
  row.has_choice = __builtin_isfinite(max);
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

int count_larger(const Row &row, float x) {
  const F32 t = set1(x);
  int count = 0;
  for (int b = 0; b < row.blocks; ++b) {
    if (!(row.block_max[b] > x)) continue;
    const int end = block_end(row, b);
    int i = b * kLogitBlock, others = 0;  // lanes that are not larger
    for (; i + kLanes <= end; i += kLanes) others += __builtin_popcount(lanes_at_least(t, load(row.x + i)));
    count += i - b * kLogitBlock - others;
    for (; i < end; ++i) count += row.x[i] > x;
  }
  return count;
}

int collect(const Row &row, float threshold) {
  int count = 0;
  for_each_at_least(row, threshold, [&](Token t) FW_LAMBDA { row.found[count++] = t; });
  return count;
}

// Moves the first tokens of found[begin, end), as `before` orders them, to [begin, rank], the rank-th at its place.
// Not a library function, which the instruction sets would share.
template <class Before>
void select(Token *found, int begin, int end, int rank, Before &&before) {
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

void sort(Token *found, int begin, int end) {
  if (end - begin < 2) return;
  const int middle = begin + (end - begin) / 2;
  select(found, begin, end, middle, before);
  sort(found, begin, middle);
  sort(found, middle + 1, end);
}

// The k largest logits to the front of `found`; returns how many there are.
int collect_top_k(const Row &row, int k) {
  float threshold = kLowest;
  if (k <= row.blocks) {  // k blocks reach the k-th largest maximum, so at least k logits do
    Token *maxima = row.found;
    for (int b = 0; b < row.blocks; ++b) maxima[b] = {row.block_max[b], b};
    select(maxima, 0, row.blocks, k - 1, before);
    threshold = larger(threshold, maxima[k - 1].x);
  }
  const int count = collect(row, threshold);
  if (k < count) select(row.found, 0, count, k - 1, before);
  return smaller(k, count);
}

double mass_of(const Row &row, int count, double temperature) {
  double sum = 0.;
  for (int i = 0; i < count; ++i) sum += mass(row.found[i].x, row.max, temperature);
  return sum;
}

// The shortest prefix of found[0, count), as `before` orders it, with at least `target` mass, moved to the front;
// returns its length.
template <class Before>
int select_mass(Token *found, int count, float max, double temperature, double target, Before &&before) {
  int begin = 0, end = count;  // the edge is in [begin, end); everything before `begin` is kept
  while (end - begin > 1) {
    const int middle = begin + (end - begin - 1) / 2;
    select(found, begin, end, middle, before);
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

// The standard deviation of the finite logits.
double deviation(const Row &row) {
  constexpr int kSums = 8;
  double sum[kSums] = {}, squares[kSums] = {};
  int64_t count[kSums] = {};
  const double max = double(row.max);
  int i = 0;
  const auto take = [&](int lane, float x) FW_LAMBDA {
    const bool counts = x >= kLowest;
    const double d = counts ? double(x) - max : 0.;
    sum[lane] += d;
    squares[lane] += d * d;
    count[lane] += counts;
  };
  for (; i + kSums <= row.size; i += kSums) {
    for (int lane = 0; lane < kSums; ++lane) take(lane, row.x[i + lane]);
  }
  for (; i < row.size; ++i) take(0, row.x[i]);
  for (int lane = 1; lane < kSums; ++lane) {
    sum[0] += sum[lane], squares[0] += squares[lane], count[0] += count[lane];
  }
  const double n = double(count[0]), mean = sum[0] / n;
  return std::sqrt(larger(0., squares[0] / n - mean * mean));
}

// Top-p over the whole vocabulary: the kept tokens to the front of `found`; returns how many.
int collect_top_p(const Row &row, double temperature, double top_p) {
  const double target = top_p * moments(row, temperature).total;
  for (double depth = 4.;; depth *= 1.6) {
    const bool everything = depth > 80.;
    const int count = collect(row, everything ? kLowest : row.max - float(depth * temperature));
    if (mass_of(row, count, temperature) >= target || everything) {
      return select_mass(row.found, count, row.max, temperature, target, before);
    }
  }
}

// typical-p of the first `kept` tokens found (-1: of all), to the front; returns how many.
int keep_typical(const Row &row, int kept, double temperature, double typical_p) {
  const double inverse = 1. / temperature, max = double(row.max);
  Moments sum{0., 0.};
  for (int i = 0; i < kept; ++i) {
    const double p = mass(row.found[i].x, row.max, temperature);
    sum.total += p;
    sum.first += p * (double(row.found[i].x) - max) * inverse;
  }
  if (kept < 0) sum = moments(row, temperature);
  const double mean = sum.first / sum.total, target = typical_p * sum.total;
  const auto distance = [=](Token t) FW_LAMBDA { return std::fabs((double(t.x) - max) * inverse - mean); };
  for (double reach = 2.; kept < 0; reach *= 1.6) {
    const bool everything = reach - mean > 80.;
    const int count = collect(row, everything ? kLowest : row.max - float((reach - mean) * temperature));
    int near = 0;
    for (int i = 0; i < count; ++i) {
      if (everything || distance(row.found[i]) <= reach) row.found[near++] = row.found[i];
    }
    if (everything || mass_of(row, near, temperature) >= target) kept = near;
  }
  return select_mass(row.found, kept, row.max, temperature, target, [&](Token a, Token b) {
    const double da = distance(a), db = distance(b);
    return da < db || (da == db && before(a, b));
  });
}

// The last of the tokens with at least `threshold` of the probability of the first `kept` found (-1: of all); if these
// are fewer than two, one that nothing precedes.
Token find_xtc_edge(const Row &row, int kept, double temperature, double threshold) {
  const double least = threshold * (kept < 0 ? moments(row, temperature).total : mass_of(row, kept, temperature));
  if (kept < 0) {
    const double x = double(row.max) + std::log(least) * temperature;
    kept = collect(row, larger(kLowest, float(x - 1e-5 * (1. + std::fabs(x)))));
  }
  Token edge{__builtin_inff(), -1};
  int count = 0;
  for (int i = 0; i < kept; ++i) {
    const Token t = row.found[i];
    if (mass(t.x, row.max, temperature) < least) continue;
    if (!count++ || before(edge, t)) edge = t;
  }
  return count < 2 ? Token{__builtin_inff(), -1} : edge;
}

// Moves those of the first `kept` tokens found (-1: all) with x / T >= `least` to the front. Returns their number.
int keep_at_least(const Row &row, int kept, double temperature, double least) {
  if (kept < 0) {  // collect with a margin, then compare exactly
    const double x = least * temperature;
    kept = collect(row, larger(kLowest, float(x - 1e-5 * (1. + std::fabs(x)))));
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
  Token first{__builtin_inff(), -1};  // what comes before it is not drawn
  double best = -__builtin_inf();
  int32_t id = 0;

  // A token needs noise above -z = best - x / T to win, that is u > exp(-e^z), and exp(-e^z) >= 1 - e^z: with a smaller
  // u the logarithms are skipped.
  FW_INLINE void offer(Token t) {
    const double score = double(t.x) / temperature, z = score - best;
    if (z < -kLargestGumbel || before(t, first)) return;
    const double u = uniform(hash(uint64_t(row.seed), row.position, t.id));
    if (z < -3. && u < 1. - std::exp(z) - 1e-9) return;
    const double value = score + gumbel(u);
    if (value > best || (value == best && t.id < id)) best = value, id = t.id;
  }
};

// The draw over every token of the vocabulary. The bound of `offer` is evaluated per vector in single precision, with a
// margin for rounding; for every token within the bound only the hash is computed.
void draw_from_all(const Row &row, Draw &draw) {
  const float inverse = float(1. / draw.temperature);
  const uint64_t seed = uint64_t(draw.row.seed);
  for (int b = 0; b < row.blocks; ++b) {
    const double shift = double(row.max) / draw.temperature - draw.best;
    const double top = (double(row.block_max[b]) - double(row.max)) / draw.temperature + shift;
    if (top < -kLargestGumbel) continue;
    const int end = block_end(row, b);
    int i = b * kLogitBlock;
    for (; i + kLanes <= end; i += kLanes) {
      const double best_shift = double(row.max) / draw.temperature - draw.best;
      const F32 z = fma(sub(load(row.x + i), set1(row.max)), set1(inverse), set1(float(best_shift)));
      const F32 limit = sub(set1(16777214.f), mul(exp_f32(z), set1(1.001f * 16777216.f)));  // the limit of h >> 40
      float high[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {  // without a branch, so that it becomes vector code
        high[lane] = float(int32_t(hash(seed, draw.row.position, i + lane) >> 40));
      }
      for (uint32_t lanes = lanes_at_least(load(high), limit); lanes; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        draw.offer({row.x[i + lane], i + lane});
      }
    }
    for (; i < end; ++i) draw.offer({row.x[i], i});
  }
}

}  // namespace

size_t sample_scratch_bytes(int vocab_size) {
  const size_t size = size_t(vocab_size), blocks = size_t(num_logit_blocks(vocab_size));
  return sizeof(Row) + (size + blocks) * sizeof(Token) + blocks * sizeof(float);
}

void logit_maxima(const float *logits, int vocab_size, int block_begin, int block_end, float *maxima) {
  for (int b = block_begin; b < block_end; ++b) maxima[b] = block_maximum(logits, vocab_size, b);
}

int32_t greedy_token(const float *logits, int vocab_size) {
  constexpr uint32_t kAll = (uint32_t{1} << kLanes) - 1;
  constexpr int kAhead = 1024;  // as in `block_maximum`
  float max = -__builtin_inff(), tail = 0.f;
  F32 max_lanes = set1(max), sums = set1(0.f);
  int at = 0;  // the first block with the maximum so far
  for (int begin = 0; begin < vocab_size; begin += kLogitBlock) {
    const int end = smaller(vocab_size, begin + kLogitBlock);
    F32 largest = set1(-__builtin_inff());
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      prefetch<3>(logits + i + kAhead);
      const F32 xs = load(logits + i);
      largest = max_f32(largest, xs);
      sums = add(sums, xs);
    }
    float m = lanes_at_least(max_lanes, largest) == kAll ? max : reduce_max(largest);
    for (; i < end; ++i) m = larger(m, logits[i]), tail += logits[i];
    if (m > max) max = m, max_lanes = set1(m), at = begin;
  }
  const bool may_have_nan = tail != tail || lanes_at_least(sums, sums) != kAll;
  if ((may_have_nan && has_nan(logits, vocab_size)) || !__builtin_isfinite(max)) return -1;
  for (; at + kLanes <= vocab_size; at += kLanes) {
    if (const uint32_t lanes = lanes_at_least(load(logits + at), max_lanes)) return at + __builtin_ctz(lanes);
  }
  while (logits[at] != max) ++at;
  return at;
}

bool scan_row(const float *logits, const float *maxima, int vocab_size, const SamplingRow &options, bool logprobs,
              void *scratch) {
  Row &row = *static_cast<Row *>(scratch);
  row = {};
  row.x = logits;
  row.size = vocab_size;
  row.blocks = num_logit_blocks(vocab_size);
  row.found = reinterpret_cast<Token *>(&row + 1);
  float *own = reinterpret_cast<float *>(row.found + vocab_size + row.blocks);
  row.block_max = maxima ? maxima : own;
  if (logprobs) {
    row.temperature = 1.;
  } else if (options.temperature > 0.f && options.top_k <= 0 && (options.top_p < 1.f || options.typical_p < 1.f)) {
    row.temperature = double(options.temperature);
  }
  const auto scan_with = [&](auto &&maximum) FW_LAMBDA {
    row.temperature > 0. ? scan<true>(row, maximum) : scan<false>(row, maximum);
  };
  if (maxima) {
    scan_with([=](int b) FW_LAMBDA { return maxima[b]; });
  } else {
    scan_with([=](int b) FW_LAMBDA { return own[b] = block_maximum(logits, vocab_size, b); });
  }
  return row.has_choice;
}

int32_t sample_row(const SamplingRow &options, void *scratch) {
  const Row &row = *static_cast<const Row *>(scratch);
  if (!(options.temperature > 0.f)) return first_of_value(row, row.max);

  const double temperature = double(options.temperature), top_p = double(options.top_p);
  const double max = double(row.max) / temperature;
  double least = -__builtin_inf();
  if (options.min_p > 0.f) least = max + std::log(double(options.min_p));
  if (options.top_n_sigma > 0.f) {
    least = larger(least, max - double(options.top_n_sigma) * deviation(row) / temperature);
  }
  int kept = -1;  // tokens at the front of `found`; -1: every token
  if (options.top_k > 0 && options.top_k < row.size) kept = collect_top_k(row, options.top_k);
  if (least > -__builtin_inf()) kept = keep_at_least(row, kept, temperature, least);
  if (options.top_p < 1.f && kept >= 0) {
    const double target = top_p * mass_of(row, kept, temperature);
    kept = select_mass(row.found, kept, row.max, temperature, target, before);
  } else if (options.top_p < 1.f) {
    kept = collect_top_p(row, temperature, top_p);
  }
  if (options.typical_p < 1.f) kept = keep_typical(row, kept, temperature, double(options.typical_p));

  Draw draw{options, temperature};
  if (options.xtc_probability > 0.f &&
      uniform(hash(uint64_t(options.seed), options.position, -1)) < options.xtc_probability) {
    draw.first = find_xtc_edge(row, kept, temperature, double(options.xtc_threshold));
  }
  if (draw.first.id >= 0) {
    draw.offer(draw.first);
  } else if (kept < 0 || !(options.typical_p < 1.f)) {
    draw.offer({row.max, first_of_value(row, row.max)});  // a high first score excludes most of the others
  }
  if (kept < 0) draw_from_all(row, draw);
  for (int i = 0; i < kept; ++i) draw.offer(row.found[i]);
  return draw.id;
}

// Copies a row of logits. False if no token can be drawn from it: a NaN, or an infinite maximum.
bool copy_logits(const float *logits, int vocab_size, float *out) {
  F32 largest = set1(-__builtin_inff()), zero = set1(0.f);
  int i = 0;
  for (; i + kLanes <= vocab_size; i += kLanes) {
    const F32 x = load(logits + i);
    store(out + i, x);
    largest = max_f32(largest, x);
    zero = fma(x, set1(0.f), zero);  // NaN for NaN and for infinities
  }
  float max = reduce_max(largest), nothing = reduce_add(zero);
  for (; i < vocab_size; ++i) out[i] = logits[i], max = larger(max, logits[i]), nothing += logits[i] * 0.f;
  if (nothing != nothing && has_nan(logits, vocab_size)) return false;
  return __builtin_isfinite(max);
}

// The log-probabilities and ranks of `token`, then of the `count` most likely tokens, lower ids first among equals. The
// rank is 1 + the number of larger logits. Without a finite maximum, or with a NaN: log-probabilities NaN, ranks 0.
void row_logprobs(int32_t token, int count, int32_t *ids, double *logprobs, int32_t *ranks, void *scratch) {
  const Row &row = *static_cast<const Row *>(scratch);
  ids[0] = token;
  if (!row.has_choice) {
    for (int i = 0; i <= count; ++i) logprobs[i] = __builtin_nan(""), ranks[i] = 0, ids[i] = i ? i - 1 : token;
    return;
  }
  const double shift = double(row.max) + std::log(moments(row, 1.).total);
  const float x = row.x[token];
  logprobs[0] = double(x) - shift;
  ranks[0] = count_larger(row, x) + 1;
  if (count == 0) return;
  int found = collect_top_k(row, smaller(count, row.size));
  if (found < count) {  // tokens of probability 0 are listed too
    found = 0;
    for (int i = 0; i < row.size; ++i) row.found[found++] = {row.x[i], i};
    if (count < found) select(row.found, 0, found, count - 1, before);
  }
  sort(row.found, 0, count);
  for (int i = 0; i < count; ++i) {
    const Token t = row.found[i];
    ids[i + 1] = t.id;
    logprobs[i + 1] = double(t.x) - shift;
    ranks[i + 1] = i && row.found[i - 1].x == t.x ? ranks[i] : i + 1;
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
