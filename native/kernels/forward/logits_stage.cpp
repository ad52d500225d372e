#include "kernels/forward/logits_stage.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>

namespace foreword::kernels {
namespace {

// A thread reads its logits again while they are in its cache: of more than so many, sampling reads them as fast.
constexpr int64_t kMostCachedLogits = int64_t{1} << 18;
// Hits that a thread has room for; a row that has more gets all its logits. As a rule a row has 20 to 100.
constexpr size_t room_for_hits(int rows) { return std::min(size_t(rows) * 1024, size_t{1} << 20); }
constexpr float kMostLogit = 1e30f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A softcap rounds to less than 1e-5 of the cap and has a slope of at least 0.0098 between -3 and 3 times the cap: two
// logits there that differ by this slack before it differ after it.
constexpr float kMostOfCap = 3.f;
constexpr float slack_of(float cap) { return 1.1e-3f * cap; }

}  // namespace

LogitsStage::LogitsStage(PassContext &context)
    : ctx_(context),
      inner_(context.model.config.hidden_size),
      logits_(context.model.config.vocab_size),
      found_(size_t(context.pool.size())) {
  context.model.head.add_kinds(head_kinds_);
  const Linear &head = context.model.lm_head;
  head.add_kinds(kinds_);
  const bool is_float = !head.parts.empty() && head.parts[0].matrix->format <= Format::bf16;
  if (is_float || context.model.has_screen()) make_screen();
  for (Found &found : found_) {
    found.logits.reserve(size_t(context.isa.panel_width));
    found.rotated.reserve(size_t(context.model.widest_input()));
  }
}

const Linear &LogitsStage::first_product() const {
  if (!ctx_.model.head.parts.empty()) return ctx_.model.head;
  return is_screened_ ? ctx_.model.screen.linear : ctx_.model.lm_head;
}

// In a smaller format than that of the projection, it is made at the start: it saves reads in steps of one row too.
// Otherwise by the first step that it makes faster, unless the model has it. Without the memory for it, logits are
// computed.
void LogitsStage::make_screen() {
  has_tried_screen_ = true;
  try {
    if (!ctx_.model.has_screen()) ctx_.model.make_screen();
  } catch (const std::bad_alloc &) {
    return;
  }
  screen_kinds_ = kinds_;
  ctx_.model.screen.linear.add_kinds(screen_kinds_);
}

void LogitsStage::reserve() {
  const Screen &screen = ctx_.model.screen;
  const int rows = ctx_.input.num_logits, vocab_size = ctx_.model.config.vocab_size;
  const bool is_batch = rows > ProductInput::kFewRows;
  if (ctx_.input.greedy && is_batch && !has_tried_screen_) make_screen();
  is_screened_ = ctx_.input.greedy && rows > 0 && !screen.linear.parts.empty() && (is_batch || screen.saves_reads);
  input_.reserve(rows, ctx_.model.config.hidden_size, is_screened_ ? screen_kinds_ : kinds_, ctx_.pool.size());
  logits_.reserve(rows);
  if (!ctx_.model.head.parts.empty()) {
    head_input_.reserve(num_inner(), ctx_.model.config.hidden_size, ctx_.with_loras(head_kinds_), ctx_.pool.size());
    inner_.reserve(num_inner());
  }
  has_maxima_ = !is_screened_ && int64_t{rows} * logits_.stride() <= kMostCachedLogits * ctx_.pool.size();
  if (has_maxima_) maxima_.reserve(size_t(rows) * size_t(num_logit_blocks(vocab_size)));
  if (!is_screened_) return;
  reach_.reserve(size_t(rows));
  std::fill_n(bounds_.reserve(size_t(rows)), rows, -kInfinity);
  tokens_.reserve(size_t(rows));
  for (Found &found : found_) {
    found.rows.reserve(size_t(rows));
    found.least.reserve(size_t(rows));
    found.best.reserve(size_t(rows));
    found.hits.reserve(room_for_hits(rows));
  }
}

void LogitsStage::run(int thread) {
  const Model &model = ctx_.model;
  const int rows = ctx_.input.num_logits;
  const bool has_head = !model.head.parts.empty();
  if (has_head && rows > 0) run_head(thread);
  const auto normed = [&](int r) {
    const int64_t token = ctx_.input.logits_indices[r];
    const float *row = !has_head ? ctx_.x.row(token) : inner_.row(ctx_.has_loras() ? token : r);
    return ctx_.norm_row(thread, row, model.logits_norm);
  };
  if (is_screened_) {
    const PackedMatrix &head = *model.lm_head.parts[0].matrix, &screened = *model.screen.linear.parts[0].matrix;
    float *scratch = found_[size_t(thread)].rotated.data();
    const auto find_reach = [&](const ActivationSet &in, int r, const float *x) {
      reach_.data()[r] = ctx_.isa.screen_reach(in.of(head), in.of(screened), r, x, scratch);
    };
    screen(thread, ctx_.products.prepare_shared(thread, input_.shared, head.cols, rows, normed, find_reach));
  } else {
    compute(thread, ctx_.products.prepare(thread, input_, model.lm_head.cols, rows, normed), {0, rows});
  }
  ctx_.clock.finish(thread, Stage::logits);
}

// The rows of `inner_`: adapters are shrunk for all tokens at once.
int LogitsStage::num_inner() const { return ctx_.has_loras() ? ctx_.input.num_tokens : ctx_.input.num_logits; }

// The rows of logits through the head, before its norm.
void LogitsStage::run_head(int thread) {
  const Model &model = ctx_.model;
  const int rows = num_inner();
  const auto normed = [&](int r) {
    const int64_t token = ctx_.has_loras() ? r : ctx_.input.logits_indices[r];
    return ctx_.norm_row(thread, ctx_.x.row(token), model.final_norm);
  };
  const ActivationSet in = ctx_.products.prepare(thread, head_input_, model.head.cols, rows, normed);
  ctx_.products.linear(thread, model.head, in, {0, rows}, inner_.data(), Store::assign, nullptr,
                       ctx_.shrink(thread, {&model.head}, in));
  ctx_.pool.barrier();
  const Share share = share_of(rows, thread, ctx_.pool.size());
  for (int r = share.begin; r < share.end; ++r) {
    ctx_.isa.activate(model.config.activation, size_t(model.config.hidden_size), inner_.row(r));
  }
  ctx_.pool.barrier();
}

void LogitsStage::compute(int thread, const ActivationSet &in, Share rows) {
  const Model &model = ctx_.model;
  ctx_.products.linear(thread, model.lm_head, in, rows, logits_.data(), Store::assign);
  const float cap = model.config.final_softcap;
  if (!(cap > 0.f) && !has_maxima_ && !model.logits_bias) return;
  ctx_.pool.barrier();
  const int blocks = num_logit_blocks(model.config.vocab_size);
  const Share share = share_of(blocks, thread, ctx_.pool.size());
  const int begin = share.begin * kLogitBlock, end = std::min(share.end * kLogitBlock, logits_.stride());
  for (int r = rows.begin; r < rows.end; ++r) {
    float *row = logits_.row(r);
    if (model.logits_bias) ctx_.isa.add_row(model.logits_bias + begin, size_t(end - begin), row + begin);
    if (cap > 0.f) ctx_.isa.softcap(cap, size_t(end - begin), row + begin);
    if (has_maxima_) {
      ctx_.isa.logit_maxima(row, model.config.vocab_size, share.begin, share.end, maxima_.data() + r * blocks);
    }
  }
}

void LogitsStage::screen(int thread, const ActivationSet &in) {
  const Model &model = ctx_.model;
  const int num_rows = ctx_.input.num_logits;
  const float slack = slack_of(model.config.final_softcap);
  Found &own = found_[size_t(thread)];
  for (int r = 0; r < num_rows; ++r) {
    own.rows.data()[r] = {reach_.data()[r], slack, -kInfinity, -1};
    own.least.data()[r] = -kInfinity;
    own.best.data()[r] = {-kInfinity, -1};
  }
  ScreenHits hits{own.hits.data(), 0, int(room_for_hits(num_rows))};
  ctx_.products.in_parts(thread, model.screen.linear, in, {0, num_rows},
                         [&](const float *out, size_t stride, Share rows, Share panels) {
                           share_bounds(own, rows);
                           ctx_.isa.screen_rows(out, stride, rows.begin, rows.end, panels.begin, panels.end,
                                                model.screen.errors, own.rows.data(), hits);
                         });
  ctx_.pool.barrier();

  // The panel with the largest lower bound first: its logits exclude most of the others.
  for (int r = 0; r < num_rows; ++r) {
    const ScreenedRow &row = own.rows.data()[r];
    float least = -kInfinity;
    for (const Found &found : found_) least = std::max(least, found.rows.data()[r].least);
    if (row.panel >= 0 && row.least == least) least = std::max(least, offer(thread, in, r, row.panel) - slack);
    own.least.data()[r] = least;
  }
  ctx_.pool.barrier();
  for (int i = 0; i < hits.count; ++i) {
    const ScreenHit &hit = own.hits.data()[i];
    if (hit.upper >= least(hit.row) && !has_logits(hit.row)) offer(thread, in, hit.row, hit.panel);
  }
  for (int r = 0; r < num_rows; ++r) {
    const int begin = r;
    while (r < num_rows && has_logits(r)) ++r;
    if (begin < r) compute(thread, in, {begin, r});
  }
}

// Takes over larger bounds that other threads have found, and leaves its own to them: with the largest one, panels of
// rare tokens have few hits.
void LogitsStage::share_bounds(Found &own, Share rows) {
  for (int r = rows.begin; r < rows.end; ++r) {
    ScreenedRow &row = own.rows.data()[r];
    const std::atomic_ref<float> shared(bounds_.data()[r]);
    const float bound = shared.load(std::memory_order_relaxed);
    if (bound > row.least) {
      row.least = bound;
      if (row.panel != kScreenFull) row.panel = -1;
    } else if (bound < row.least) {
      shared.store(row.least, std::memory_order_relaxed);
    }
  }
}

// Computes the logits of a panel; returns the largest one, before the softcap.
float LogitsStage::offer(int thread, const ActivationSet &in, int row, int panel) {
  Found &own = found_[size_t(thread)];
  float *logits = own.logits.data();
  ctx_.products.panel(thread, ctx_.model.lm_head, in, row, panel, logits);
  const int width = ctx_.isa.panel_width, first = panel * width;
  const int count = std::min(width, ctx_.model.config.vocab_size - first);
  const float largest = *std::max_element(logits, logits + count);
  const float cap = ctx_.model.config.final_softcap;
  if (cap > 0.f) ctx_.isa.softcap(cap, size_t(width), logits);
  const float *at = std::max_element(logits, logits + count);
  own.best.data()[row].take({*at, first + int32_t(at - logits)});
  return largest;
}

// A lower bound of what can be the row's largest logit.
float LogitsStage::least(int row) const {
  float least = -kInfinity;
  for (const Found &found : found_) least = std::max(least, found.least.data()[row]);
  return least;
}

// A row with too many hits, with numbers so large that no bound is known, or where a softcap makes many logits equal.
bool LogitsStage::has_logits(int row) const {
  if (!(reach_.data()[row] * ctx_.model.screen.most < kMostLogit)) return true;
  const float cap = ctx_.model.config.final_softcap;
  if (cap > 0.f && std::fabs(least(row)) > kMostOfCap * cap) return true;
  for (const Found &found : found_) {
    if (found.rows.data()[row].panel == kScreenFull) return true;
  }
  return false;
}

void LogitsStage::finish() {
  if (!is_screened_) return;
  for (int r = 0; r < ctx_.input.num_logits; ++r) {
    Best best{-kInfinity, -1};
    for (const Found &found : found_) best.take(found.best.data()[r]);
    tokens_.data()[r] = has_logits(r) ? -1 : best.token;
  }
}

}  // namespace foreword::kernels
