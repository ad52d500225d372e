#include "kernels/forward/attention_plan.h"

namespace foreword::kernels {
namespace {

// Calls tile(task) for the tiles of the queries [begin, end) of a request, the last ones first: its last queries see
// most keys.
template <class Tile>
void causal_tiles(const ForwardInput &in, int req, int end, int max_queries, AttentionWindow window, Tile tile) {
  const int begin = in.query_start_loc[req];
  const int num_tiles = (end - begin + max_queries - 1) / max_queries;
  for (int i = num_tiles - 1; i >= 0; --i) {
    const int first = begin + i * max_queries, count = std::min(max_queries, end - first);
    const int64_t position = in.positions[first];
    tile({req, first, count, position, window.begin(position), position + count, window.size, -1});
  }
}

// Adds the tiles of a request with spans, in order. In a span with the end `last + 1`, the query at p sees the keys
// (p − window, last]. Moved by last − p of the first query of a tile, a causal mask shows all up to the end, and a
// window that is larger by as much all from p − window + 1 on.
template <class Tile>
void tiles_with_spans(const ForwardInput &in, int req, int max_queries, AttentionWindow window, Tile tile) {
  const int begin = in.query_start_loc[req], end = in.query_start_loc[req + 1];
  for (int first = begin, count; first < end; first += count) {
    const int64_t position = in.positions[first], last = in.last_key(first), moved = last - position;
    auto is_alike = [&](int t) { return in.last_key(t) == (moved ? last : in.positions[t]); };
    for (count = 1; count < std::min(max_queries, end - first) && is_alike(first + count);) ++count;
    if (moved) {
      tile({req, first, count, last, window.begin(position), last + 1, window.size ? window.size + moved : 0, -1});
    } else {
      tile({req, first, count, position, window.begin(position), position + count, window.size, -1});
    }
  }
}

// Adds tiles in which a query sees the keys after it too: moved by one less than the window, a causal mask with a
// window of both sides shows all at a smaller distance.
template <class Tile>
void bidirectional_tiles(const ForwardInput &in, int req, int max_queries, AttentionWindow window, Tile tile) {
  const int begin = in.query_start_loc[req], end = in.query_start_loc[req + 1];
  const int64_t length = in.seq_lens[req];
  for (int first = begin; first < end; first += max_queries) {
    const int count = std::min(max_queries, end - first);
    const int64_t position = in.positions[first], moved = window.size ? window.size - 1 : length;
    const int64_t key_end = std::min(length, position + count + moved);
    tile({req, first, count, position + moved, window.begin(position), key_end, window.size ? 2 * moved + 1 : 0, -1});
  }
}

}  // namespace

int dense_end(const ForwardInput &in, int req, int topk) {
  const int begin = in.query_start_loc[req], end = in.query_start_loc[req + 1];
  if (!topk || begin == end) return end;
  return begin + int(std::clamp<int64_t>(topk - in.positions[begin], 0, end - begin));
}

void plan_attention(const ForwardInput &in, int max_queries, AttentionWindow window, int num_kv_heads, int num_threads,
                    int topk, AttentionPlan &plan) {
  plan.tasks.clear();
  plan.split_tiles.clear();
  plan.num_partials = 0;
  int num_tiles = 0, num_chosen = 0;
  for (int b = 0; b < in.num_reqs; ++b) {
    const int end = dense_end(in, b, topk);
    num_tiles += (end - in.query_start_loc[b] + max_queries - 1) / max_queries + in.query_start_loc[b + 1] - end;
  }
  const bool split = num_tiles * num_kv_heads < 4 * num_threads;
  auto add = [&](AttentionTask task) {
    const int64_t key_begin = task.key_begin, key_end = task.key_end;
    const int64_t first_split = key_begin / kSplit, last_split = (key_end - 1) / kSplit;
    if (!split || first_split == last_split) {
      plan.tasks.push_back(task);
      return;
    }
    plan.split_tiles.push_back({int(plan.tasks.size()), int(last_split - first_split + 1)});
    for (int64_t s = first_split; s <= last_split; ++s) {
      task.key_begin = std::max(key_begin, s * kSplit);
      task.key_end = std::min(key_end, (s + 1) * kSplit);
      task.partial = plan.num_partials++;
      plan.tasks.push_back(task);
    }
  };
  for (int b = 0; b < in.num_reqs; ++b) {
    if (in.bidirectional) {
      bidirectional_tiles(in, b, max_queries, window, add);
    } else if (in.last_seen && !window.skips_spans) {
      tiles_with_spans(in, b, max_queries, window, add);
    } else {
      const int end = dense_end(in, b, topk);
      for (int query = end; query < in.query_start_loc[b + 1]; ++query) {
        add({b, query, 1, topk - 1, 0, topk, 0, -1, num_chosen++});
      }
      causal_tiles(in, b, end, max_queries, window, add);
    }
  }
}

}  // namespace foreword::kernels
