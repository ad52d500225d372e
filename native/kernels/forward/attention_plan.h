// The division of the attention of one KV group into tasks for the threads.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/forward/input.h"

namespace foreword::kernels {

// Consecutive queries of one request against the keys [key_begin, key_end). The mask is that of queries at positions
// from first_position on with a window of this size: of those in a span, which see each other, both are moved.
struct AttentionTask {
  int req, first_token, num_queries;
  int64_t first_position, key_begin, key_end, window;
  int partial;  // index of its partial result; −1: it writes the output itself
  int chosen = -1;  // the number of its one query, whose keys an indexer chooses; −1: it sees those before it
};

// A tile whose splits are consecutive tasks; their partial results are merged in order.
struct SplitTile {
  int first_task, num_splits;
};

// The keys that the layers of a KV group see: those of AttentionConfig. size −1: its layers are recurrent.
struct AttentionWindow {
  int64_t size = -1;
  bool chunked = false;
  bool skips_spans = false;

  // The first key that a query sees.
  int64_t begin(int64_t position) const {
    if (!size) return 0;
    return chunked ? position - position % size : std::max<int64_t>(0, position - size + 1);
  }
};

struct AttentionPlan {
  std::vector<AttentionTask> tasks;  // each is computed once per KV head
  int num_kv_heads = 0;  // in latent attention parts of the heads, each with the one key, so that all threads work
  std::vector<SplitTile> split_tiles;
  int num_partials = 0;
};

// The end of the queries of a request that see all keys before them; an indexer chooses for those from there on.
// topk: as below.
int dense_end(const ForwardInput &input, int req, int topk);

// Tiles of at most `max_queries` queries. With few tiles per thread, the splits of long contexts become tasks of their
// own. Results do not depend on that choice: splits are merged in the same order. A span is a run of tokens that see
// each other (`last_seen`), within the window. topk: a query at this position or a later one sees so many keys that an
// indexer chooses; 0: all see all keys.
void plan_attention(const ForwardInput &input, int max_queries, AttentionWindow window, int num_kv_heads,
                    int num_threads, int topk, AttentionPlan &plan);

}  // namespace foreword::kernels
