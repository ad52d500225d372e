// Drafts from a request's own tokens: foreword/engine/speculation/lookup.py has the definition.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "batch/bind.h"
#include "batch/vectorized.h"

namespace foreword {
namespace {

// Returns the largest p in [begin, end) with tokens[p] == wanted, else begin − 1.
FOREWORD_VECTORIZED int64_t last_with(const int32_t *tokens, int64_t begin, int64_t end, int32_t wanted) {
  constexpr int64_t BLOCK = 64;
  while (end - begin >= BLOCK) {
    const int32_t *block = tokens + end - BLOCK;
    int32_t found = 0;
    for (int64_t i = 0; i < BLOCK; ++i) found |= block[i] == wanted;
    if (found) break;
    end -= BLOCK;
  }
  while (end > begin && tokens[end - 1] != wanted) --end;
  return end - 1;
}

struct Match {
  int64_t at = 0;  // the place of the first token after it
  int32_t length = 0;
};

// Returns the longest sequence that begins at token `first` or later, ends before token `known`, and is equal to the
// last tokens, at most `longest` of them; of equal lengths the latest.
Match best_match(const int32_t *tokens, int64_t first, int64_t known, int32_t longest) {
  Match best;
  for (int64_t p = last_with(tokens, first, known - 1, tokens[known - 1]); p >= first;
       p = last_with(tokens, first, p, tokens[known - 1])) {
    int32_t length = 1;
    while (length < longest && p - length >= first && tokens[p - length] == tokens[known - 1 - length]) ++length;
    if (length > best.length) best = {p + 1, length};
    if (length == longest) break;
  }
  return best;
}

Ints vector_of(nb::handle source, int64_t size, bool writable = false) {
  Ints values;
  if (!values.read(source, writable) || values.ndim != 1 || values.size != size)
    throw nb::type_error("expected int32 [n] in C order");
  return values;
}

// Rows may have any distance, as those of a RequestStates have. Their tokens are one after another.
using TokenRows = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;

class TokenLookup {
 public:
  TokenLookup(const TokenRows &tokens, Vector<const int32_t> num_tokens, int32_t shortest, int32_t longest)
      : tokens_(tokens.data()), stride_(tokens.stride(0)), num_rows_(int64_t(tokens.shape(0))),
        width_(int64_t(tokens.shape(1))), num_tokens_(num_tokens.data()), shortest_(shortest), longest_(longest) {
    if (width_ > 1 && tokens.stride(1) != 1)
      throw std::invalid_argument("token_ids: the tokens of a row must be one after another");
    if (int64_t(num_tokens.shape(0)) != num_rows_) throw std::invalid_argument("num_tokens: expected one per row");
    if (shortest < 1 || shortest > longest) throw std::invalid_argument("expected 1 <= min_match <= max_match");
  }

  void propose(nb::handle in_rows, nb::handle in_first, nb::handle in_most, nb::handle out_drafts,
               nb::handle out_lengths) const {
    Ints rows, drafts;
    if (!rows.read(in_rows) || rows.ndim != 1 || !drafts.read(out_drafts, true) || drafts.ndim != 2 ||
        drafts.size != rows.size)
      throw nb::type_error("expected int32 rows [n] and drafts [n, width] in C order");
    const Ints most = vector_of(in_most, rows.size), lengths = vector_of(out_lengths, rows.size, true);
    const int32_t *firsts = in_first.is_none() ? nullptr : vector_of(in_first, rows.size).data;
    for (int64_t i = 0; i < rows.size; ++i) {
      const int64_t row = rows.data[i];
      if (row < 0 || row >= num_rows_) throw std::invalid_argument("rows: there is no row " + std::to_string(row));
      const int64_t known = num_tokens_[row], first = firsts ? firsts[i] : 0;
      if (known < 0 || known > width_) throw std::invalid_argument("num_tokens: not a number of tokens of a row");
      if (first < 0) throw std::invalid_argument("first: below 0");
      int32_t *out = drafts.writable_data() + i * drafts.width;
      std::fill_n(out, drafts.width, -1);
      const int32_t *tokens = tokens_ + row * stride_;
      const int64_t count = std::min<int64_t>(most.data[i], drafts.width);
      Match match;
      if (count > 0 && known > 1) match = best_match(tokens, first, known, longest_);
      const bool drafted = match.length >= shortest_;
      lengths.writable_data()[i] = drafted ? match.length : 0;
      if (!drafted) continue;
      const int64_t period = known - match.at;
      for (int64_t k = 0; k < count; ++k) out[k] = k < period ? tokens[match.at + k] : out[k - period];
    }
  }

 private:
  const int32_t *tokens_;
  int64_t stride_, num_rows_, width_;
  const int32_t *num_tokens_;
  int32_t shortest_, longest_;
};

}  // namespace

void bind_lookup(nb::module_ &m) {
  using namespace nb::literals;
  nb::class_<TokenLookup>(m, "TokenLookup", "Drafts from the rows of one RequestStates: foreword.engine.speculation.")
      .def(nb::init<TokenRows, Vector<const int32_t>, int32_t, int32_t>(), "token_ids"_a.noconvert(),
           "num_tokens"_a.noconvert(), "min_match"_a, "max_match"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::sig("def __init__(self, token_ids: " PY_I32 ", num_tokens: " PY_I32
                   ", min_match: int, max_match: int) -> None"))
      .def("propose", &TokenLookup::propose, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
           nb::sig("def propose(self, rows: " PY_I32 ", first: " PY_I32 " | None, most: " PY_I32 ", drafts: " PY_I32
                   ", lengths: " PY_I32 ", /) -> None"),
           "Write up to most[i] drafts of rows[i], [n, width] padded with -1, and the lengths of their matches,"
           " [n].\n\n"
           "first[i]: the position where matches may begin; None: 0.");
}

}  // namespace foreword
