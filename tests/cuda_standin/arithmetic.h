// What the ops of the stand-in share: a tensor of a device seen from the CPU, and back.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

namespace arithmetic {

// An op of the stand-in begins: run what the current stream of `device` was given before. Ops inside run on the CPU's
// kernels, below autograd and outside of any Python mode of the calling thread.
class Work {
 public:
  Work(c10::Device device, const char* name);

 private:
  c10::DeviceGuard guard_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_modes_;
};

inline bool is_cuda(const at::Tensor& t) { return t.defined() && t.device().is_cuda(); }

// A tensor of the CPU over the same memory; the access is checked and remembered.
at::Tensor on_host(const at::Tensor& t, bool is_write = false);

// A tensor of `device` with the values and strides of `t`, which is on the CPU.
at::Tensor on_device(const at::Tensor& t, c10::Device device);

// Where a generator of CUDA is; the numbers that follow are those of a generator of the CPU, not CUDA's.
struct RandomPlace {
  uint64_t seed = 0;
  uint64_t offset = 0;
  at::Generator generator() const;
};

// The place of `given`, else of the default generator of `device`, which moves on.
RandomPlace next_place(const std::optional<at::Generator>& given, c10::Device device);

void register_attention(torch::Library& library);

}  // namespace arithmetic
