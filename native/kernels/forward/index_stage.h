// The indexer of sparse attention: its keys, and the positions of the keys that it chooses for each query: IndexerSpec.
#pragma once

#include <vector>

#include "kernels/forward/embedding_stage.h"

namespace foreword::kernels {

class IndexStage {
 public:
  IndexStage(PassContext &context, const EmbeddingStage &embedding);

  // Finds the queries of the step that do not see all keys.
  void reserve();
  // Returns whether there are any.
  bool is_active() const { return !rows_.empty(); }
  // [T, num_heads · head_dim]: the product of the queries, unrotated.
  FloatRows &queries() { return queries_; }
  // Writes the keys of all tokens, from the first product of the layer.
  void store_keys(int thread, const Layer &layer);
  // Chooses keys for the queries found. Their products are in `queries`, the keys are stored, and a barrier was passed
  // before the call. Ends with a barrier. The keys stay chosen until the next call.
  void choose(int thread, const Layer &layer);
  // The positions [topk], upwards, for a query found: its number in the order of tokens.
  const int32_t *chosen(int number) const { return chosen_.data() + size_t(number) * size_t(config_.topk); }

 private:
  struct Row {
    int req, token;
  };
  // Keys [begin, end) of the queries of `count` rows from `row` on, all of one request.
  struct Unit {
    int row, count;
    int64_t begin, end;
  };

  AttentionConfig attention() const;
  // Divides the scores of rows into units.
  void add_units();
  const float *weights(const Layer &layer, int token) const;

  PassContext &ctx_;
  const EmbeddingStage &embedding_;
  const IndexConfig &config_;
  const HeadShape shape_;
  std::vector<Row> rows_;
  std::vector<Unit> units_;
  std::vector<int> first_units_;  // by batch of rows, the first of its units; then the number of all
  FloatRows queries_, rotated_;   // rotated_: [rows, num_heads · padded_dim]
  int batch_ = 0;  // rows whose scores are in memory at once
  size_t score_stride_ = 0;
  Buffer<float> scores_;  // [rows of a batch, score_stride_]
  Buffer<int32_t> chosen_;
  std::vector<Buffer<uint8_t>> scratch_;   // [num_threads]
  std::vector<Buffer<float>> key_;         // [num_threads]: a key, and the scratch memory of store_kv
  std::vector<Buffer<int32_t>> order_;     // [num_threads]
};

}  // namespace foreword::kernels
