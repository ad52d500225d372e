// The numbers of drafts, and what is learnt from them: foreword/engine/speculation/adaptive.py has the definition.
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "batch/bind.h"

namespace foreword {
namespace {

Ints table(nb::handle source, int64_t size, bool writable = false) {
  Ints values;
  if (!values.read(source, writable) || values.size != size) throw nb::type_error("expected int32 [n] or [n, width]");
  return values;
}

Ints column(nb::handle source, int64_t size) {
  const Ints values = table(source, size);
  if (values.ndim != 1) throw nb::type_error("expected int32 [n]");
  return values;
}

using Counts = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

class DraftPolicy {
 public:
  DraftPolicy(Matrix<double> accepted, Matrix<double> judged, Matrix<double> all, Vector<int32_t> lengths,
              Vector<const double> log_cost, Vector<int64_t> drafted_at, Vector<int64_t> accepted_at, double worth,
              double relative_cost, double forget, double forget_all)
      : num_rows_(int64_t(accepted.shape(0))), num_kinds_(int64_t(accepted.shape(1))),
        num_costs_(int64_t(log_cost.shape(0))), most_(int64_t(drafted_at.shape(0))), accepted_(accepted.data()),
        judged_(judged.data()), all_(all.data()), lengths_(lengths.data()), log_cost_(log_cost.data()),
        drafted_at_(drafted_at.data()), accepted_at_(accepted_at.data()), worth_(worth),
        relative_cost_(relative_cost), forget_(forget), forget_all_(forget_all) {
    if (judged.shape(0) != accepted.shape(0) || judged.shape(1) != accepted.shape(1) || all.shape(0) != 2 ||
        all.shape(1) != accepted.shape(1) || lengths.shape(0) != accepted.shape(0) ||
        accepted_at.shape(0) != drafted_at.shape(0))
      throw std::invalid_argument("arrays of different rows, kinds or lengths");
  }

  // Returns whether drafts in a step of n rows would be worth verifying if all of them were right.
  bool can_gain(int64_t n) const {
    if (n < 1 || n > (num_costs_ - 1) / (most_ + 1)) throw std::invalid_argument("more tokens than costs");
    for (int64_t k = 1; k <= most_; ++k)
      if (log_cost_[n + n * k] - log_cost_[n] <= std::log(double(k + 1) / worth_)) return true;
    return false;
  }

  // Replaces the drafts that are not worth verifying by −1. credit: what they may cost, in steps without drafts.
  // Returns whether any is left.
  bool choose(nb::handle in_rows, nb::handle in_drafts, nb::handle in_kinds, double credit) {
    Ints rows;
    if (!rows.read(in_rows) || rows.ndim != 1) throw nb::type_error("expected int32 rows [n]");
    const int64_t n = rows.size;
    const Ints drafts = table(in_drafts, n, true), kinds = column(in_kinds, n);
    gains_.clear();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = entry(rows.data[i], kinds.data[i]);
      const double rate = accepted_[at] / judged_[at];
      double gain = 1.;
      for (int64_t k = 0; k < std::min(drafts.width, most_) && drafts.data[i * drafts.width + k] >= 0; ++k)
        gains_.emplace_back(gain *= rate, i);
    }
    const int64_t count = int64_t(gains_.size());
    if (n + count >= num_costs_) throw std::invalid_argument("more tokens than costs");
    std::stable_sort(gains_.begin(), gains_.end(), [](const Gain &a, const Gain &b) { return a.first > b.first; });
    double yielded = double(n), best = yielded;
    int64_t chosen = 0;
    for (int64_t k = 1; k <= count; ++k) {
      yielded += gains_[size_t(k - 1)].first;
      const double cost =
          std::exp(std::max(log_cost_[n + k] - log_cost_[n], 0.)) + relative_cost_ * double(k) / double(n);
      if (cost - 1. <= credit && yielded / cost > best) best = yielded / cost, chosen = k;
    }
    if (best < worth_ * double(n)) chosen = 0;
    for (int64_t i = 0; i < n; ++i) lengths_[rows.data[i]] = 0;
    for (int64_t k = 0; k < chosen; ++k) ++lengths_[rows.data[gains_[size_t(k)].second]];
    for (int64_t i = 0; i < n; ++i) {
      int32_t *own = drafts.writable_data() + i * drafts.width;
      std::fill(own + std::min<int64_t>(lengths_[rows.data[i]], drafts.width), own + drafts.width, -1);
    }
    return chosen > 0;
  }

  // Speculation._judge.
  Counts judge(nb::handle in_rows, nb::handle in_sampled, nb::handle in_drafts, nb::handle in_guess,
               nb::handle in_kind) {
    Ints rows;
    if (!rows.read(in_rows) || rows.ndim != 1) throw nb::type_error("expected int32 rows [n]");
    const Ints sampled = table(in_sampled, rows.size), guess = column(in_guess, num_rows_);
    if (!sampled.width) throw nb::type_error("expected int32 samples [n] or [n, width], width at least 1");
    const Ints kind = column(in_kind, num_rows_), drafts = in_drafts.is_none() ? Ints() : table(in_drafts, rows.size);
    new_.assign(size_t(2 * num_kinds_), 0.);
    int64_t num_verified = 0, num_drafted = 0, num_accepted = 0, num_judged = 0, num_right = 0;
    for (int64_t i = 0; i < rows.size; ++i) {
      const int32_t row = rows.data[i];
      if (row < 0 || row >= num_rows_) throw std::invalid_argument("rows: a row that there is not");
      const int64_t at = entry(row, kind.data[row]);
      const int32_t *tokens = sampled.data + i * sampled.width;
      int64_t judged = guess.data[row] >= 0, right = judged && guess.data[row] == tokens[0];
      if (drafts.data) {
        const int64_t drafted = count(drafts.data + i * drafts.width, drafts.width);
        const int64_t accepted = std::clamp<int64_t>(count(tokens, sampled.width) - 1, 0, drafted);
        judged = std::max(drafted, judged);
        if (drafted) right = accepted;
        num_verified += drafted > 0, num_drafted += drafted, num_accepted += accepted;
        for (int64_t k = 0; k < std::min(drafted, most_); ++k) ++drafted_at_[k], accepted_at_[k] += k < accepted;
      }
      num_judged += judged, num_right += right;
      if (!judged) continue;
      judged = std::min(right + 1, judged);  // the drafts after a wrong one are not judged
      accepted_[at] = forget_ * accepted_[at] + double(right);
      judged_[at] = forget_ * judged_[at] + double(judged);
      new_[size_t(kind.data[row])] += double(right);
      new_[size_t(num_kinds_ + kind.data[row])] += double(judged);
    }
    for (int64_t k = 0; k < num_kinds_; ++k) {
      const double accepted = new_[size_t(k)], judged = new_[size_t(num_kinds_ + k)];
      if (!(judged > 0.)) continue;
      all_[k] = forget_all_ * all_[k] + accepted;
      all_[num_kinds_ + k] = forget_all_ * all_[num_kinds_ + k] + judged;
    }
    return {num_verified, num_drafted, num_accepted, num_judged, num_right};
  }

 private:
  using Gain = std::pair<double, int64_t>;  // the gain of a draft of the row with this index

  static int64_t count(const int32_t *tokens, int64_t width) {
    return std::count_if(tokens, tokens + width, [](int32_t token) { return token >= 0; });
  }
  int64_t entry(int64_t row, int64_t kind) const {
    if (row < 0 || row >= num_rows_ || kind < 0 || kind >= num_kinds_)
      throw std::invalid_argument("a row or a kind that there is not");
    return row * num_kinds_ + kind;
  }

  int64_t num_rows_, num_kinds_, num_costs_, most_;
  double *accepted_, *judged_, *all_;
  int32_t *lengths_;
  const double *log_cost_;
  int64_t *drafted_at_, *accepted_at_;
  double worth_, relative_cost_, forget_, forget_all_;
  std::vector<Gain> gains_;
  std::vector<double> new_;
};

}  // namespace

void bind_drafts(nb::module_ &m) {
  using namespace nb::literals;
  nb::class_<DraftPolicy>(m, "DraftPolicy", "The numbers of drafts over the arrays of one DraftLengths.")
      .def(nb::init<Matrix<double>, Matrix<double>, Matrix<double>, Vector<int32_t>, Vector<const double>,
                    Vector<int64_t>, Vector<int64_t>, double, double, double, double>(),
           "accepted"_a.noconvert(), "judged"_a.noconvert(), "all"_a.noconvert(), "lengths"_a.noconvert(),
           "log_cost"_a.noconvert(), "drafted_at"_a.noconvert(), "accepted_at"_a.noconvert(), "worth"_a,
           "relative_cost"_a, "forget"_a, "forget_all"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(),
           nb::keep_alive<1, 8>(),
           nb::sig("def __init__(self, accepted: " PY_F64 ", judged: " PY_F64 ", all: " PY_F64 ", lengths: " PY_I32
                   ", log_cost: " PY_F64 ", drafted_at: " PY_I64 ", accepted_at: " PY_I64
                   ", worth: float, relative_cost: float, forget: float, forget_all: float) -> None"))
      .def("can_gain", &DraftPolicy::can_gain, "num_rows"_a,
           "Return whether drafts in a step of so many rows would be worth verifying if all of them were right.")
      .def("choose", &DraftPolicy::choose,
           nb::sig("def choose(self, rows: " PY_I32 ", drafts: " PY_I32 ", kinds: " PY_I32
                   ", credit: float, /) -> bool"),
           "Replace the drafts [n, width] of rows [n] that are not worth verifying, or that could cost more than the\n"
           "credit, by -1. Return whether any is left.")
      .def("judge", &DraftPolicy::judge, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
           nb::sig("def judge(self, rows: " PY_I32 ", sampled: " PY_I32 ", drafts: " PY_I32 " | None, guess: " PY_I32
                   ", kind: " PY_I32 ", /) -> tuple[int, int, int, int, int]"),
           "Update the rates of rows [n] after a step that sampled [n, width]. Return how many rows had drafts, how"
           " many\n"
           "drafts these were and how many were accepted, and how many drafts and guesses were judged and right.");
}

}  // namespace foreword
