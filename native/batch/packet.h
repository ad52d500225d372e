// A step as one packet for a device that mirrors the rows: the plan, and the data that the device does not have yet.
//
// The layout of packet and arena is described in foreword/device/layout.py, which passes the arena's offsets.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/step.h"

namespace foreword {

// The indices of the first entries of a packet.
enum PacketHeader {
  NUM_REQS, NUM_TOKENS, NUM_REQS_PADDED, NUM_TOKENS_PADDED, NUM_LOGITS, NUM_DRAFTS, NUM_RUNS, RUNS_AT,
  PACKET_HEADER = 16,
};

// A column of a row's record, after the row's progress. It has `words` int32 per row.
struct RecordColumn {
  const int32_t *data;
  int32_t words;
};

// A block table on the host, and its place on the device.
struct DeviceTable {
  const int32_t *table, *num_blocks;  // [R, width], [R]
  const int64_t *content_id;          // [R]
  int32_t width, table_at, num_at;
  std::vector<int32_t> held;    // [R] entries that the device has
  std::vector<int64_t> copied;  // [R] the content that they are of
};

class PacketCore {
 public:
  States states;
  const int64_t *stamp;  // [R] renewed by every change of a row's sampling parameters
  std::vector<RecordColumn> columns;  // sampling parameters, then inputs
  size_t num_sampling = 0;            // the number of sampling parameters in `columns`
  int32_t sampling_words = 0;
  std::vector<DeviceTable> tables;
  const bool *is_embedding = nullptr;  // [R, M], or null: every position is a token
  int64_t max_num_batched_tokens;     // the largest step that the device's tensors hold
  int32_t records_at, record_size;
  bool follows_host = false;  // every packet has the host's progress and tokens: no step is committed on the device

  // Records that the device has no row.
  void forget();
  // [R] the generation of the row that the device has, −1: none.
  const std::vector<int64_t> &generations() const { return generations_; }
  // Writes the packet of the step in `step`, and returns its length. The length is negative if the changes do not fit:
  // the packet then holds the first of them and no plan, and the next call writes the others. Throws
  // std::invalid_argument for a step that is larger than the device's tensors or the packet.
  int64_t pack(const Buffers &step, int32_t *out, int64_t capacity);

 private:
  static constexpr int32_t PROGRESS = 4;  // num_tokens, num_computed_tokens, prefill_len, prompt_len
  // `to`: an entry of the arena, or ~row for the tokens of the row from the position `first` on.
  struct Run {
    int32_t to, length;
    const int32_t *from;
    int32_t first = 0;
  };

  // The range of num_computed_tokens that a row may have after the last sent step, for any number of accepted drafts.
  struct Range {
    int32_t low, high;
  };

  bool differs(int32_t row) const;
  void add_columns(int32_t row);
  void add_row(int32_t row);
  void add_progress(int32_t row);
  void follow(int32_t row, int32_t end);
  int64_t write(int32_t *out, int64_t runs_at);

  std::vector<Run> runs_;
  std::vector<int32_t> records_;      // [R, record_size] values of the runs that no array of the host holds in order
  std::vector<int64_t> generations_;  // [R]
  std::vector<int64_t> stamps_;       // [R] of the sampling parameters that the device has
  std::vector<int64_t> rewrites_;     // [R] of the tokens and the progress that the device has
  std::vector<Range> reach_;          // [R]
  std::vector<int32_t> zeros_;        // [M]
};

}  // namespace foreword
