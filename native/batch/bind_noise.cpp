// The noise of vLLM's second model runner: foreword/vllm/sampling.py.
#include <stdexcept>

#include "batch/bind.h"
#include "batch/noise.h"

namespace foreword {
namespace {

using Seeds = Vector<const int64_t>;

template <class... Arrays>
void check(const Seeds &seeds, const Seeds &positions, size_t num_tokens, const Arrays &...arrays) {
  if (positions.shape(0) != seeds.shape(0) || ((arrays.shape(0) != seeds.shape(0)) || ...) ||
      ((arrays.shape(1) != num_tokens) || ...) || num_tokens > size_t(1) << 31)
    throw std::invalid_argument("expected as many rows as seeds and positions, of the same number of tokens");
}

void noise_uniform32(const Seeds &seeds, const Seeds &positions, Matrix<float> ones, Matrix<float> series) {
  const size_t count = ones.shape(1);
  check(seeds, positions, count, ones, series);
  for (size_t i = 0; i < seeds.shape(0); ++i)
    uniform32(mixed_seed(seeds.data()[i], positions.data()[i], 0), int64_t(count), ones.data() + i * count,
              series.data() + i * count);
}

void noise_select(const Matrix<const float> &series, Matrix<float> values) {
  if (series.shape(0) != values.shape(0) || series.shape(1) != values.shape(1))
    throw std::invalid_argument("expected two arrays of the same shape");
  select_series(int64_t(series.size()), series.data(), values.data());
}

void noise_uniform64(const Seeds &seeds, const Seeds &positions, Matrix<double> uniforms) {
  const size_t count = uniforms.shape(1);
  check(seeds, positions, count, uniforms);
  for (size_t i = 0; i < seeds.shape(0); ++i) {
    const int64_t seed = seeds.data()[i], position = positions.data()[i];
    uniform64(mixed_seed(seed, position, 0), mixed_seed(seed, position, kHighDomain), int64_t(count),
              uniforms.data() + i * count);
  }
}

void philox_uniforms(const Seeds &seeds, const Seeds &offsets, Vector<float> uniforms) {
  if (offsets.shape(0) != seeds.shape(0) || uniforms.shape(0) != seeds.shape(0))
    throw std::invalid_argument("expected as many offsets and numbers as seeds");
  for (size_t i = 0; i < seeds.shape(0); ++i)
    uniforms.data()[i] = philox_uniform(seeds.data()[i], offsets.data()[i]);
}

}  // namespace

void bind_noise(nb::module_ &m) {
  m.def("noise_uniform32", &noise_uniform32, kRead, kRead, kWritten, kWritten,
        nb::sig("def noise_uniform32(seeds: " PY_I64 ", positions: " PY_I64 ", ones: " PY_F32 ", series: " PY_F32
                ", /) -> None"),
        "Write 1 - u and, where u is small, -log(1 - u) by a series, else -1, per seed with its position, and"
        " token.\n\n"
        "u: a uniform number. ones, series [n, V].");
  m.def("noise_select", &noise_select, kRead, kWritten,
        nb::sig("def noise_select(series: " PY_F32 ", values: " PY_F32 ", /) -> None"),
        "Replace each value by that of the series, or by its negative where the series has -1.");
  m.def("noise_uniform64", &noise_uniform64, kRead, kRead, kWritten,
        nb::sig("def noise_uniform64(seeds: " PY_I64 ", positions: " PY_I64 ", uniforms: " PY_F64 ", /) -> None"),
        "Write a uniform number of 53 bits per seed, position [n] and token [V].");
  m.def("philox_uniforms", &philox_uniforms, kRead, kRead, kWritten,
        nb::sig("def philox_uniforms(seeds: " PY_I64 ", offsets: " PY_I64 ", uniforms: " PY_F32 ", /) -> None"),
        "Write a uniform number in (0, 1) per seed and offset: the first word of Philox 4x32 after ten rounds.");
}

}  // namespace foreword
