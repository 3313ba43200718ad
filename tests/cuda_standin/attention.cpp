// The three kernels of attention that torch chooses from on a GPU, by products and a softmax in float.
//
// Their outputs are of the shapes and the order in memory of the GPU's kernels: the plan counts their bytes.
#include "arithmetic.h"

#include <array>
#include <cmath>

namespace arithmetic {
namespace {

using at::Tensor;
using std::optional;

// (batch, heads, tokens, width) in memory as batch, tokens, heads, width.
Tensor heads_inside(const Tensor& t, const Tensor& like) {
  auto ours = at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, like.options().device(at::kCPU));
  ours.transpose(1, 2).copy_(t);
  return on_device(ours, like.device()).transpose(1, 2);
}

// In the order of `like`, as cuDNN writes.
Tensor in_order_of(const Tensor& t, const Tensor& like) {
  if (like.sizes() != t.sizes()) return heads_inside(t, like);
  auto ours = at::empty_like(like, like.options().device(at::kCPU));
  return on_device(ours.copy_(t), like.device());
}

uint64_t value_of(const Tensor& t) {
  return t.defined() ? static_cast<uint64_t>((is_cuda(t) ? on_host(t) : t).item<int64_t>()) : 0;
}
Tensor number(uint64_t value) { return at::scalar_tensor(static_cast<int64_t>(value), at::kLong); }

struct Gradients {
  Tensor q, k, v, scores;
};

class Attention {
 public:
  Attention(const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& bias, double dropout, bool is_causal,
            optional<double> scale, RandomPlace place)
      : q_(on_host(q).to(at::kFloat)), num_shared_(q.size(1) / k.size(1)), k_(shared(k)), v_(shared(v)), dropout_(dropout),
        is_causal_(is_causal), scale_(scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))))) {
    if (bias && bias->defined()) bias_ = on_host(*bias).to(at::kFloat);
    if (dropout == 0) return;
    auto random = at::rand({q.size(0), q.size(1), q.size(2), k.size(2)}, place.generator(), at::TensorOptions().dtype(at::kFloat));
    kept_ = (random >= dropout).to(at::kFloat).div_(1 - dropout);
  }

  // The output, and the logarithm of each row's sum: (batch, heads, tokens).
  std::pair<Tensor, Tensor> forward() const {
    auto scores = this->scores();
    auto sums = at::logsumexp(scores, -1);
    return {at::matmul(dropped(at::exp(scores - sums.unsqueeze(-1))), v_), sums};
  }

  Gradients backward(const Tensor& grad, const Tensor& out, const Tensor& sums) const {
    auto g = on_host(grad).to(at::kFloat), o = on_host(out).to(at::kFloat);
    auto shares = at::exp(scores() - sums.narrow(2, 0, q_.size(2)).unsqueeze(-1));
    auto to_shares = dropped(at::matmul(g, v_.transpose(-1, -2)));
    auto to_scores = shares * (to_shares - (g * o).sum(-1, true));
    return {at::matmul(to_scores, k_) * scale_, summed(at::matmul(to_scores.transpose(-1, -2), q_) * scale_),
            summed(at::matmul(dropped(shares).transpose(-1, -2), g)), to_scores};
  }

 private:
  // Keys and values that several heads of queries share, once for each.
  Tensor shared(const Tensor& t) const { return on_host(t).to(at::kFloat).repeat_interleave(num_shared_, 1); }
  Tensor summed(const Tensor& grad) const {
    return grad.unflatten(1, {grad.size(1) / num_shared_, num_shared_}).sum(2);
  }
  Tensor dropped(const Tensor& t) const { return kept_.defined() ? t * kept_ : t; }
  Tensor scores() const {
    auto found = at::matmul(q_ * scale_, k_.transpose(-1, -2));
    if (bias_.defined()) found = found + bias_;
    if (is_causal_) found.masked_fill_(at::ones({q_.size(2), k_.size(2)}, at::kBool).triu(1), -INFINITY);
    return found;
  }

  Tensor q_;
  int64_t num_shared_;
  Tensor k_, v_, bias_, kept_;
  double dropout_;
  bool is_causal_;
  double scale_;
};

RandomPlace place_for(double dropout, const Tensor& q) {
  return dropout > 0 ? next_place(std::nullopt, q.device()) : RandomPlace{};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& bias, bool wants_sums, double dropout, bool is_causal,
    optional<double> scale) {
  Work work(q.device(), "aten::_scaled_dot_product_efficient_attention");
  auto place = place_for(dropout, q);
  auto [out, sums] = Attention(q, k, v, bias, dropout, is_causal, scale, place).forward();
  constexpr int64_t kRows = 32;
  auto padded = at::full({q.size(0), q.size(1), wants_sums ? (q.size(2) + kRows - 1) / kRows * kRows : 0}, INFINITY, at::kFloat);
  if (wants_sums) padded.narrow(-1, 0, q.size(2)).copy_(sums);
  auto unused = [&] { return at::empty({}, q.options().dtype(at::kLong)); };
  // Seed and offset are on the host if there is dropout: outside of a graph of CUDA nothing needs them on the device.
  return {heads_inside(out, q), on_device(padded, q.device()), dropout > 0 ? number(place.seed) : unused(), dropout > 0 ? number(place.offset) : unused()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias, const Tensor& out, const Tensor& sums,
    const Tensor& seed, const Tensor& offset, double dropout, std::array<bool, 4> wanted, bool is_causal, optional<double> scale) {
  if (!grad.defined()) return {};
  Work work(grad.device(), "aten::_scaled_dot_product_efficient_attention_backward");
  auto place = dropout > 0 ? RandomPlace{value_of(seed), value_of(offset)} : RandomPlace{};
  auto found = Attention(q, k, v, bias, dropout, is_causal, scale, place).backward(grad, out, on_host(sums));
  Tensor to_bias;
  if (wanted[3] && bias.defined()) to_bias = on_device(at::sum_to(found.scores, bias.sizes()).to(bias.scalar_type()), q.device());
  return {heads_inside(found.q, q), heads_inside(found.k, k), heads_inside(found.v, v), to_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool is_causal, bool, optional<double> scale) {
  Work work(q.device(), "aten::_scaled_dot_product_flash_attention");
  auto place = place_for(dropout, q);
  auto [out, sums] = Attention(q, k, v, std::nullopt, dropout, is_causal, scale, place).forward();
  auto state = at::stack({number(place.seed), number(place.offset)}).view(at::kUInt64);
  auto unused = at::zeros({}, at::kLong).view(at::kUInt64);
  return {heads_inside(out, q), on_device(sums.contiguous(), q.device()), Tensor(), Tensor(), q.size(2), k.size(2),
          on_device(state, q.device()), on_device(unused, q.device()), at::empty({0}, q.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& sums, const Tensor&,
    const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal, const Tensor& state, const Tensor&, optional<double> scale) {
  Work work(grad.device(), "aten::_scaled_dot_product_flash_attention_backward");
  auto numbers = on_host(state).view(at::kLong);
  auto place = dropout > 0 ? RandomPlace{value_of(numbers[0]), value_of(numbers[1])} : RandomPlace{};
  auto found = Attention(q, k, v, std::nullopt, dropout, is_causal, scale, place).backward(grad, out, on_host(sums));
  return {heads_inside(found.q, q), heads_inside(found.k, k), heads_inside(found.v, v)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> cudnn(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>& bias, bool, double dropout, bool is_causal, bool,
    optional<double> scale) {
  Work work(q.device(), "aten::_scaled_dot_product_cudnn_attention");
  auto place = place_for(dropout, q);
  auto [out, sums] = Attention(q, k, v, bias, dropout, is_causal, scale, place).forward();
  return {in_order_of(out, q), on_device(sums.unsqueeze(-1).contiguous(), q.device()), Tensor(), Tensor(), q.size(2), k.size(2),
          on_device(number(place.seed), q.device()), on_device(number(place.offset), q.device()), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& sums, const Tensor& seed,
    const Tensor& offset, const Tensor& bias, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool is_causal,
    optional<double> scale) {
  Work work(grad.device(), "aten::_scaled_dot_product_cudnn_attention_backward");
  auto place = dropout > 0 ? RandomPlace{value_of(seed), value_of(offset)} : RandomPlace{};
  auto found = Attention(q, k, v, bias, dropout, is_causal, scale, place).backward(grad, out, on_host(sums).squeeze(-1));
  return {in_order_of(found.q, q), in_order_of(found.k, k), in_order_of(found.v, v)};
}

}  // namespace

void register_attention(torch::Library& library) {
  library.impl("_scaled_dot_product_efficient_attention", &efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward);
  library.impl("_scaled_dot_product_flash_attention", &flash);
  library.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  library.impl("_scaled_dot_product_cudnn_attention", &cudnn);
  library.impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_backward);
}

}  // namespace arithmetic
