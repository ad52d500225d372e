#include "kernels/forward/attention_plan.h"

namespace foreword::kernels {

void plan_attention(const ForwardInput &in, int max_queries, AttentionWindow window, int num_kv_heads, int num_threads,
                    AttentionPlan &plan) {
  plan.tasks.clear();
  plan.split_tiles.clear();
  plan.num_partials = 0;
  auto tiles_of = [&](int req) { return (in.query_len(req) + max_queries - 1) / max_queries; };
  int num_tiles = 0;
  for (int b = 0; b < in.num_reqs; ++b) num_tiles += tiles_of(b);
  const bool split = num_tiles * num_kv_heads < 4 * num_threads;
  for (int b = 0; b < in.num_reqs; ++b) {
    const int begin = in.query_start_loc[b], end = in.query_start_loc[b + 1];
    for (int tile = tiles_of(b) - 1; tile >= 0; --tile) {  // the last queries see most keys: longest tasks first
      const int first = begin + tile * max_queries, count = std::min(max_queries, end - first);
      const int64_t position = in.positions[first], key_end = position + count;
      const int64_t key_begin = window.begin(position);
      AttentionTask task{b, first, count, position, key_begin, key_end, -1};
      const int64_t first_split = key_begin / kSplit, last_split = (key_end - 1) / kSplit;
      if (!split || first_split == last_split) {
        plan.tasks.push_back(task);
        continue;
      }
      plan.split_tiles.push_back({int(plan.tasks.size()), int(last_split - first_split + 1)});
      for (int64_t s = first_split; s <= last_split; ++s) {
        task.key_begin = std::max(key_begin, s * kSplit);
        task.key_end = std::min(key_end, (s + 1) * kSplit);
        task.partial = plan.num_partials++;
        plan.tasks.push_back(task);
      }
    }
  }
}

}  // namespace foreword::kernels
