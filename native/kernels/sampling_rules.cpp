#include "kernels/sampling_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace foreword::kernels {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr double kMostPenalty = 1e30;  // penalized logits stay finite

bool has_token(const float *x, int vocab_size) {
  for (int i = 0; i < vocab_size; ++i) {
    if (x[i] > kForbidden) return true;
  }
  return false;
}

// x[ids[i]] = value(i), undone if no token is possible then.
template <class F>
void set_unless_none_left(const std::vector<int32_t> &ids, int vocab_size, float *x, std::vector<float> &before,
                          F &&value) {
  before.clear();
  for (int32_t id : ids) before.push_back(x[id]);
  for (size_t i = 0; i < ids.size(); ++i) x[ids[i]] = value(i);
  if (has_token(x, vocab_size)) return;
  for (size_t i = 0; i < ids.size(); ++i) x[ids[i]] = before[i];
}

void allow_only(const std::vector<int32_t> &allowed, int vocab_size, float *x, std::vector<float> &kept) {
  kept.clear();
  for (int32_t id : allowed) kept.push_back(x[id]);
  if (!has_token(kept.data(), int(kept.size()))) return;
  std::fill(x, x + vocab_size, kForbidden);
  for (size_t i = 0; i < allowed.size(); ++i) x[allowed[i]] = kept[i];
}

void penalize(const Parameters &p, const TokenCounts &counts, int vocab_size, float *x) {
  for (const TokenCounts::Entry &entry : counts.entries()) {
    if ((!entry.num_outputs && !entry.in_prompt) || uint32_t(entry.id) >= uint32_t(vocab_size)) continue;
    float &value = x[entry.id];
    value = value > 0.f ? value / p.repetition_penalty : value * p.repetition_penalty;
    if (entry.num_outputs) value -= p.frequency_penalty * float(entry.num_outputs) + p.presence_penalty;
  }
}

// With r the reversed text: r[0 .. m) = r[k .. k + m) says that its last m tokens come before r[k - 1] too, which would
// extend the repetition. The longest m for every k by the Z algorithm.
void penalize_repetitions(const Parameters &p, const std::vector<int32_t> &breakers, const TokenText &text,
                          int vocab_size, float *x, RuleScratch &scratch) {
  const int shortest = std::max(1, p.dry_allowed_length);
  const int n = p.dry_range < 0 ? text.size() : std::min(text.size(), p.dry_range);
  std::vector<int32_t> &r = scratch.text, &length = scratch.lengths;
  r.resize(size_t(n));
  length.resize(size_t(n));
  for (int k = 0; k < n; ++k) r[size_t(k)] = text.from_end(k);
  int most = 0;  // tokens after the last breaker
  while (most < n && !std::binary_search(breakers.begin(), breakers.end(), r[size_t(most)])) ++most;
  if (most < shortest) return;
  scratch.repetitions.clear();
  for (int k = 1, begin = 0, end = 0; k < n; ++k) {
    int m = k < end ? std::min(length[size_t(k - begin)], end - k) : 0;
    while (k + m < n && r[size_t(m)] == r[size_t(k + m)]) ++m;
    length[size_t(k)] = m;
    if (k + m > end) begin = k, end = k + m;
    m = std::min(m, most);
    if (m >= shortest) scratch.repetitions.push_back({r[size_t(k - 1)], m});
  }
  std::sort(scratch.repetitions.begin(), scratch.repetitions.end(), [](const auto &a, const auto &b) {
    return a.id < b.id || (a.id == b.id && a.length > b.length);
  });
  int32_t last = -1;
  for (const auto &[id, m] : scratch.repetitions) {
    if (id == last || uint32_t(id) >= uint32_t(vocab_size)) continue;
    last = id;
    const double penalty = double(p.dry_multiplier) * std::pow(double(p.dry_base), m - shortest);
    x[id] -= float(std::min(penalty, kMostPenalty));
  }
}

// The last tokens of the bad words whose other tokens end the text.
void find_bad_ends(const TokenRules &rules, const TokenText &text, std::vector<int32_t> &ends) {
  ends.clear();
  int begin = 0;
  for (int end : rules.bad_word_ends) {
    const int others = end - begin - 1;
    bool matches = others <= text.size();
    for (int k = 0; matches && k < others; ++k) matches = rules.bad_words[size_t(end - 2 - k)] == text.from_end(k);
    if (matches) ends.push_back(rules.bad_words[size_t(end - 1)]);
    begin = end;
  }
}

}  // namespace

void TokenCounts::reserve(size_t more) {
  const size_t wanted = entries_.size() + more;
  if (wanted > entries_.capacity()) entries_.reserve(std::max(wanted, 2 * entries_.capacity()));
  if (2 * wanted <= slots_.size()) return;
  size_t size = 16;
  while (size < 2 * wanted) size *= 2;
  std::vector<uint32_t>(size).swap(slots_);
  for (size_t i = 0; i < entries_.size(); ++i) insert(uint32_t(i));
}

void TokenCounts::clear() {
  entries_.clear();
  std::fill(slots_.begin(), slots_.end(), 0);
}

void TokenCounts::insert(uint32_t index) {
  size_t at = first_slot(entries_[index].id);
  while (slots_[at]) at = (at + 1) & (slots_.size() - 1);
  slots_[at] = index + 1;
}

TokenCounts::Entry &TokenCounts::entry(int32_t id) {
  for (size_t at = first_slot(id); slots_[at]; at = (at + 1) & (slots_.size() - 1)) {
    if (entries_[slots_[at] - 1].id == id) return entries_[slots_[at] - 1];
  }
  entries_.push_back({id, 0, false});
  insert(uint32_t(entries_.size() - 1));
  return entries_.back();
}

void apply_mask(const int32_t *words, int vocab_size, float *x) {
  for (int begin = 0; begin < vocab_size; begin += 32) {
    const uint32_t word = uint32_t(words[begin / 32]);
    const int count = std::min(32, vocab_size - begin);
    if (word == ~0u) continue;
    for (int i = 0; i < count; ++i) x[begin + i] = (word >> i) & 1 ? x[begin + i] : kForbidden;
  }
}

void apply_rules(const TokenRules &rules, const Parameters &parameters, const TokenCounts &counts,
                 const TokenText &text, int num_outputs, int vocab_size, float *x, RuleScratch &scratch) {
  if (rules.allowed) allow_only(*rules.allowed, vocab_size, x, scratch.before);
  if (!rules.bias_ids.empty()) {
    set_unless_none_left(rules.bias_ids, vocab_size, x, scratch.before,
                         [&](size_t i) { return x[rules.bias_ids[i]] + rules.bias[i]; });
  }
  const auto forbidden = [](size_t) { return kForbidden; };
  if (num_outputs < parameters.min_tokens) {
    set_unless_none_left(rules.end_ids, vocab_size, x, scratch.before, forbidden);
  }
  if (has_penalties(parameters)) penalize(parameters, counts, vocab_size, x);
  if (parameters.dry_multiplier > 0.f) {
    penalize_repetitions(parameters, rules.dry_breakers, text, vocab_size, x, scratch);
  }
  if (!rules.bad_words.empty()) {
    find_bad_ends(rules, text, scratch.ids);
    set_unless_none_left(scratch.ids, vocab_size, x, scratch.before, forbidden);
  }
}

}  // namespace foreword::kernels
