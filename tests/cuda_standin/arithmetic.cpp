// The arithmetic of the stand-in: every ATen op that has a CUDA kernel runs on the CPU's kernel, over the same memory.
//
// Memory, copies between devices, views, streams and events stay torch's own. An op that only CUDA has raises an error
// with its name, unless it is replaced here or in attention.cpp. torch loads this library at the end of its import.
#include "arithmetic.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <vector>

// machine.cpp and memory.cpp
extern "C" {
int64_t standin_begin(cudaStream_t stream);
void standin_access(cudaStream_t stream, int64_t work, const void* address, size_t bytes, bool is_write, const char* what);
void standin_host_access(const void* address, size_t bytes, bool is_write, const char* what);
void standin_poison(cudaStream_t stream, void* address, size_t bytes, const char* what);
}

// ATen/cuda/CUDAContextLight.h, which needs headers that NVIDIA's packages for running programs lack. They return pointers.
namespace at::cuda {
void* getCurrentCUDABlasHandle();
void* getCUDABlasLtWorkspace();
}  // namespace at::cuda

namespace arithmetic {

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::IValue;
using std::optional;

namespace {

const c10::impl::VirtualGuardImpl& cuda() {
  static const c10::impl::VirtualGuardImpl it(c10::kCUDA);
  return it;
}

cudaStream_t stream_of(Device device) { return static_cast<cudaStream_t>(cuda().getStream(device).native_handle()); }

// The op that the calling thread runs.
struct Running {
  int64_t work = 0;
  const char* name = "an op";
};
thread_local Running running;

// From the first to the last byte that the elements of a tensor use.
size_t spanned_bytes(const Tensor& t) {
  if (!t.numel()) return 0;
  int64_t last = 1;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return last * t.dtype().itemsize();
}

void touch(const Tensor& t, bool is_write) {
  if (t.numel())
    standin_access(stream_of(t.device()), running.work, t.const_data_ptr(), spanned_bytes(t), is_write, running.name);
}

void poison_freed(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  if (entry.action_ != c10::CachingDeviceAllocator::TraceEntry::FREE_COMPLETED) return;
  c10::DeviceGuard guard(Device(c10::kCUDA, entry.device_));
  standin_poison(static_cast<cudaStream_t>(entry.stream_), reinterpret_cast<void*>(entry.addr_), entry.size_, "the end of a tensor");
}

// torch has no allocator to attach to before the first tensor on a device.
void poison_from_now_on() {
  static std::once_flag once;
  std::call_once(once, [] { c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&poison_freed); });
}

}  // namespace

Work::Work(Device device, const char* name)
    : guard_(device),
      no_modes_(c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Functionalize})) {
  poison_from_now_on();
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // as after each launch of a kernel: an error that a call before has left is raised
  running = {standin_begin(stream_of(device)), name};
}

Tensor on_host(const Tensor& t, bool is_write) {
  touch(t, is_write);
  auto options = at::TensorOptions().dtype(t.scalar_type()).device(c10::kCPU);
  auto view = at::from_blob(t.numel() ? t.mutable_data_ptr() : nullptr, t.sizes(), t.strides(), options);
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  return view;
}

Tensor on_device(const Tensor& t, Device device) {
  if (!t.defined() || !t.device().is_cpu()) return t;
  auto whole = t.is_non_overlapping_and_dense() ? t.resolve_conj().resolve_neg() : t.contiguous();
  auto ours = at::empty_strided(whole.sizes(), whole.strides(), whole.options().device(device));
  if (!whole.numel()) return ours;
  running.work = standin_begin(stream_of(device));  // the memory may have been freed just now: its poison comes first
  touch(ours, true);
  std::memcpy(ours.mutable_data_ptr(), whole.const_data_ptr(), whole.numel() * whole.dtype().itemsize());
  return ours;
}

at::Generator RandomPlace::generator() const {
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ull + offset);
}

RandomPlace next_place(const optional<at::Generator>& given, Device device) {
  auto generator = given && given->defined() ? *given : at::globalContext().defaultGenerator(device);
  std::lock_guard lock(generator.mutex());
  RandomPlace found{generator.current_seed(), generator.get_offset()};
  generator.set_offset(found.offset + 4);  // CUDA's offsets are multiples of 4
  return found;
}

namespace {

// Ops for which torch takes a workspace of cuBLAS.
const std::set<std::string> kProducts{
    "mm", "addmm", "bmm", "baddbmm", "addmv", "addmv_", "dot", "vdot", "addbmm", "_addmm_activation", "_scaled_mm"};
// Ops whose tensors may be on different devices.
const std::set<std::string> kMixed{
    "index", "index_put_", "_index_put_impl_", "_unsafe_index", "_ctc_loss", "_ctc_loss_backward", "_assert_async"};

// The arguments and results of one op, and what stands for them on the CPU.
class Call {
 public:
  Call(const c10::FunctionSchema& schema, torch::jit::Stack* stack)
      : schema_(schema), stack_(stack), start_(stack->size() - schema.arguments().size()), device_(find_device()) {}

  Device device() const { return device_; }

  void to_host() {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      auto& value = (*stack_)[start_ + i];
      const auto& argument = schema_.arguments()[i];
      const bool is_write = argument.alias_info() && argument.alias_info()->isWrite();
      if (value.isTensor()) {
        value = host(value.toTensor(), argument.is_out(), is_write);
      } else if (value.isTensorList()) {
        c10::List<Tensor> there;
        for (const Tensor& each : value.toTensorVector()) there.push_back(host(each, argument.is_out(), is_write));
        value = there;
      } else if (value.isOptionalTensorList()) {
        c10::List<optional<Tensor>> there;
        for (const optional<Tensor>& each : value.toOptionalTensorVector())
          there.push_back(each ? optional(host(*each, false, is_write)) : std::nullopt);
        value = there;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        value = Device(c10::kCPU);
      } else if (argument.type()->str().find("Generator") != std::string::npos) {
        auto given = value.isNone() ? std::nullopt : optional<at::Generator>(value.toGenerator());
        if (!given || given->device().is_cuda()) value = IValue(next_place(given, device_).generator());
      }
    }
  }

  void to_device() {
    for (auto& [ours, there] : resized_) {
      if (ours.sizes() != there.sizes()) ours.resize_(there.sizes());
      if (ours.strides() != there.strides()) ours.as_strided_(there.sizes(), there.strides());
      running.work = standin_begin(stream_of(device_));
      if (there.numel()) on_host(ours, true).copy_(there);
    }
    for (size_t i = stack_->size() - schema_.returns().size(); i < stack_->size(); ++i) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = back(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> ours;
        for (const Tensor& each : value.toTensorVector()) ours.push_back(back(each));
        value = ours;
      }
    }
  }

 private:
  // The device of the first tensor that is on one, else of the argument that names one, else the current one.
  Device find_device() const {
    optional<Device> named;
    for (size_t i = start_; i < stack_->size(); ++i) {
      const auto& value = (*stack_)[i];
      if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) named = value.toDevice();
      if (value.isTensor() && is_cuda(value.toTensor())) return value.toTensor().device();
      if (value.isTensorList())
        for (const Tensor& each : value.toTensorVector())
          if (is_cuda(each)) return each.device();
    }
    return named.value_or(cuda().getDevice());
  }

  Tensor host(const Tensor& t, bool may_resize, bool is_write) {
    if (!t.defined()) return t;
    if (t.device() != device_) {
      const bool is_number = t.device().is_cpu() && t.dim() == 0;
      const bool is_mixed = kMixed.count(schema_.name().substr(schema_.name().find("::") + 2)) > 0;
      TORCH_CHECK(is_number || is_mixed, "Expected all tensors to be on the same device, but ", schema_.name(), " got ", device_, " and ", t.device());
      return is_cuda(t) ? on_host(t, is_write) : t;
    }
    if (may_resize && t.numel() == 0) {
      resized_.emplace_back(t, at::empty({0}, t.options().device(c10::kCPU)));
      return resized_.back().second;
    }
    inputs_.emplace_back(t, on_host(t, is_write));
    return inputs_.back().second;
  }

  Tensor back(const Tensor& result) const {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (auto* pairs : {&inputs_, &resized_})
      for (auto& [ours, there] : *pairs)
        if (there.is_same(result)) return ours;
    return on_device(result, device_);
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  size_t start_;
  Device device_;
  std::vector<std::pair<Tensor, Tensor>> inputs_;   // ours, and the same on the CPU
  std::vector<std::pair<Tensor, Tensor>> resized_;  // ours, and what the op fills on the CPU
};

// As torch's own code does before a product: an op that adds a vector is cuBLASLt's.
void take_workspaces(const std::string& name, const torch::jit::Stack& stack, size_t num_arguments) {
  if (!kProducts.count(name)) return;
  at::cuda::getCurrentCUDABlasHandle();
  const auto& first = stack[stack.size() - num_arguments];
  if (name == "_addmm_activation" || (name == "addmm" && first.toTensor().dim() == 1)) at::cuda::getCUDABlasLtWorkspace();
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(schema, stack);
  Work work(call.device(), schema.name().c_str());
  take_workspaces(schema.name().substr(schema.name().find("::") + 2), *stack, schema.arguments().size());
  call.to_host();
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  call.to_device();
}

void no_kernel(const c10::OperatorHandle& op, torch::jit::Stack*) {
  C10_THROW_ERROR(NotImplementedError, c10::str("the CUDA stand-in has no kernel for ", op.schema().operator_name(), ", which only CUDA has"));
}

// ---------------------------------------------------------------- ops that the CPU does not have, or not like CUDA

// Copies between a device and the host, and plain ones, are torch's own: they call the runtime. Others are a kernel.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool is_within = is_cuda(self) && is_cuda(source) && self.device() == source.device() && self.numel();
  const bool is_plain = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
      self.strides() == source.strides() && self.is_non_overlapping_and_dense() && self.is_conj() == source.is_conj() &&
      self.is_neg() == source.is_neg();
  if (!is_within || is_plain || self.is_same(source)) return at::native::copy_(self, source, non_blocking);
  Work work(self.device(), "aten::copy_");
  on_host(self, true).copy_(on_host(source));
  return self;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, optional<bool> train) {
  Work work(input.device(), "aten::native_dropout");
  auto there = on_host(input);
  if (!train.value_or(true)) return {on_device(there.clone(), input.device()), on_device(at::ones_like(there, at::kBool), input.device())};
  auto random = at::rand(there.sizes(), next_place(std::nullopt, input.device()).generator(), at::TensorOptions().dtype(at::kFloat));
  auto mask = random >= p;
  auto kept = p == 1 ? at::zeros_like(there) : there.mul(mask).mul_(1 / (1 - p));
  return {on_device(kept, input.device()), on_device(mask, input.device())};
}

// Softmax that casts from half precision to float, which only CUDA has.
template <bool kIsLog>
Tensor softmax(const Tensor& self, int64_t dim, bool to_float) {
  Work work(self.device(), "aten::_softmax");
  auto there = to_float ? on_host(self).to(at::kFloat) : on_host(self);
  return on_device(kIsLog ? at::_log_softmax(there, dim, false) : at::_softmax(there, dim, false), self.device());
}
template <bool kIsLog>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  Work work(grad.device(), "aten::_softmax_backward_data");
  auto g = on_host(grad), o = on_host(output);
  auto found = kIsLog ? at::_log_softmax_backward_data(g, o, dim, g.scalar_type()) : at::_softmax_backward_data(g, o, dim, g.scalar_type());
  return on_device(found.to(dtype), grad.device());
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& input, at::IntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight,
    std::array<bool, 2> wanted) {
  Work work(grad.device(), "aten::_fused_rms_norm_backward");
  auto g = on_host(grad).to(at::kFloat), r = on_host(rstd).to(at::kFloat), x = on_host(input).to(at::kFloat) * r;
  const bool has_weight = weight && weight->defined();
  auto weighted = has_weight ? g * on_host(*weight).to(at::kFloat) : g;
  std::vector<int64_t> inner, outer;
  for (int64_t i = 0; i < input.dim(); ++i)
    (i < input.dim() - static_cast<int64_t>(shape.size()) ? outer : inner).push_back(i);
  Tensor to_input, to_weight;
  if (wanted[0]) to_input = (r * (weighted - x * (weighted * x).mean(inner, true))).to(input.scalar_type());
  if (wanted[1] && has_weight) to_weight = (outer.empty() ? g * x : (g * x).sum(outer)).to(weight->scalar_type());
  return {on_device(to_input, input.device()), on_device(to_weight, input.device())};
}

Tensor product_as(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  Work work(a.device(), "aten::mm");
  at::cuda::getCurrentCUDABlasHandle();
  return on_device(at::mm(on_host(a).to(dtype), on_host(b).to(dtype)), a.device());
}

// ---------------------------------------------------------------- what the host reads and writes

// Ops that touch no values of their arguments, or whose inner ops do.
const std::set<std::string> kWithoutValues{
    "aten::is_pinned", "aten::pin_memory", "aten::_pin_memory", "aten::to", "aten::_to_copy", "aten::empty_like", "aten::new_empty",
    "aten::new_empty_strided", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros", "aten::new_ones",
    "aten::set_", "aten::resize_", "aten::record_stream", "aten::is_same_size", "aten::size", "aten::stride", "aten::_version",
    "aten::requires_grad_", "aten::detach_", "aten::result_type", "aten::contiguous", "aten::rand_like", "aten::randn_like"};

void check_host_values(const Tensor& t, bool is_write, const char* name) {
  if (!t.defined() || !t.device().is_cpu() || !t.has_storage() || !t.numel() || t.unsafeGetTensorImpl()->is_python_dispatch()) return;
  auto* data = static_cast<const char*>(t.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  if (data) standin_host_access(data + t.storage_offset() * t.dtype().itemsize(), spanned_bytes(t), is_write, name);
}

// Before each op of every thread: whether the host may read and write the pinned memory of its arguments by now.
std::unique_ptr<at::ObserverContext> before_op(const at::RecordFunction& function) {
  const auto& schema = function.operator_schema();
  if (!schema || kWithoutValues.count(schema->name())) return nullptr;
  const auto& arguments = schema->arguments();
  const auto values = function.inputs();
  if (values.size() != arguments.size()) return nullptr;
  for (const auto& value : values)  // the runtime sees copies, and those of the host are not ops
    if (value.isTensor() && is_cuda(value.toTensor())) return nullptr;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias && !alias->isWrite()) continue;  // a view
    if (values[i].isTensor()) check_host_values(values[i].toTensor(), alias, schema->name().c_str());
    if (values[i].isTensorList())
      for (const Tensor& each : values[i].toTensorVector()) check_host_values(each, alias, schema->name().c_str());
  }
  return nullptr;
}

// In the place of the choice between cuDNN and a kernel of torch's own: autograd knows the gradient of the latter.
std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t> batch_norm(
    const Tensor& input, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& mean,
    const std::optional<Tensor>& var, bool training, double momentum, double eps, bool) {
  auto [output, saved_mean, saved_invstd] = at::native_batch_norm(input, weight, bias, mean, var, training, momentum, eps);
  return {output, saved_mean, saved_invstd, at::empty({0}, input.options().dtype(at::kByte)), 0};
}

// ---------------------------------------------------------------- registration

// Kernels of CUDA that launch nothing, or call the runtime alone.
const std::set<std::string> kGenuine{
    "empty", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "set_", "resize_", "record_stream", "is_pinned",
    "_pin_memory", "is_set_to", "_local_scalar_dense", "view_as_real", "view_as_complex", "_fused_sdp_choice", "_efficientzerotensor"};

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

struct Registration {
  torch::Library library{torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__};
  torch::Library autograd{torch::Library::IMPL, "aten", DispatchKey::AutogradCUDA, __FILE__, __LINE__};

  Registration() {
    Silent silent;  // torch warns of each kernel that is replaced
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (auto& name : dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA)) {
      if (name.name.rfind("aten::", 0) != 0 || kGenuine.count(name.name.substr(6))) continue;
      auto op = dispatcher.findSchema(name);
      if (!op) continue;
      auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      const bool has_cpu = op->hasComputedKernelForDispatchKey(DispatchKey::CPU);
      library.impl(full.c_str(), has_cpu ? torch::CppFunction::makeFromBoxedFunction<&on_cpu>() : torch::CppFunction::makeFromBoxedFunction<&no_kernel>());
    }
    // Without a kernel of CUDA's own they would call cuDNN.
    for (auto* name : {"convolution", "_convolution", "convolution_backward", "_batch_norm_impl_index", "_batch_norm_impl_index_backward"})
      library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    autograd.impl("_batch_norm_impl_index", &batch_norm);
    library.impl("copy_", &copy_);
    library.impl("native_dropout", &native_dropout);
    library.impl("_softmax", &softmax<false>);
    library.impl("_log_softmax", &softmax<true>);
    library.impl("_softmax_backward_data", &softmax_backward<false>);
    library.impl("_log_softmax_backward_data", &softmax_backward<true>);
    library.impl("_fused_rms_norm_backward", &rms_norm_backward);
    library.impl("mm.dtype", &product_as);
    register_attention(library);
    at::addGlobalCallback(at::RecordFunctionCallback(&before_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  }
};
Registration registration;

}  // namespace
}  // namespace arithmetic
