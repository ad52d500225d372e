// LogitRows of logits of vLLM's second model runner: foreword/vllm/sampling.py.
#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <vector>

#include "batch/bind.h"
#include "batch/logits.h"

namespace foreword {
namespace {

// LogitRows may have any distance, as slices have. Their entries are one after another.
template <class T>
class LogitRows {
 public:
  using Array = nb::ndarray<T, nb::ndim<2>, nb::device::cpu>;

  LogitRows(const Array &array, const char *name, int64_t width) : array_(array), name_(name) {
    if (width < 0) fail("the size of a row is below 0");
    if (array.shape(0) > 0 && array.shape(1) > 1 && array.stride(1) != 1)
      fail("the entries of a row must be one after another");
    if (int64_t(array.shape(1)) < width) fail("a row has too few entries");
  }

  T *operator[](int64_t row) const {
    if (row < 0 || row >= int64_t(array_.shape(0))) fail("there is no row " + std::to_string(row));
    return array_.data() + row * array_.stride(0);
  }

 private:
  [[noreturn]] void fail(const std::string &what) const { throw std::invalid_argument(name_ + ": " + what); }

  Array array_;
  std::string name_;
};

template <class T>
using Array2 = typename LogitRows<T>::Array;
using Indices = Vector<const int64_t>;

template <class... Arrays>
void check_lengths(size_t count, const Arrays &...arrays) {
  if (((arrays.shape(0) != count) || ...)) throw std::invalid_argument("expected as many entries as rows");
}

int64_t words(int64_t num_bits) { return (num_bits + 31) / 32; }

void divide_rows(const Array2<float> &logits, int64_t vocab_size, const Indices &rows,
                 const Vector<const float> &by) {
  check_lengths(rows.shape(0), by);
  const LogitRows of_logits(logits, "logits", vocab_size);
  for (size_t i = 0; i < rows.shape(0); ++i) divide(vocab_size, by.data()[i], of_logits[rows.data()[i]]);
}

void mask_below_largest(const Array2<float> &logits, int64_t vocab_size, const Indices &rows,
                        const Vector<const float> &distances) {
  check_lengths(rows.shape(0), distances);
  const LogitRows of_logits(logits, "logits", vocab_size);
  for (size_t i = 0; i < rows.shape(0); ++i) {
    float *row = of_logits[rows.data()[i]];
    mask_below(vocab_size, largest(vocab_size, row) + distances.data()[i], row);
  }
}

template <class T>
void mask_refused_rows(const Array2<T> &logits, int64_t vocab_size, const Indices &rows,
                       const Array2<const int32_t> &allowed, const Indices &masks, T minus_infinity) {
  check_lengths(rows.shape(0), masks);
  const LogitRows of_logits(logits, "logits", vocab_size);
  const LogitRows of_masks(allowed, "allowed", words(vocab_size));
  for (size_t i = 0; i < rows.shape(0); ++i)
    mask_refused(vocab_size, of_masks[masks.data()[i]], minus_infinity, of_logits[rows.data()[i]]);
}

void penalise_rows(const Array2<float> &logits, int64_t vocab_size, const Indices &rows, const Indices &requests,
                   const Array2<const float> &penalties, const Array2<const int32_t> &prompts,
                   const Array2<const int32_t> &counts, const Indices &tokens, const Indices &num_drafts) {
  check_lengths(rows.shape(0), requests, penalties, num_drafts);
  const LogitRows of_logits(logits, "logits", vocab_size);
  const LogitRows of_prompts(prompts, "prompts", words(vocab_size)), of_counts(counts, "counts", vocab_size);
  const LogitRows of_penalties(penalties, "penalties", 3);
  std::vector<std::pair<int64_t, float>> drafts;  // tokens and their logits
  for (size_t i = 0; i < rows.shape(0); ++i) {
    const int64_t row = rows.data()[i], request = requests.data()[i], count = num_drafts.data()[i];
    float *own = of_logits[row];
    const int32_t *prompt = of_prompts[request], *counted = of_counts[request];
    const float *values = of_penalties[int64_t(i)];
    const Penalties of_row{values[0], values[1], values[2]};
    if (count < 0 || count > row + 1 || row >= int64_t(tokens.shape(0)))
      throw std::invalid_argument("num_drafts: more drafts than tokens before the row");
    drafts.clear();
    for (int64_t k = row - count + 1; k <= row; ++k)
      if (const int64_t token = tokens.data()[k]; token >= 0 && token < vocab_size)
        drafts.emplace_back(token, own[token]);
    penalise(vocab_size, of_row, prompt, counted, own);
    for (const auto &[token, logit] : drafts) {
      const auto same = std::count_if(drafts.begin(), drafts.end(), [=](auto &d) { return d.first == token; });
      const bool in_prompt = (uint32_t(prompt[token / 32]) >> (token % 32)) & 1;
      own[token] = of_row.apply(logit, in_prompt, counted[token] + int32_t(same));
    }
  }
}

template <class T>
void add_logit_rows(const Array2<const float> &logits, const Indices &rows, const Vector<const float> &temperatures,
                    const Matrix<T> &noise) {
  check_lengths(rows.shape(0), temperatures, noise);
  const int64_t count = int64_t(noise.shape(1));
  const LogitRows of_logits(logits, "logits", count);
  for (size_t i = 0; i < rows.shape(0); ++i)
    add_logits(count, of_logits[rows.data()[i]], temperatures.data()[i], noise.data() + i * count);
}

template <class T>
void block_argmax(const Array2<const T> &values, int64_t block_size, int64_t num_blocks, const Indices &rows,
                  const Array2<int64_t> &indices, const Array2<T> &most) {
  check_lengths(values.shape(0), rows);
  if (block_size < 1 || block_size > int64_t(1) << 31)
    throw std::invalid_argument("block_size: expected a number from 1 to 2**31");
  const LogitRows of_values(values, "values", 0);
  const LogitRows of_indices(indices, "indices", num_blocks);
  const LogitRows of_most(most, "most", num_blocks);
  const int64_t count = int64_t(values.shape(1));
  for (size_t i = 0; i < rows.shape(0); ++i) {
    const T *row = of_values[int64_t(i)];
    int64_t *to = of_indices[rows.data()[i]];
    T *largest = of_most[rows.data()[i]];
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t start = std::min(block * block_size, count), size = std::min(block_size, count - start);
      to[block] = block * block_size + first_largest(size, row + start, largest[block]);
    }
  }
}

// The largest number as NumPy's nanmax has it: NaN where there are only NaNs.
float nan_largest(int64_t count, const float *values) {
  const float most = largest(count, values), minus_infinity = -std::numeric_limits<float>::infinity();
  const bool none = most == minus_infinity && std::find(values, values + count, most) == values + count;
  return none ? std::numeric_limits<float>::quiet_NaN() : most;
}

void below_largest(const Vector<const float> &logits, bool by_block, const Vector<float> &most,
                   const Matrix<float> &shifted) {
  const int64_t count = int64_t(logits.shape(0)), size = int64_t(shifted.shape(1));
  const int64_t num_blocks = int64_t(shifted.shape(0));
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  check_lengths(by_block ? size_t(num_blocks) : 1, most);
  if (count > num_blocks * size || count <= (num_blocks - 1) * size)
    throw std::invalid_argument("shifted: expected as many blocks as the logits take");
  if (!by_block) most.data()[0] = nan_largest(count, logits.data());
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float *own = logits.data() + block * size;
    float *to = shifted.data() + block * size;
    const int64_t own_size = std::min(size, count - block * size);
    if (by_block) {  // what fills the last block counts
      const float of_block = nan_largest(own_size, own);
      most.data()[block] = of_block != of_block && own_size < size ? minus_infinity : of_block;
    }
    const float by = most.data()[by_block ? block : 0];
    subtract(own_size, own, by, to);
    std::fill(to + own_size, to + size, by_block ? minus_infinity - by : minus_infinity);
  }
}

}  // namespace

void bind_logits(nb::module_ &m) {
  m.def("divide_rows", &divide_rows, kWritten, kRead, kRead, kRead,
        nb::sig("def divide_rows(logits: " PY_F32 ", vocab_size: int, rows: " PY_I64 ", by: " PY_F32 ", /) -> None"),
        "Divide the rows [n] of logits [L, V or more] by a number each.");
  m.def("mask_below_largest", &mask_below_largest, kWritten, kRead, kRead, kRead,
        nb::sig("def mask_below_largest(logits: " PY_F32 ", vocab_size: int, rows: " PY_I64 ", distances: " PY_F32
                ", /) -> None"),
        "Write -inf where a logit of the rows [n] is below the largest one of its row plus a distance.");
#define FOREWORD_REFUSED(type)                                                                          \
  nb::sig("def mask_refused_rows(logits: " type ", vocab_size: int, rows: " PY_I64 ", allowed: " PY_I32 \
          ", masks: " PY_I64 ", minus_infinity: int, /) -> None")
  m.def("mask_refused_rows", &mask_refused_rows<uint16_t>, kWritten, kRead, kRead, kRead, kRead, kRead,
        FOREWORD_REFUSED(PY_U16));
  m.def("mask_refused_rows", &mask_refused_rows<uint32_t>, kWritten, kRead, kRead, kRead, kRead, kRead,
        FOREWORD_REFUSED(PY_U32),
        "Write -inf where bit v of allowed[masks[i]] is 0 for logit v of rows[i]. logits: as bits.");
  m.def("penalise_rows", &penalise_rows, kWritten, kRead, kRead, kRead, kRead, kRead, kRead, kRead, kRead,
        nb::sig("def penalise_rows(logits: " PY_F32 ", vocab_size: int, rows: " PY_I64 ", requests: " PY_I64
                ", penalties: " PY_F32 ", prompts: " PY_I32 ", counts: " PY_I32 ", tokens: " PY_I64
                ", num_drafts: " PY_I64 ", /) -> None"),
        "Apply repetition, frequency and presence penalties [n, 3] to the rows [n] of logits.\n\n"
        "requests [n]: rows of prompts (bits) and of counts. The last num_drafts[i] of tokens[: rows[i] + 1] count.");
#define FOREWORD_ADD(type)                                                                          \
  nb::sig("def add_logit_rows(logits: " PY_F32 ", rows: " PY_I64 ", temperatures: " PY_F32 ", noise: " type \
          ", /) -> None")
  m.def("add_logit_rows", &add_logit_rows<float>, kRead, kRead, kRead, kWritten, FOREWORD_ADD(PY_F32));
  m.def("add_logit_rows", &add_logit_rows<double>, kRead, kRead, kRead, kWritten, FOREWORD_ADD(PY_F64),
        "noise[i] += logits[rows[i]] / temperatures[i]");
#define FOREWORD_ARGMAX(type)                                                                                     \
  nb::sig("def block_argmax(values: " type ", block_size: int, num_blocks: int, rows: " PY_I64 ", indices: " PY_I64 \
          ", most: " type ", /) -> None")
  m.def("block_argmax", &block_argmax<float>, kRead, kRead, kRead, kRead, kWritten, kWritten,
        FOREWORD_ARGMAX(PY_F32));
  m.def("block_argmax", &block_argmax<double>, kRead, kRead, kRead, kRead, kWritten, kWritten,
        FOREWORD_ARGMAX(PY_F64),
        "Write the first largest number of each block of values[i], and its index, into rows[i]; NaNs do not count.");
  m.def("below_largest", &below_largest, kRead, kRead, kWritten, kWritten,
        nb::sig("def below_largest(logits: " PY_F32 ", by_block: bool, most: " PY_F32 ", shifted: " PY_F32
                ", /) -> None"),
        "shifted [blocks, size] = logits [V] - most, the largest one of all [1] or of each block. -inf fills it.");
}

}  // namespace foreword
