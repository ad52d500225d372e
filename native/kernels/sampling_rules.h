// The changes of a row of logits by the parameters of its request, before the draw. foreword/sampling/reference.py
// defines every rule.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/parameters.h"

namespace foreword::kernels {

// The token ids of a request: those known, then some drafts.
struct TokenText {
  const int32_t *known;
  int num_known;
  const int32_t *drafts;
  int num_drafts;

  int size() const { return num_known + num_drafts; }
  // The k-th token from the end.
  int32_t from_end(int k) const {
    return k < num_drafts ? drafts[num_drafts - 1 - k] : known[num_known - 1 - (k - num_drafts)];
  }
};

// The number of times that each token is in a text. Memory grows only with the number of different tokens.
class TokenCounts {
 public:
  struct Entry {
    int32_t id;
    int32_t num_outputs;
    bool in_prompt;
  };

  // Memory for `more` tokens: then adding them cannot fail.
  void reserve(size_t more);
  void clear();
  void add_prompt(int32_t id) { entry(id).in_prompt = true; }
  void add_output(int32_t id, int32_t times) { entry(id).num_outputs += times; }
  const std::vector<Entry> &entries() const { return entries_; }

 private:
  Entry &entry(int32_t id);
  void insert(uint32_t index);
  size_t first_slot(int32_t id) const { return (uint32_t(id) * 0x9E3779B1u) & (slots_.size() - 1); }

  std::vector<Entry> entries_;
  std::vector<uint32_t> slots_;  // a power of two: 1 + the index of an entry, or 0; a token's is at its hash or after
};

// Returns whether tokens are counted.
inline bool has_penalties(const Parameters &p) {
  return p.repetition_penalty != 1.f || p.frequency_penalty != 0.f || p.presence_penalty != 0.f;
}

// Lists that no column holds. Ids are of the vocabulary.
struct TokenRules {
  std::optional<std::vector<int32_t>> allowed;
  std::vector<int32_t> bias_ids;
  std::vector<float> bias;
  std::vector<int32_t> end_ids;         // not before the minimum length
  std::vector<int32_t> bad_words;       // one after the other
  std::vector<int32_t> bad_word_ends;   // the end of each in bad_words
  std::vector<int32_t> dry_breakers;    // ascending
};

// Memory of one thread.
struct RuleScratch {
  struct Repetition {
    int32_t id, length;
  };
  std::vector<float> before;
  std::vector<int32_t> ids, text, lengths, prompted;
  std::vector<Repetition> repetitions;
};

// Forbids the tokens whose bit is 0: bit t mod 32 of words[t / 32].
void apply_mask(const int32_t *words, int vocab_size, float *x);

// Changes the row x [vocab_size] for the token after `text`, whose last `num_outputs` are outputs. `counts` is of
// the text if there are penalties, else not read.
void apply_rules(const TokenRules &rules, const Parameters &parameters, const TokenCounts &counts,
                 const TokenText &text, int num_outputs, int vocab_size, float *x, RuleScratch &scratch);

}  // namespace foreword::kernels
