#include "batch/packet.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace foreword {

void PacketCore::forget() {
  const auto R = size_t(states.max_num_reqs);
  generations_.assign(R, -1);
  stamps_.assign(R, -1);
  rewrites_.assign(R, -1);
  reach_.assign(R, {0, 0});
  records_.resize(R * size_t(record_size));
  zeros_.assign(size_t(states.max_model_len), 0);
  for (DeviceTable &t : tables) {
    t.held.assign(R, 0);
    t.copied.assign(R, -1);
  }
}

// Returns whether the device does not have this row, or has another progress, for example because only the device
// committed a step, or because tokens were removed or replaced. The host cannot know this while samples are in flight.
bool PacketCore::differs(int32_t row) const {
  if (generations_[row] != states.row_generation[row]) return true;
  const int32_t c = states.num_computed_tokens[row];
  return states.num_placeholders[row] == 0 &&
         (rewrites_[row] != states.rewrites[row] || c < reach_[row].low || c > reach_[row].high);
}

// Adds the run of columns of a row's record that the device lacks: all columns after a change of the sampling
// parameters, or the inputs if only these changed.
void PacketCore::add_columns(int32_t row) {
  bool changed = stamps_[row] != stamp[row];
  const size_t first = changed ? 0 : num_sampling;
  int32_t *const from = records_.data() + int64_t(row) * record_size + PROGRESS + (changed ? 0 : sampling_words);
  int32_t *to = from;
  for (size_t i = first; i < columns.size(); ++i) {
    const int32_t words = columns[i].words, *value = columns[i].data + int64_t(row) * words;
    changed |= !std::equal(value, value + words, to);
    to = std::copy_n(value, words, to);
  }
  if (changed) runs_.push_back({int32_t(records_at + from - records_.data()), int32_t(to - from), from});
  stamps_[row] = stamp[row];
}

// Adds the run of a row's progress. Tokens in flight count as known.
void PacketCore::add_progress(int32_t row) {
  const States &s = states;
  const int32_t progress[PROGRESS] = {s.num_tokens[row] + s.num_placeholders[row], s.num_computed_tokens[row],
                                      s.prefill_len[row], s.prompt_len[row]};
  int32_t *record = records_.data() + int64_t(row) * record_size;
  std::copy_n(progress, PROGRESS, record);
  runs_.push_back({records_at + row * record_size, PROGRESS, record});
  generations_[row] = s.row_generation[row];
  rewrites_[row] = s.rewrites[row];
  reach_[row] = {s.num_computed_tokens[row], s.num_computed_tokens[row]};
}

// Adds the runs of a row's progress and of its tokens before `end`, where the step ends. Tokens before the first one
// that the previous step computed have been sent already; later ones may have been replaced since. Tokens in flight are
// 0.
void PacketCore::follow(int32_t row, int32_t end) {
  const States &s = states;
  const bool has_row = generations_[row] == s.row_generation[row] && rewrites_[row] == s.rewrites[row];
  const int32_t known = s.num_tokens[row];
  const int32_t first = has_row ? std::min(s.num_computed_tokens[row], reach_[row].low) : 0;
  const int32_t last = std::min(known, end), in_flight = std::min(s.num_placeholders[row], end - known);
  if (last > first) runs_.push_back({~row, last - first, s.tokens_of(row) + first, first});
  if (in_flight > 0) runs_.push_back({~row, in_flight, zeros_.data(), known});
  add_progress(row);
}

// Adds the runs of all data of one row that the device lacks.
void PacketCore::add_row(int32_t row) {
  if (!follows_host && differs(row)) {
    runs_.push_back({~row, states.num_tokens[row], states.tokens_of(row)});
    add_progress(row);
  }
  add_columns(row);
  for (DeviceTable &t : tables) {
    const bool same = t.copied[row] == t.content_id[row];
    const int32_t have = same ? t.held[row] : 0, hold = t.num_blocks[row];
    if (same && have == hold) continue;
    const int64_t at = int64_t(row) * t.width + have;
    if (hold > have) runs_.push_back({int32_t(t.table_at + at), hold - have, t.table + at});
    runs_.push_back({t.num_at + row * record_size, 1, t.num_blocks + row});
    t.held[row] = hold;
    t.copied[row] = t.content_id[row];
  }
}

int64_t PacketCore::write(int32_t *out, int64_t runs_at) {
  int32_t *run = out + runs_at, *to = run + 3 * runs_.size();
  for (const Run &r : runs_) {
    *run++ = r.to;
    *run++ = r.length;
    if (r.to < 0) *to++ = r.first;
    *run++ = int32_t(to - out);
    std::memcpy(to, r.from, sizeof(int32_t) * size_t(r.length));
    if (r.to < 0 && is_embedding) {
      const bool *embedded = is_embedding + int64_t(~r.to) * states.max_model_len + r.first;
      for (int32_t i = 0; i < r.length; ++i)
        if (embedded[i]) to[i] = ~to[i];
    }
    to += r.length;
  }
  out[NUM_RUNS] = int32_t(runs_.size());
  out[RUNS_AT] = int32_t(runs_at);
  return to - out;
}

int64_t PacketCore::pack(const Buffers &step, int32_t *out, int64_t capacity) {
  const Scalars &s = *reinterpret_cast<const Scalars *>(step.scalars);
  const int64_t B = s.num_reqs, T = s.num_tokens, D = s.num_draft_tokens, Bp = s.num_reqs_padded;
  const int64_t runs_at = PACKET_HEADER + Bp + 2 * (Bp + 1) + T + D;
  if (s.num_tokens_padded > max_num_batched_tokens || Bp > states.max_num_reqs || runs_at > capacity)
    throw std::invalid_argument("a step of " + std::to_string(s.num_tokens_padded) + " tokens and " +
                                std::to_string(Bp) + " requests exceeds the device's tensors, which hold " +
                                std::to_string(max_num_batched_tokens) + " and " +
                                std::to_string(states.max_num_reqs));
  std::fill_n(out, PACKET_HEADER, 0);
  runs_.clear();
  int64_t length = runs_at;
  size_t counted = 0;
  int64_t row_size = 4 * 3 + 2 + record_size + states.max_model_len;  // the most that one row adds
  for (const DeviceTable &t : tables) row_size += 2 * 3 + 1 + t.width;
  for (int64_t b = 0; b < B; ++b) {
    if (step.row_generation[b] < 0) continue;
    if (length + row_size > capacity) return -write(out, PACKET_HEADER);
    const int32_t row = step.idx_mapping[b];
    if (follows_host) follow(row, states.num_computed_tokens[row] + step.num_scheduled_tokens[b]);
    add_row(row);
    for (; counted < runs_.size(); ++counted) length += 3 + (runs_[counted].to < 0) + runs_[counted].length;
  }
  out[NUM_REQS] = int32_t(B);
  out[NUM_TOKENS] = int32_t(T);
  out[NUM_REQS_PADDED] = int32_t(Bp);
  out[NUM_TOKENS_PADDED] = int32_t(s.num_tokens_padded);
  out[NUM_LOGITS] = int32_t(s.num_logits);
  out[NUM_DRAFTS] = int32_t(D);
  int32_t *to = out + PACKET_HEADER;
  for (int64_t b = 0; b < B; ++b) {
    const int32_t row = step.idx_mapping[b];
    to[b] = step.row_generation[b] < 0 ? ~row : row;
    if (step.row_generation[b] < 0 || follows_host) continue;
    const int32_t end = states.num_computed_tokens[row] + step.num_scheduled_tokens[b], k = step.num_draft_tokens[b];
    reach_[row] = {end - k - states.num_placeholders[row], end};
  }
  std::fill(to + B, to + Bp, 0);
  to = std::copy_n(step.query_start_loc, Bp + 1, to + Bp);
  std::copy_n(step.cu_num_draft_tokens, B + 1, to);
  std::fill(to + B + 1, to + Bp + 1, int32_t(D));
  to = std::copy_n(step.req_indices, T, to + Bp + 1);
  std::copy_n(step.draft_token_ids, D, to);
  return write(out, runs_at);
}

}  // namespace foreword
