// The Python class CpuModel.
#pragma once

#include "kernels/bind_values.h"
#include "kernels/forward/forward.h"

namespace foreword::kernels {

// A model under construction, then in use. Matrices, vectors and ropes are named by the integers that adding them returns.
class CpuModel {
 public:
  CpuModel(const ModelConfig &config, const KVConfig &kv, const std::string &isa, int num_threads);

  int pack(const Array2<uint8_t> &data, const std::string &source, int cols, const std::string &format, bool exact);
  int vector(const Array1<float> &values);
  void set_embedding(const Array2<uint8_t> &data, const std::string &source, int cols);
  int add_rope(const std::vector<double> &inv_freq, double scale);
  void add_layer(const nanobind::dict &d);
  void finish(int final_norm, int lm_head);

  nanobind::ndarray<nanobind::numpy, const float, nanobind::ndim<2>> step(
      int num_tokens, int num_reqs, const Array1<int32_t> &input_ids, const Array1<int64_t> &positions,
      const Array1<int32_t> &query_start_loc, const Array1<int32_t> &seq_lens, const Array1<int32_t> &idx_mapping,
      const Array1<int64_t> &logits_indices, const std::vector<Array1<int64_t>> &slot_mapping,
      const std::vector<Array2<int32_t>> &block_tables);
  void copy_blocks(const Array1<int32_t> &sources, const Array1<int32_t> &destinations);

  nanobind::dict stage_seconds() const;
  size_t packed_bytes() const { return model_.packed_bytes(); }
  const Isa &isa() const { return model_.isa; }
  ThreadPool &pool() { return model_.pool; }
  int num_threads() const { return model_.pool.size(); }
  uint8_t *sampling_scratch(size_t bytes) { return sampling_.reserve(bytes); }

 private:
  Linear linear(const std::vector<int> &ids);
  Mlp mlp(nanobind::handle ids);
  std::unique_ptr<Moe> moe(const nanobind::dict &d);

  Model model_;
  std::vector<const PackedMatrix *> matrices_;
  std::vector<Vector> vectors_;
  nanobind::object embedding_;
  std::unique_ptr<ForwardPass> forward_;
  Buffer<uint8_t> sampling_;
};

void bind_model(nanobind::module_ &m);

}  // namespace foreword::kernels
