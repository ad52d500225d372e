#include "kernels/forward/context.h"

#include <algorithm>
#include <cmath>

namespace foreword::kernels {
namespace {

void add_inputs(const Mlp &mlp, KindSet &kinds) {
  mlp.gate.add_kinds(kinds);
  mlp.up.add_kinds(kinds);
  mlp.added.low.add_kinds(kinds);
}

}  // namespace

PassContext::PassContext(Model &m)
    : model(m),
      isa(m.isa),
      pool(m.pool),
      x(m.config.hidden_size),
      branch(m.config.hidden_size),
      first(m.qkv_stride(false)),
      first_input(m.config.hidden_size),
      aside(m.config.hidden_size),
      products(m),
      lora_(m),
      gates_(m.config.hidden_size),
      norm_out_(size_t(m.pool.size())),
      inner_out_(norm_out_.size()),
      wide_out_(norm_out_.size()) {
  for (Buffer<float> &out : norm_out_) out.reserve(size_t(x.stride()));
  for (Buffer<float> &out : inner_out_) out.reserve(size_t(padded_row(m.widest_input())));
  model.per_layer.in.add_kinds(kinds_);
  model.streams.into.add_kinds(kinds_);
  for (const Linear &out : model.streams.out) out.add_kinds(kinds_);
  for (const Layer &layer : model.layers) {
    has_branch_ = has_branch_ || has_branch(layer.post_attn_norm) || has_branch(layer.post_mlp_norm) || layer.moe ||
                  layer.per_layer.norm;
    layer.per_layer.gate.add_kinds(kinds_);
    if (layer.streams) {
      layer.streams->laurel_left.add_kinds(kinds_);
      has_branch_ = true;
    }
    for (const LowRank *gate : {layer.attn_norm_gate.get(), layer.mlp_norm_gate.get()}) {
      if (!gate) continue;
      gate->low.add_kinds(kinds_);
      gate->high[0].add_kinds(gate_kinds_);
      most_low_ = std::max(most_low_, gate->low.stride);
      most_rank_ = std::max(most_rank_, gate->high[0].cols);
    }
    layer.qkv.add_kinds(layer.is_aside() ? wide_kinds_ : kinds_);
    layer.added.low.add_kinds(wide_kinds_);
    layer.aside.add_kinds(kinds_);
    has_aside_ = has_aside_ || layer.is_aside();
    if (layer.mlp) add_inputs(*layer.mlp, kinds_);
    for (const Moe *moe : {layer.moe.get(), layer.late_moe.get()}) {
      if (!moe) continue;
      moe->first_router().add_kinds(kinds_);
      if (!moe->has_own_inputs()) {
        for (const Mlp &expert : moe->experts) add_inputs(expert, kinds_);
      }
      moe->latent_in.add_kinds(kinds_);
      moe->shared_gate.add_kinds(kinds_);
      if (moe->shared) add_inputs(*moe->shared, kinds_);
    }
  }
}

void PassContext::reserve() {
  lora_.plan(input.num_tokens, input.num_reqs, input.query_start_loc, input.lora_ids);
  if (has_aside_) {
    for (FloatRows *rows : {&first_input, &aside}) rows->reserve(input.num_tokens);
    for (Buffer<float> &out : wide_out_) out.reserve(2 * size_t(padded_row(2 * model.config.hidden_size)));
    wide_.reserve(input.num_tokens, 2 * model.config.hidden_size, with_loras(wide_kinds_), pool.size());
  }
  if (most_rank_) {
    low_.reserve(size_t(input.num_tokens) * size_t(most_low_));
    low_input_.reserve(input.num_tokens, most_rank_, with_loras(gate_kinds_), pool.size());
    gates_.reserve(input.num_tokens);
  }
  x.reserve(input.num_tokens);
  if (has_branch_) branch.reserve(input.num_tokens);
  normed.reserve(input.num_tokens, model.config.hidden_size, with_loras(kinds_), pool.size());
}

ActivationSet PassContext::norm_rows(int thread, const Norm &norm, Share tokens) {
  if (norm.gate) make_gates(thread, norm, tokens);
  float *out = norm_out_[size_t(thread)].data();
  return products.prepare(thread, normed, model.config.hidden_size, tokens.end - tokens.begin, [&](int r) {
    const float *row = norm_row(thread, x.row(tokens.begin + r), norm);
    if (model.config.rounds_inputs && norm) round_row(out, model.config.hidden_size);
    if (norm.gate) isa.gate_mul(Gate::sigmoid, gates_.row(r), out, size_t(gates_.stride()), out);
    return row;
  });
}

void PassContext::make_gates(int thread, const Norm &norm, Share tokens) {
  const Linear &low = norm.gate->low, &high = norm.gate->high[0];
  const Share rows{0, tokens.end - tokens.begin};
  Norm plain = norm;
  plain.gate = nullptr;
  const ActivationSet in = norm_rows(thread, plain, tokens);
  products.linear(thread, low, in, rows, low_.data(), Store::assign, &high, shrink(thread, {&low}, in));
  pool.barrier();
  float *out = inner_out_[size_t(thread)].data();
  const ActivationSet set = products.prepare(thread, low_input_, high.cols, rows.end, [&](int r) {
    std::copy_n(low_.data() + size_t(r) * size_t(low.stride), low.stride, out);
    isa.activate(Gate::silu, size_t(low.stride), out);
    return out;
  });
  products.linear(thread, high, set, rows, gates_.data(), Store::assign, nullptr, shrink(thread, {&high}, set));
  pool.barrier();
}

ActivationSet PassContext::input_rows(int thread, const Layer &layer, Share tokens) {
  const int hidden = model.config.hidden_size;
  if (layer.beside) return normed_rows(thread);
  if (layer.follows_aside) {
    float *sum = wide_out_[size_t(thread)].data();
    return norm_rows_of(thread, layer.attn_norm, tokens, [&](int t) {
      std::copy_n(x.row(t), x.stride(), sum);
      isa.add_row(aside.row(t), size_t(x.stride()), sum);
      return sum;
    });
  }
  if (!layer.is_aside()) return norm_rows(thread, layer.attn_norm, tokens);
  float *both = wide_out_[size_t(thread)].data(), *out = both + padded_row(2 * hidden);
  return products.prepare(thread, wide_, 2 * hidden, tokens.end - tokens.begin, [&](int r) {
    std::copy_n(first_input.row(tokens.begin + r), hidden, std::copy_n(x.row(tokens.begin + r), hidden, both));
    isa.rms_norm(both, layer.attn_norm.weight, 2 * hidden, model.config.norm_eps, out);
    return out;
  });
}

void PassContext::keep_first_input(int thread) {
  if (!has_aside_) return;
  const Share share = token_share(thread);
  for (int t = share.begin; t < share.end; ++t) std::copy_n(x.row(t), x.stride(), first_input.row(t));
  pool.barrier();
}

void PassContext::finish_aside(int thread, const Layer &layer, const Linear &next) {
  const Share rows{0, input.num_tokens};
  const ActivationSet in = norm_rows_of(thread, {}, rows, [&](int t) { return branch.row(t); });
  products.linear(thread, layer.aside, in, rows, aside.data(), Store::assign, &next,
                  shrink(thread, {&layer.aside}, in));
  pool.barrier();
}

const float *PassContext::inner_row(int thread, const float *row, Vector norm, int size) const {
  if (!norm && !model.config.rounds_inputs) return row;
  float *out = inner_out_[size_t(thread)].data();
  if (norm) {
    isa.rms_norm(row, norm, size, model.config.norm_eps, out);
  } else {
    std::copy_n(row, size, out);
  }
  std::fill(out + size, out + padded_row(size), 0.f);  // inputs of a product are prepared in whole blocks
  if (model.config.rounds_inputs) round_row(out, size);
  return out;
}

void PassContext::round_row(float *x, int size) {
  constexpr float kWhole = 12582912.f;  // the floats from here on are the integers
  float top = 1e-5f;
  for (int i = 0; i < size; ++i) top = std::max(top, std::abs(x[i]));
  const float scale = 127.f / top;
  for (int i = 0; i < size; ++i) x[i] = (x[i] * scale + kWhole - kWhole) / scale;
}

void PassContext::add_product(int thread, const Linear &l, const ProductInput &input, const FloatRows &a, Vector bias,
                              const Norm &norm, const Linear *next, Vector inner_norm) {
  for (int i = 0, parts = num_parts(); i < parts; ++i) {
    const Share tokens = part(i, parts);
    if (i > 0) pool.barrier();  // the part before was multiplied
    const ActivationSet set = products.prepare(thread, input, l.cols, tokens.end - tokens.begin, [&](int r) {
      return inner_row(thread, a.row(tokens.begin + r), inner_norm, l.cols);
    });
    multiply(thread, l, set, tokens, norm, i + 1 < parts ? &l : next);
  }
  finish_product(thread, bias, norm);
}

void PassContext::multiply(int thread, const Linear &l, const ActivationSet &a, Share rows, const Norm &norm,
                           const Linear *next) {
  const bool branches = has_branch(norm);
  FloatRows &out = branches ? branch : x;
  products.linear(thread, l, a, {0, rows.end - rows.begin}, out.row(rows.begin), branches ? Store::assign : Store::add,
                  next, shrink(thread, {&l}, a));
}

void PassContext::finish_product(int thread, Vector bias, const Norm &norm) {
  pool.barrier();
  const bool branches = has_branch(norm);
  if (bias) add_bias(thread, bias, branches ? branch : x);
  if (branches) {
    add_branch(thread, norm);
  } else if (bias) {
    pool.barrier();
  }
}

void PassContext::add_bias(int thread, Vector bias, FloatRows &rows) const {
  const Share share = token_share(thread);
  for (int t = share.begin; t < share.end; ++t) isa.add_row(bias, size_t(rows.stride()), rows.row(t));
}

void PassContext::add_input_bias(int thread, const Layer &layer, float *rows) const {
  if (!layer.input_bias) return;
  const Share share = token_share(thread);
  const size_t stride = size_t(layer.qkv.stride);
  for (int t = share.begin; t < share.end; ++t) isa.add_row(layer.input_bias, stride, rows + size_t(t) * stride);
  pool.barrier();
}

void PassContext::add_branch(int thread, const Norm &norm) {
  if (norm.is_aside) return;
  const Share share = token_share(thread);
  const float scale = norm.scale;
  for (int t = share.begin; t < share.end; ++t) {
    if (norm.scales) {
      float *row = x.row(t);
      const float *own = branch.row(t);
      for (int i = 0; i < model.config.hidden_size; ++i) {
        row[i] = norm.kept_scales[i] * row[i] + norm.scales[i] * own[i] + norm.offsets[i];
      }
      continue;
    }
    if (norm.kept) {
      const float *kept = norm_row(thread, x.row(t), {.weight = norm.kept, .bias = norm.kept_bias});
      for (int i = 0; i < model.config.hidden_size; ++i) x.row(t)[i] = norm.keep * kept[i];
    }
    const float *row = norm_row(thread, branch.row(t), norm);
    if (scale == 1.f) {
      isa.add_row(row, size_t(x.stride()), x.row(t));
    } else {
      isa.add_scaled(scale, row, size_t(x.stride()), x.row(t));
    }
  }
  pool.barrier();
}

}  // namespace foreword::kernels
