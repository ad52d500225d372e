#include "batch/step.h"

#include <algorithm>
#include <cstring>

#include "batch/vectorized.h"

namespace foreword {
namespace {

enum AttentionState { PREFILL_NO_CACHE, PREFILL_CACHE_HIT, DECODE_ONLY, CHUNKED_PREFILL, SPEC_DECODING };

int32_t local_seq_len(int32_t seq_len, const ContextParallel &cp) {
  const int32_t round = cp.interleave * cp.size, rest = seq_len % round - cp.rank * cp.interleave;
  return seq_len / round * cp.interleave + std::clamp(rest, 0, cp.interleave);
}

// out[b] = column[rows[b]], vectorized.
template <class T>
inline void take(const T *__restrict column, const int32_t *__restrict rows, int64_t count, T *__restrict out) {
  for (int64_t b = 0; b < count; ++b) out[b] = column[rows[b]];
}

// Returns whether the tokens and drafts of every request fit its row, its known tokens, and its blocks.
FOREWORD_VECTORIZED bool lengths_fit(const Plan &plan, const States &s, const std::vector<Group> &groups) {
  const int32_t *__restrict rows = plan.rows, *__restrict num_scheduled = plan.num_scheduled;
  const int32_t *__restrict num_drafts = plan.num_drafts;
  const bool *__restrict cancelled = plan.cancelled;
  bool fit = true;
  for (int64_t b = 0; b < plan.num_reqs; ++b) {
    const int32_t row = rows[b], n = num_scheduled[b], k = num_drafts ? num_drafts[b] : 0;
    const int64_t end = int64_t(s.num_computed_tokens[row]) + n, known = s.num_tokens[row] + s.num_placeholders[row];
    const bool known_fit = k > 0 ? end - k == known : end <= known;
    const bool ok = (k >= 0) & (n >= 1 + k) & (k <= s.max_num_draft_tokens) & (end <= s.max_model_len) & known_fit &
                    (s.num_computed_tokens[row] >= 0) &
                    (uint32_t(s.num_tokens[row]) - 1 < uint32_t(s.max_model_len));
    fit &= ok | (cancelled && cancelled[b]);
  }
  for (const Group &g : groups)
    for (int64_t b = 0; b < plan.num_reqs; ++b) {
      const int64_t end = int64_t(s.num_computed_tokens[rows[b]]) + num_scheduled[b];
      const int32_t held = g.num_blocks[rows[b]];
      fit &= ((end <= int64_t(held) * g.tokens_per_block) & (held <= g.width)) | (cancelled && cancelled[b]);
    }
  return fit;
}

// Copies the parts of the rows that the step reads.
FOREWORD_VECTORIZED void take_rows(const Plan &plan, const States &s, const Buffers &o) {
  const int64_t B = plan.num_reqs;
  const int32_t *__restrict rows = plan.rows, *__restrict num_scheduled = plan.num_scheduled;
  const int32_t *__restrict prefill_len = s.prefill_len, *__restrict computed = o.num_computed_tokens;
  take(s.num_computed_tokens, rows, B, o.num_computed_tokens);
  take(s.num_placeholders, rows, B, o.num_placeholders);
  take(s.row_generation, rows, B, o.row_generation);
  bool *__restrict is_prefilling = o.is_prefilling;
  for (int64_t b = 0; b < B; ++b) is_prefilling[b] = computed[b] < prefill_len[rows[b]];
  for (int64_t b = 0; plan.cancelled && b < B; ++b)
    if (plan.cancelled[b]) {
      o.num_computed_tokens[b] = o.num_placeholders[b] = 0;
      o.is_prefilling[b] = false;
      o.row_generation[b] = -1;
    }
  int32_t *__restrict seq_lens = o.seq_lens;
  for (int64_t b = 0; b < B; ++b) seq_lens[b] = computed[b] + num_scheduled[b];
}

// Token ids, positions and batch indices of each request's tokens. The first `singles` requests have one each.
FOREWORD_VECTORIZED void copy_tokens(const Plan &plan, const States &s, const Buffers &o, int64_t singles) {
  const int32_t *__restrict rows = o.idx_mapping, *__restrict computed = o.num_computed_tokens;
  const int32_t *__restrict token_ids = s.token_ids;
  int32_t *__restrict input_ids = o.input_ids, *__restrict req_indices = o.req_indices;
  int64_t *__restrict positions = o.positions;
  for (int64_t b = 0; b < singles; ++b) input_ids[b] = token_ids[rows[b] * s.token_stride + computed[b]];
  for (int64_t b = 0; b < singles; ++b) positions[b] = computed[b];
  for (int64_t b = 0; b < singles; ++b) req_indices[b] = int32_t(b);
  for (int64_t b = singles, t = singles; b < plan.num_reqs; ++b) {
    const int32_t n = o.num_scheduled_tokens[b], c = computed[b];
    if (plan.is_cancelled(b))
      std::fill_n(input_ids + t, n, 0);
    else
      std::memcpy(input_ids + t, s.tokens_of(rows[b]) + c, sizeof(int32_t) * n);
    std::fill_n(req_indices + t, n, int32_t(b));
    for (int32_t i = 0; i < n; ++i) positions[t + i] = c + i;
    t += n;
  }
}

// The slot of each token in one KV group. The first `singles` requests have one token each.
FOREWORD_VECTORIZED void fill_slots(const Plan &plan, const Buffers &o, const Group &g, int64_t singles) {
  if (g.recurrent) return;
  const int32_t S = g.block_size, P = g.tokens_per_block, round = g.cp.interleave * g.cp.size;
  const int32_t *__restrict rows = o.idx_mapping, *__restrict computed = o.num_computed_tokens;
  const int32_t *__restrict table = g.table;
  int64_t *__restrict slots = g.step.slot_mapping;
  int64_t t = g.cp.size == 1 ? singles : 0;
  for (int64_t b = 0; b < t; ++b) {
    const int32_t k = g.block_of(computed[b]);
    slots[b] = int64_t(table[int64_t(rows[b]) * g.width + k]) * S + (computed[b] - k * P);
  }
  for (int64_t b = t; b < plan.num_reqs; ++b) {
    const int32_t *blocks = g.row(rows[b]);
    const int32_t n = o.num_scheduled_tokens[b];
    int32_t k = g.block_of(computed[b]), offset = computed[b] - k * P;
    if (plan.is_cancelled(b)) {
      std::fill_n(slots + t, n, int64_t(-1));
      t += n;
      continue;
    }
    for (int32_t i = 0; i < n;) {  // one run of tokens per block
      const int32_t run = std::min(n - i, P - offset);
      const int64_t base = int64_t(blocks[k]) * S;
      if (g.cp.size == 1) {
        for (int32_t j = 0; j < run; ++j) slots[t + j] = base + offset + j;
      } else {
        for (int32_t j = 0; j < run; ++j) {
          const int32_t at = offset + j;
          const bool owned = at / g.cp.interleave % g.cp.size == g.cp.rank;
          slots[t + j] = owned ? base + at / round * g.cp.interleave + at % g.cp.interleave : -1;
        }
      }
      t += run;
      i += run;
      offset = 0;
      ++k;
    }
  }
}

// The kind of step: see foreword.batch.values.attention.
AttentionState attention_state(const Plan &plan, const States &s, const Buffers &o) {
  bool decode_only = plan.num_reqs > 0, no_cache = true, reach_end = true;
  if (plan.num_draft_ids) return SPEC_DECODING;
  for (int64_t b = 0; b < plan.num_reqs; ++b) {
    const int32_t c = o.num_computed_tokens[b], n = plan.num_scheduled[b];
    decode_only &= (n == 1) & (c > 0 || plan.is_cancelled(b));
    no_cache &= c == 0;
  }
  if (decode_only) return DECODE_ONLY;
  if (no_cache) return PREFILL_NO_CACHE;
  for (int64_t b = 0; b < plan.num_reqs && reach_end; ++b) {
    const int32_t c = o.num_computed_tokens[b], prompt = s.prompt_len[plan.rows[b]];
    reach_end = plan.is_cancelled(b) || (c < prompt && c + plan.num_scheduled[b] >= prompt);
  }
  return reach_end ? PREFILL_CACHE_HIT : CHUNKED_PREFILL;
}

// The pad value in entries from … stale − 1, which a larger step before wrote.
template <class T>
void pad(T *array, int64_t from, int64_t stale, T value = 0) {
  if (stale > from) std::fill(array + from, array + stale, value);
}

}  // namespace

bool StepCore::prepare(const Plan &plan) {
  if (!acceptable(plan)) return false;
  Scalars out;
  requests(plan, out);
  int64_t singles = 0;  // leading requests with one token: most of them in most steps
  while (singles < plan.num_reqs && plan.num_scheduled[singles] == 1 && !plan.is_cancelled(singles)) ++singles;
  tokens(plan, out, singles);
  out.num_logits = logits(plan);
  pad(buffers.logits_indices, out.num_logits, buffers.written[LOGITS]);
  pad(buffers.expanded_idx_mapping, out.num_logits, buffers.written[LOGITS], -1);
  for (Group &group : groups) {
    fill_slots(plan, buffers, group, singles);
    if (plan.gather) gather(plan, group);
  }
  *reinterpret_cast<Scalars *>(buffers.scalars) = out;
  buffers.written[TOKENS] = out.num_tokens;
  buffers.written[REQUESTS] = out.num_reqs;
  buffers.written[LOGITS] = out.num_logits;
  if (plan.gather) buffers.written[GATHERED] = out.num_reqs;
  return true;
}

bool StepCore::acceptable(const Plan &plan) {
  const States &s = states;
  if (seen_.empty()) seen_.assign(s.max_num_reqs, 0);
  ++call_;
  if (plan.num_reqs > s.max_num_reqs) return false;
  int64_t num_tokens = 0, num_drafts = 0;
  for (int64_t b = 0; b < plan.num_reqs; ++b) {
    const int32_t row = plan.rows[b];
    num_tokens += plan.num_scheduled[b];
    num_drafts += plan.num_drafts ? plan.num_drafts[b] : 0;
    if (row < 0 || row >= s.max_num_reqs) return false;
    if (plan.is_cancelled(b)) continue;
    if (!s.live[row] || seen_[row] == call_) return false;
    seen_[row] = call_;
  }
  if (!lengths_fit(plan, s, groups)) return false;
  for (const Group &g : groups)
    if (g.may_hold_null() && writes_null(plan, g)) return false;
  if (num_drafts != plan.num_draft_ids || num_tokens > buffers.max_num_batched_tokens) return false;
  for (int64_t d = 0; d < num_drafts; ++d)
    if (plan.draft_ids[d] < -1 || plan.draft_ids[d] >= s.vocab_size) return false;
  const bool tokens_fit =
      plan.pad_tokens < 0 || (num_tokens <= plan.pad_tokens && plan.pad_tokens <= buffers.max_num_batched_tokens);
  const bool reqs_fit = plan.pad_reqs < 0 || (plan.num_reqs <= plan.pad_reqs && plan.pad_reqs <= s.max_num_reqs);
  return tokens_fit && reqs_fit;
}

// Returns whether a token would be written to the null block.
bool StepCore::writes_null(const Plan &plan, const Group &g) const {
  for (int64_t b = 0; b < plan.num_reqs; ++b) {
    if (plan.is_cancelled(b)) continue;
    const int32_t c = states.num_computed_tokens[plan.rows[b]], last = g.block_of(c + plan.num_scheduled[b] - 1);
    const int32_t *blocks = g.row(plan.rows[b]);
    for (int32_t k = g.block_of(c); k <= last; ++k)
      if (blocks[k] == g.null_block) return true;
  }
  return false;
}

// Everything of one entry per request, and the scalars that follow from it.
void StepCore::requests(const Plan &plan, Scalars &out) {
  const States &s = states;
  Buffers &o = buffers;
  const int64_t B = plan.num_reqs;
  const int64_t padded = plan.pad_reqs < 0 ? B : plan.pad_reqs;
  int32_t loc = 0, max_query = 0, max_seq = 0, unresolved = 0;
  std::copy_n(plan.rows, B, o.idx_mapping);  // not memcpy: an empty plan has no addresses
  std::copy_n(plan.num_scheduled, B, o.num_scheduled_tokens);
  if (plan.num_drafts)
    std::copy_n(plan.num_drafts, B, o.num_draft_tokens);
  else
    std::fill_n(o.num_draft_tokens, B, 0);
  take_rows(plan, s, o);
  for (int64_t b = 0; b < B; ++b) {
    o.query_start_loc[b] = loc;
    loc += plan.num_scheduled[b];
    unresolved += o.num_placeholders[b] > 0;
    max_query = std::max(max_query, plan.num_scheduled[b]);
    max_seq = std::max(max_seq, o.seq_lens[b]);
  }
  std::fill(o.query_start_loc + B, o.query_start_loc + padded + 1, loc);
  const int64_t stale = o.written[REQUESTS];
  pad(o.seq_lens, B, stale);
  pad(o.idx_mapping, B, stale, -1);
  pad(o.num_computed_tokens, B, stale);
  pad(o.is_prefilling, B, stale);
  if (context_parallel) {
    for (int64_t b = 0; b < B; ++b) o.dcp_local_seq_lens[b] = local_seq_len(o.seq_lens[b], cp);
    pad(o.dcp_local_seq_lens, B, stale);
  }
  out.num_reqs = B;
  out.num_reqs_padded = padded;
  out.num_tokens = loc;
  out.num_tokens_padded = plan.pad_tokens < 0 ? loc : plan.pad_tokens;
  out.max_query_len = max_query;
  out.max_seq_len = max_seq;
  out.num_draft_tokens = plan.num_draft_ids;
  out.num_unresolved = unresolved;
  out.attention_state = attention_state(plan, s, o);
}

// Everything of one entry per token. Drafts are staged past the known tokens first, so that one copy serves every row.
void StepCore::tokens(const Plan &plan, Scalars &out, int64_t singles) {
  const States &s = states;
  Buffers &o = buffers;
  const int64_t B = out.num_reqs, T = out.num_tokens;
  for (int64_t b = 0, d = 0; plan.num_drafts && b < B; ++b) {
    const int32_t row = plan.rows[b];
    int32_t *staged = s.tokens_of(row) + s.num_tokens[row] + s.num_placeholders[row];
    for (int32_t j = 0; j < plan.num_drafts[b]; ++j, ++d) {
      if (!plan.is_cancelled(b)) staged[j] = std::max(plan.draft_ids[d], 0);
      o.draft_token_ids[d] = plan.draft_ids[d];
    }
  }
  copy_tokens(plan, s, o, singles);
  for (int64_t b = 0; out.num_unresolved && b < B; ++b)  // ids that a step in flight will sample are not known yet
    if (const int32_t placeholders = o.num_placeholders[b]) {
      const int32_t c = o.num_computed_tokens[b], n = o.num_scheduled_tokens[b];
      const int32_t from = s.num_tokens[o.idx_mapping[b]] - c, first = std::clamp(from, 0, n);
      std::fill(o.input_ids + o.query_start_loc[b] + first,
                o.input_ids + o.query_start_loc[b] + std::clamp(from + placeholders, first, n), 0);
    }
  const int64_t stale = o.written[TOKENS];
  pad(o.input_ids, T, stale);
  pad(o.positions, T, stale);
  for (Group &g : groups) pad(g.step.slot_mapping, T, stale, int64_t(-1));
}

// The last 1 + drafts tokens of each request are projected to logits.
int64_t StepCore::logits(const Plan &plan) {
  Buffers &o = buffers;
  const int64_t B = plan.num_reqs;
  o.cu_num_logits[0] = o.cu_num_draft_tokens[0] = 0;
  if (!plan.num_drafts) {  // one per request, in order
    for (int64_t b = 0; b < B; ++b) o.logits_indices[b] = o.query_start_loc[b + 1] - 1;
    for (int64_t b = 0; b < B; ++b) o.bonus_logits_indices[b] = b;
    for (int64_t b = 0; b < B; ++b) o.cu_num_logits[b + 1] = int32_t(b + 1);
    std::copy_n(plan.rows, B, o.expanded_idx_mapping);
    std::fill_n(o.expanded_local_pos, B, 0);
    std::fill_n(o.cu_num_draft_tokens + 1, B, 0);
    return B;
  }
  int32_t l = 0, d = 0;
  for (int64_t b = 0; b < B; ++b) {
    const int32_t k = plan.num_drafts[b], first = o.query_start_loc[b + 1] - 1 - k;
    for (int32_t j = 0; j <= k; ++j) {
      o.logits_indices[l + j] = first + j;
      o.expanded_idx_mapping[l + j] = plan.rows[b];
      o.expanded_local_pos[l + j] = j;
      if (j < k) o.target_logits_indices[d + j] = l + j;
    }
    o.bonus_logits_indices[b] = l + k;
    o.cu_num_logits[b + 1] = l += k + 1;
    o.cu_num_draft_tokens[b + 1] = d += k;
  }
  return l;
}

// Row b of the gathered table: the request's blocks, null past the end and wholly below the sliding window.
// A row that still copies the same content only gets what was appended, so a step costs its changed blocks.
void StepCore::gather(const Plan &plan, Group &g) {
  GroupBuffers &o = g.step;
  const auto clear = [&](int64_t b) {
    std::fill_n(o.block_table + b * g.width, o.num_blocks[b], g.null_block);
    o.num_blocks[b] = 0;
    o.content_id[b] = 0;
  };
  for (int64_t b = 0; b < plan.num_reqs; ++b) {
    if (plan.is_cancelled(b)) {
      clear(b);
      continue;
    }
    const int32_t row = buffers.idx_mapping[b], held = g.num_blocks[row];
    const bool same = o.content_id[b] == g.content_id[row];
    int32_t *to = o.block_table + b * g.width;
    const int32_t have = same ? o.num_blocks[b] : 0;
    if (held > have)
      std::memcpy(to + have, g.row(row) + have, sizeof(int32_t) * (held - have));
    else if (same && g.sliding_window < 2)
      continue;
    if (g.sliding_window >= 2) {
      const int32_t below = std::max(buffers.num_computed_tokens[b] - g.sliding_window + 1, 0) / g.tokens_per_block;
      const int32_t nulled = std::min(below, held), done = same ? o.num_nulled[b] : 0;
      if (nulled > done) std::fill(to + done, to + nulled, g.null_block);
      if (nulled < done)  // progress that was assumed and taken back
        std::memcpy(to + nulled, g.row(row) + nulled, sizeof(int32_t) * (done - nulled));
      o.num_nulled[b] = nulled;
    }
    if (const int32_t stale = o.num_blocks[b]; stale > held) std::fill(to + held, to + stale, g.null_block);
    o.num_blocks[b] = held;
    o.content_id[b] = g.content_id[row];
  }
  for (int64_t b = plan.num_reqs; b < buffers.written[GATHERED]; ++b) clear(b);
}

bool StepCore::flatten_drafts(const int32_t *drafts, int64_t B, int64_t width) {
  num_drafts.resize(B);
  draft_ids.clear();
  draft_ids.reserve(B * width);
  for (int64_t b = 0; b < B; ++b, drafts += width) {
    int64_t k = 0;
    while (k < width && drafts[k] >= 0) draft_ids.push_back(drafts[k++]);
    num_drafts[b] = int32_t(k);
    for (; k < width; ++k)
      if (drafts[k] >= 0) return false;
  }
  return true;
}

void StepCore::advance(int64_t B) {
  const States &s = states;
  Buffers &o = buffers;
  for (int64_t b = 0; b < B; ++b) {
    const int32_t row = o.idx_mapping[b], k = o.num_draft_tokens[b];
    const int32_t end = o.num_computed_tokens[b] + o.num_scheduled_tokens[b];
    const bool current = s.row_generation[row] == o.row_generation[b];
    o.samples[b] = current && end - k >= s.num_tokens[row] + s.num_placeholders[row];
    if (current) s.advance(row, end, o.samples[b], k);
  }
}

bool StepCore::commit(const int32_t *sampled, int64_t B, int64_t width, bool advanced) {
  const Buffers &o = buffers;
  const States &s = states;
  // First pass: how many samples each row takes (−1: the row was freed meanwhile, −2: a prompt chunk, which discards
  // them). Nothing is written if one is wrong.
  constexpr int32_t LATE = -1, CHUNK = -2;
  num_samples_.resize(B);
  for (int64_t b = 0; b < B; ++b) {
    const int32_t *tokens = sampled + b * width, row = o.idx_mapping[b];
    int64_t m = 0;
    while (m < width && tokens[m] >= 0) {
      if (tokens[m] >= s.vocab_size) return false;
      ++m;
    }
    for (int64_t j = m; j < width; ++j)
      if (tokens[j] != -1) return false;
    if (s.row_generation[row] != o.row_generation[b]) {
      num_samples_[b] = LATE;
      continue;
    }
    const int32_t k = o.num_draft_tokens[b], v = s.num_tokens[row];
    const bool samples = advanced ? o.samples[b] : o.num_computed_tokens[b] + o.num_scheduled_tokens[b] - k >= v;
    if (!samples) {
      num_samples_[b] = CHUNK;
      continue;
    }
    if (m > k + 1 || v < 0 || v + m > s.max_model_len) return false;
    __builtin_prefetch(s.tokens_of(row) + v, 1);
    num_samples_[b] = int32_t(m);
  }
  for (int64_t b = 0; b < B; ++b) {
    const int32_t m = num_samples_[b], row = o.idx_mapping[b];
    if (m == LATE) continue;
    s.reach(row, o.num_computed_tokens[b] + o.num_scheduled_tokens[b], advanced);
    if (m != CHUNK) s.accept(row, sampled + b * width, m, o.num_draft_tokens[b], advanced);
  }
  return true;
}

}  // namespace foreword
