#include "kernels/forward/input.h"

#include <algorithm>

namespace foreword::kernels {
namespace {

std::string table_row(int32_t row) { return "block_table[" + std::to_string(row) + "]"; }

// A request reads the state in entry num_accepted_tokens − 1, and writes one per draft and one before them.
void check_states(const ForwardInput &in, const ForwardInput::Group &g, int b, const KVConfig &kv) {
  if (in.query_len(b) == 0) return;
  require(in.num_draft_tokens, b, 0, std::min(in.query_len(b), g.stride), "num_draft_tokens");
  const int32_t row = in.idx_mapping[b], *blocks = g.blocks_of(row);
  require(in.num_accepted_tokens, row, 1, int64_t(g.stride) + 1, "num_accepted_tokens");
  for (int i = 0; i <= in.num_draft_tokens[b]; ++i) {
    require(blocks, i, kv.first_state(), kv.num_ids(), table_row(row).c_str());
  }
  require(blocks, in.first_state(b), kv.first_state(), kv.num_ids(), table_row(row).c_str());
}

}  // namespace

void check_adapter(const int32_t *lora_ids, int req, const Model &model) {
  if (lora_ids[req] == 0 || model.loras.contains(lora_ids[req])) return;
  throw std::invalid_argument("lora_ids[" + std::to_string(req) + "] = " + std::to_string(lora_ids[req]) +
                              " is not the number of an adapter");
}

void check_input(const ForwardInput &in, const Model &model) {
  const KVConfig &kv = model.kv.config();
  const int64_t num_slots = int64_t(kv.num_blocks) * kv.block_size;
  if (int(in.groups.size()) != model.config.num_groups) {
    throw std::invalid_argument("the batch has " + std::to_string(in.groups.size()) + " KV groups, the model " +
                                std::to_string(model.config.num_groups));
  }
  for (int t = 0; t < in.num_tokens; ++t) {
    require(in.input_ids, t, 0, model.config.vocab_size, "input_ids");
    if (model.positions.data) require(in.positions, t, 0, model.positions.rows, "positions");
    for (const ForwardInput::Group &g : in.groups) require(g.slot_mapping, t, -1, num_slots, "slot_mapping");
  }
  for (int l = 0; l < in.num_logits; ++l) require(in.logits_indices, l, 0, in.num_tokens, "logits_indices");
  for (int n = 0; n < in.num_embeds; ++n) {
    require(in.embed_rows, n, n ? in.embed_rows[n - 1] + 1 : 0, in.num_tokens, "embed_rows");
  }
  require(in.query_start_loc, 0, 0, 1, "query_start_loc");
  for (int b = 0; b < in.num_reqs; ++b) {
    const int begin = in.query_start_loc[b];
    require(in.query_start_loc, b + 1, begin, int64_t(in.num_tokens) + 1, "query_start_loc");
    if (in.lora_ids) check_adapter(in.lora_ids, b, model);
    const int64_t first = int64_t(in.seq_lens[b]) - in.query_len(b);
    for (int t = begin; t < in.query_start_loc[b + 1]; ++t) {
      const int64_t position = first + (t - begin);
      require(in.positions, t, std::max<int64_t>(0, position), position + 1, "positions");
      if (in.last_seen) require(in.last_seen, t, position, in.seq_lens[b], "last_seen");
    }
    for (const ForwardInput::Group &g : in.groups) {
      require(in.idx_mapping, b, 0, g.num_rows, "idx_mapping");
      if (g.recurrent) {
        check_states(in, g, b, kv);
        continue;
      }
      const int64_t num_blocks = (int64_t(in.seq_lens[b]) + kv.block_size - 1) / kv.block_size;
      if (num_blocks > g.stride) require(in.seq_lens, b, 0, int64_t(g.stride) * kv.block_size + 1, "seq_lens");
      const int32_t *blocks = g.blocks_of(in.idx_mapping[b]);
      for (int64_t k = 0; k < num_blocks; ++k) {
        if (blocks[k] < 0 || blocks[k] >= kv.num_blocks) {
          require(blocks, k, 0, kv.num_blocks, table_row(in.idx_mapping[b]).c_str());
        }
      }
    }
  }
}

}  // namespace foreword::kernels
