// How the attention of one KV group is divided into tasks for the threads.
#pragma once

#include <vector>

#include "kernels/forward/input.h"

namespace foreword::kernels {

// Consecutive queries of one request against the keys [key_begin, key_end).
struct AttentionTask {
  int req, first_token, num_queries;
  int64_t first_position, key_begin, key_end;
  int partial;  // index of its partial result; −1: it writes the output itself
};

// A tile whose splits are consecutive tasks; their partial results are merged in order.
struct SplitTile {
  int first_task, num_splits;
};

struct AttentionPlan {
  std::vector<AttentionTask> tasks;  // each is computed once per KV head
  std::vector<SplitTile> split_tiles;
  int num_partials = 0;
};

// Tiles of at most `max_queries` queries. With few tiles per thread, the splits of long contexts become tasks of their
// own. Results do not depend on that choice: splits are merged in the same order.
void plan_attention(const ForwardInput &input, int max_queries, int64_t sliding_window, int num_kv_heads,
                    int num_threads, AttentionPlan &plan);

}  // namespace foreword::kernels
