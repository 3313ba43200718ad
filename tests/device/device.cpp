// A second device type for tests: PrivateUse1 on host memory, with streams that run late.
//
//   memory    one range of addresses per device; bytes are 0xFF (NaN) when allocated and again when freed
//   compute   each op runs at once on the CPU kernels, after everything that its stream was given before
//   copies    asynchronous copies wait in the queue of their stream until the policy, or a wait, runs them
//   streams   a queue each; an event is a place in a queue; a wait runs the other queue up to that place
//
// Nothing here keeps memory alive for a queued copy: it reads and writes addresses when it runs, as a GPU does.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kRangeBytes = size_t{1} << 36;
constexpr size_t kBlockBytes = 512;
constexpr int kPoison = 0xFF;

// ---------------------------------------------------------------- streams

enum class Policy { kEarly = 0, kLate = 1, kRandom = 2 };

struct Queue {
  std::deque<std::function<void()>> items;
  int64_t num_run = 0;
  int64_t num_issued() const {
    return num_run + static_cast<int64_t>(items.size());
  }
};

using StreamKey = std::pair<DeviceIndex, c10::StreamId>;

struct Machine {
  std::recursive_mutex mutex;
  Policy policy = Policy::kEarly;
  std::mt19937_64 random{0};
  std::map<StreamKey, Queue> queues;
  c10::StreamId next_stream = 1;
  int64_t num_async_copies = 0;
  std::map<uintptr_t, size_t> pinned;
};

Machine& machine() {
  static Machine* it = new Machine();
  return *it;
}

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kDevices] = {};

StreamKey current_stream(DeviceIndex device) {
  return {device, current_streams[device]};
}

// Ops inside run below autograd and outside of any Python mode of the calling thread.
struct Kernels {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::Functionalize})};
};

void run_until(StreamKey stream, int64_t place) {
  std::lock_guard lock(machine().mutex);
  auto& queue = machine().queues[stream];
  while (queue.num_run < place && !queue.items.empty()) {
    auto item = std::move(queue.items.front());
    queue.items.pop_front();
    queue.num_run += 1;
    item();
  }
}

void drain(StreamKey stream) {
  std::lock_guard lock(machine().mutex);
  run_until(stream, machine().queues[stream].num_issued());
}

void drain_device(DeviceIndex device) {
  std::lock_guard lock(machine().mutex);
  for (auto& [stream, queue] : machine().queues) {
    if (stream.first == device) drain(stream);
  }
}

bool is_idle(StreamKey stream) {
  return machine().queues[stream].items.empty();
}

void enqueue(StreamKey stream, std::function<void()> item) {
  auto& m = machine();
  std::lock_guard lock(m.mutex);
  m.queues[stream].items.push_back(std::move(item));
  if (m.policy == Policy::kEarly) {
    drain(stream);
  } else if (m.policy == Policy::kRandom) {
    for (auto& [other, queue] : m.queues) {
      auto pending = queue.items.size();
      if (pending) run_until(other, queue.num_run + static_cast<int64_t>(m.random() % (pending + 1)));
    }
  }
}

// ---------------------------------------------------------------- memory

struct Block {
  void* address;
  size_t bytes;
  size_t requested;
  StreamKey stream;
  std::set<StreamKey> users;
};

struct Memory {
  char* base = nullptr;
  size_t used = 0;
  size_t capacity = kRangeBytes;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<void*>> free;
  c10::CachingDeviceAllocator::DeviceStats stats{};
};

void count(c10::CachingAllocator::StatArray& stats, int64_t bytes) {
  auto& stat = stats[0];
  if (bytes >= 0) {
    stat.increase(static_cast<size_t>(bytes));
  } else {
    stat.decrease(static_cast<size_t>(-bytes));
  }
}

// An entry of the history of blocks: times are microseconds since 1970.
enum Action : int64_t { kAlloc, kFree, kSnapshot };
struct Entry {
  int64_t action, device, address, bytes, time_us;
};

struct DeviceMemory final : c10::DeviceAllocator {
  Memory devices[kDevices];
  std::unordered_map<void*, Block> blocks;
  bool has_history = false;
  std::vector<Entry> history;

  // The caller holds the mutex of the machine.
  void note(int64_t action, DeviceIndex device, const void* address, size_t bytes) {
    using namespace std::chrono;
    auto now = duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
    if (has_history) history.push_back({action, device, reinterpret_cast<int64_t>(address), static_cast<int64_t>(bytes), now});
  }

  DeviceMemory() {
    for (auto& device : devices) {
      void* base = mmap(nullptr, kRangeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(base != MAP_FAILED, "no range of addresses for the device");
      device.base = static_cast<char*>(base);
    }
  }

  bool holds(const void* address) const {
    auto* at = static_cast<const char*>(address);
    for (auto& device : devices) {
      if (at >= device.base && at < device.base + kRangeBytes) return true;
    }
    return false;
  }

  c10::DataPtr allocate(size_t n) override {
    auto device = current_device;
    if (n == 0) return {nullptr, nullptr, &release, Device(kType, device)};
    std::lock_guard lock(machine().mutex);
    auto& memory = devices[device];
    auto stream = current_stream(device);
    size_t bytes = (n + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    auto allocated = static_cast<size_t>(memory.stats.allocated_bytes[0].current);
    TORCH_CHECK_WITH(
        OutOfMemoryError, allocated + bytes <= memory.capacity, "out of memory: tried to allocate ", bytes, " bytes on device ",
        static_cast<int>(device), " with ", memory.capacity - allocated, " bytes free");
    auto& free = memory.free[{stream.second, bytes}];
    void* address;
    if (!free.empty()) {
      address = free.back();
      free.pop_back();
    } else {
      address = memory.base + memory.used;
      memory.used += bytes;
      TORCH_CHECK(memory.used <= kRangeBytes, "the range of addresses is used up");
      count(memory.stats.reserved_bytes, static_cast<int64_t>(bytes));
    }
    std::memset(address, kPoison, bytes);
    blocks[address] = {address, bytes, n, stream, {}};
    count(memory.stats.allocation, 1);
    count(memory.stats.allocated_bytes, static_cast<int64_t>(bytes));
    count(memory.stats.active_bytes, static_cast<int64_t>(bytes));
    count(memory.stats.requested_bytes, static_cast<int64_t>(n));
    note(kAlloc, device, address, n);
    return {address, address, &release, Device(kType, device)};
  }

  static void release(void* address);

  // The memory may be used again by later work of the stream that allocated it, and by no other stream.
  void release_block(void* address) {
    std::lock_guard lock(machine().mutex);
    auto found = blocks.find(address);
    if (found == blocks.end()) return;
    Block block = std::move(found->second);
    blocks.erase(found);
    auto& memory = devices[block.stream.first];
    count(memory.stats.allocation, -1);
    count(memory.stats.allocated_bytes, -static_cast<int64_t>(block.bytes));
    count(memory.stats.active_bytes, -static_cast<int64_t>(block.bytes));
    count(memory.stats.requested_bytes, -static_cast<int64_t>(block.requested));
    note(kFree, block.stream.first, block.address, block.requested);
    std::vector<StreamKey> busy;
    block.users.insert(block.stream);
    for (auto& stream : block.users) {
      if (!is_idle(stream)) busy.push_back(stream);
    }
    auto reuse = [this, block]() {
      std::memset(block.address, kPoison, block.bytes);
      devices[block.stream.first].free[{block.stream.second, block.bytes}].push_back(block.address);
    };
    if (busy.empty()) return reuse();
    auto left = std::make_shared<size_t>(busy.size());
    for (auto& stream : busy) {
      enqueue(stream, [left, reuse]() {
        if (--*left == 0) reuse();
      });
    }
  }

  void record(const void* address, StreamKey stream) {
    std::lock_guard lock(machine().mutex);
    auto found = blocks.find(const_cast<void*>(address));
    if (found != blocks.end()) found->second.users.insert(stream);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* dest, const void* src, std::size_t n) const override {
    std::memcpy(dest, src, n);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(machine().mutex);
    for (DeviceIndex device = 0; device < kDevices; ++device) {
      drain_device(device);
      devices[device].free.clear();  // else a block that is used again would be allocated and not reserved
      auto& reserved = devices[device].stats.reserved_bytes;
      count(reserved, devices[device].stats.allocated_bytes[0].current - reserved[0].current);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record(data.get(), {stream.device_index(), stream.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard lock(machine().mutex);
    return devices[device].stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard lock(machine().mutex);
    auto& stats = devices[device].stats;
    for (auto* array : {&stats.allocation, &stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes})
      (*array)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) {
    auto& memory = devices[device];
    return {memory.capacity - static_cast<size_t>(memory.stats.allocated_bytes[0].current), memory.capacity};
  }
};

DeviceMemory& memory() {
  static DeviceMemory* it = new DeviceMemory();
  return *it;
}

void DeviceMemory::release(void* address) {
  if (address) memory().release_block(address);
}

struct PinnedMemory final : c10::Allocator {
  static void release(void* address) {
    std::lock_guard lock(machine().mutex);
    for (DeviceIndex device = 0; device < kDevices; ++device) drain_device(device);
    machine().pinned.erase(reinterpret_cast<uintptr_t>(address));
    free(address);
  }
  c10::DataPtr allocate(size_t n) override {
    void* address = aligned_alloc(64, (std::max<size_t>(n, 1) + 63) / 64 * 64);
    std::lock_guard lock(machine().mutex);
    machine().pinned[reinterpret_cast<uintptr_t>(address)] = n;
    return {address, address, &release, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* dest, const void* src, std::size_t n) const override {
    std::memcpy(dest, src, n);
  }
};

bool is_pinned(const void* address) {
  std::lock_guard lock(machine().mutex);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto next = machine().pinned.upper_bound(at);
  if (next == machine().pinned.begin()) return false;
  --next;
  return at < next->first + next->second;
}

// ---------------------------------------------------------------- guard: devices, streams, events

struct Event {
  StreamKey stream;
  int64_t place = 0;
  std::shared_ptr<double> at_ms;
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static StreamKey key(const c10::Stream& stream) {
    return {stream.device_index(), stream.id()};
  }
  static DeviceIndex index(Device device) {
    return device.has_index() ? device.index() : current_device;
  }
  c10::DeviceType type() const override {
    return kType;
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return Device(kType, current_device);
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "there is no device ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(kType, index(device)), current_streams[index(device)]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(kType, index(device)), 0);
  }
  c10::Stream getNewStream(Device device, int) const override {
    std::lock_guard lock(machine().mutex);
    auto id = machine().next_stream++;
    machine().queues[{index(device), id}];
    return c10::Stream(c10::Stream::UNSAFE, Device(kType, index(device)), id);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const DeviceIndex device, const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of another device is recorded on ", stream);
    if (!*event) *event = new Event();
    std::lock_guard lock(machine().mutex);
    auto at_ms = std::make_shared<double>(0);
    auto& held = *static_cast<Event*>(*event);
    held = {key(stream), machine().queues[key(stream)].num_issued() + 1, at_ms};
    enqueue(key(stream), [at_ms]() { *at_ms = now_ms(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Event held = *static_cast<Event*>(event);
    if (held.stream == key(stream)) return;
    enqueue(key(stream), [held]() { run_until(held.stream, held.place); });
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard lock(machine().mutex);
    auto& held = *static_cast<Event*>(event);
    auto& queue = machine().queues[held.stream];
    if (queue.num_run >= held.place) return true;
    run_until(held.stream, queue.num_run + 1);  // a loop that polls comes to an end
    return false;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event) run_until(static_cast<Event*>(event)->stream, static_cast<Event*>(event)->place);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "an event was not recorded");
    auto &a = *static_cast<Event*>(first), &b = *static_cast<Event*>(second);
    TORCH_CHECK(a.stream.first == b.stream.first, "the events are of different devices");
    TORCH_CHECK(*a.at_ms > 0 && *b.at_ms > 0, "an event is not reached yet");
    return *b.at_ms - *a.at_ms;
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard lock(machine().mutex);
    auto& queue = machine().queues[key(stream)];
    if (queue.items.empty()) return true;
    run_until(key(stream), queue.num_run + 1);
    return false;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    drain(key(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    drain_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory().record(data.get(), key(stream));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    Guard().setDevice(Device(kType, device));
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice(Device(kType, device)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* it = new PinnedMemory();
    return it;
  }
  Device getDeviceFromPtr(void* data) const override {
    for (DeviceIndex device = 0; device < kDevices; ++device) {
      auto* base = memory().devices[device].base;
      if (data >= base && data < base + kRangeBytes) return Device(kType, device);
    }
    TORCH_CHECK(false, "the address is not on the device");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    drain(current_stream(storage.device().index()));
    auto data = memory().allocate(bytes);
    if (bytes && storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

// ---------------------------------------------------------------- tensors

// `parameter.data = tensor` moves a parameter between CPU and GPU, which torch allows for the dense types that it lists:
// HPU is one of them, PrivateUse1 is not. Ops are dispatched by the highest key, so the key HPU has no other effect.
const c10::DispatchKeySet kKeys({DispatchKey::PrivateUse1, DispatchKey::HPU});

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A tensor of the CPU over the same memory.
Tensor on_host(void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype).device(c10::kCPU));
}

Tensor on_host(const Tensor& tensor) {
  return on_host(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

Tensor new_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kType, current_device)));
  auto type = c10::scalarTypeToTypeMeta(dtype.value_or(at::ScalarType::Float));
  size_t bytes = 0, last = 1;
  bool none = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    none |= sizes[i] == 0;
    if (sizes[i]) last += static_cast<size_t>((sizes[i] - 1) * strides[i]);
  }
  if (!none) bytes = last * type.itemsize();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, memory().allocate(bytes), &memory(), /*resizable=*/true);
  auto tensor = at::detail::make_tensor_base<at::TensorImpl>(
      c10::Storage(std::move(storage)), kKeys, type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return Tensor(std::move(tensor));
}

Tensor new_empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout, std::optional<Device> device,
    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  auto meta = at::empty(sizes, at::TensorOptions().dtype(dtype.value_or(at::ScalarType::Float)).device(c10::kMeta), format);
  return new_strided(sizes, meta.strides(), dtype, layout, device, pin);
}

Tensor view_of(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, at::ScalarType dtype) {
  auto view = at::detail::make_tensor<at::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), c10::scalarTypeToTypeMeta(dtype));
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

Tensor strided_view(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  return view_of(self, sizes, strides, offset.value_or(self.storage_offset()), self.scalar_type());
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return strided_view(self, sizes, strides, std::nullopt);
}

const Tensor& set_sizes(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto bytes = static_cast<size_t>(self.numel() + self.storage_offset()) * self.dtype().itemsize();
  if (self.numel() && bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.data() || sizes.empty()) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

Tensor& set_source(Tensor& self, c10::Storage source) {
  auto num = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {num}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  auto none = new_empty({0}, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
  return set_tensor(self, none);
}

void record_stream(Tensor& self, c10::Stream stream) {
  memory().record(self.storage().data(), {stream.device_index(), stream.id()});
}

// ---------------------------------------------------------------- copies

void copy_now(void* to, const Tensor& like_to, void* from, const Tensor& like_from) {
  Kernels kernels;
  on_host(to, like_to.sizes(), like_to.strides(), like_to.scalar_type())
      .copy_(on_host(from, like_from.sizes(), like_from.strides(), like_from.scalar_type()));
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  Kernels kernels;
  auto from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  const bool within = is_ours(from) && is_ours(to) && from.device() == to.device();
  const auto device = is_ours(to) ? to.device() : from.device();
  const auto& host = is_ours(to) ? from : to;
  if (!within && is_ours(from) && is_ours(to)) drain(current_stream(from.device().index()));
  // Sizes and strides without the memory: nothing is kept alive until the copy runs.
  auto shape = [](const Tensor& t) {
    return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
  };
  auto stream = current_stream(device.index());
  auto run = [a = to.mutable_data_ptr(), b = from.mutable_data_ptr(), to = shape(to), from = shape(from)]() {
    copy_now(a, to, b, from);
  };
  const bool late = within || (non_blocking && !is_ours(host) && is_pinned(host.const_data_ptr()));
  if (late && !within) machine().num_async_copies += 1;
  enqueue(stream, std::move(run));
  if (!late) drain(stream);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// ---------------------------------------------------------------- all other ops, on the CPU kernels

struct Call {
  std::vector<std::pair<Tensor, Tensor>> inputs;  // ours, and the same on the CPU
  std::vector<std::pair<Tensor, Tensor>> outs;  // ours, and the CPU's copy that the op may resize
  std::optional<Device> device;

  Tensor host(const Tensor& tensor, bool may_resize) {
    if (!is_ours(tensor)) return tensor;
    if (!device) device = tensor.device();
    Tensor there = on_host(tensor);
    if (may_resize) {
      Tensor copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
      if (tensor.numel()) copy.copy_(there);
      outs.emplace_back(tensor, copy);
      return copy;
    }
    inputs.emplace_back(tensor, there);
    return there;
  }

  Tensor back(const Tensor& result) const {
    if (!result.defined() || result.device().type() != c10::kCPU) return result;
    for (auto* pairs : {&inputs, &outs}) {
      for (auto& [ours, there] : *pairs) {
        if (there.is_same(result)) return ours;
      }
    }
    if (memory().holds(result.const_data_ptr())) {
      for (auto& [ours, there] : inputs) {  // a view
        auto* base = static_cast<const char*>(ours.storage().data());
        auto* at = static_cast<const char*>(result.const_data_ptr());
        if (at >= base && at < base + ours.storage().nbytes())
          return view_of(
              ours, result.sizes(), result.strides(), (at - base) / static_cast<int64_t>(result.dtype().itemsize()),
              result.scalar_type());
      }
    }
    auto whole = result.is_non_overlapping_and_dense() ? result : result.contiguous();
    auto ours = new_strided(whole.sizes(), whole.strides(), whole.scalar_type(), std::nullopt, *device, std::nullopt);
    if (whole.numel()) std::memcpy(ours.mutable_data_ptr(), whole.const_data_ptr(), whole.numel() * whole.dtype().itemsize());
    return ours;
  }
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto num = schema.arguments().size();
  const auto start = stack->size() - num;
  Call call;
  {
    Kernels kernels;
    for (size_t i = 0; i < num; ++i) {
      auto& value = (*stack)[start + i];
      const auto& argument = schema.arguments()[i];
      const bool may_resize = argument.is_out();
      if (value.isTensor()) {
        value = call.host(value.toTensor(), may_resize);
      } else if (value.isTensorList()) {
        c10::List<Tensor> there;
        for (const Tensor& tensor : value.toTensorVector()) there.push_back(call.host(tensor, may_resize));
        value = there;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> there;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
          there.push_back(tensor ? std::optional(call.host(*tensor, false)) : std::nullopt);
        value = there;
      } else if (value.isDevice() && value.toDevice().type() == kType) {
        if (!call.device || value.toDevice().has_index()) call.device = value.toDevice();
        value = Device(c10::kCPU);
      }
    }
  }
  if (!call.device) call.device = Device(kType, current_device);
  if (!call.device->has_index()) call.device = Device(kType, current_device);
  drain(current_stream(call.device->index()));
  Kernels kernels;
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  for (auto& [ours, there] : call.outs) {
    if (ours.sizes() != there.sizes()) set_sizes(ours, there.sizes(), std::nullopt);
    if (there.numel()) on_host(ours).copy_(there);
  }
  const auto first = stack->size() - schema.returns().size();
  for (size_t i = first; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> ours;
      for (const Tensor& tensor : value.toTensorVector()) ours.push_back(call.back(tensor));
      value = ours;
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &new_empty);
  m.impl("empty_strided", &new_strided);
  m.impl("as_strided", &strided_view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &set_sizes);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

extern "C" {

// Called once, by the process that loads this library.
void device_start() {
  c10::SetAllocator(kType, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

void device_set_policy(int policy, uint64_t seed) {
  for (DeviceIndex device = 0; device < kDevices; ++device) drain_device(device);
  machine().policy = static_cast<Policy>(policy);
  machine().random.seed(seed);
}

void device_pin(void* address, size_t bytes) {
  std::lock_guard lock(machine().mutex);
  machine().pinned[reinterpret_cast<uintptr_t>(address)] = bytes;
}

// As a driver does, it finishes copies first: the memory may be unmapped after it.
void device_unpin(void* address) {
  std::lock_guard lock(machine().mutex);
  for (DeviceIndex device = 0; device < kDevices; ++device) drain_device(device);
  machine().pinned.erase(reinterpret_cast<uintptr_t>(address));
}

void device_set_capacity(int device, size_t bytes) {
  memory().devices[device].capacity = bytes;
}

int64_t device_num_pending() {
  std::lock_guard lock(machine().mutex);
  int64_t pending = 0;
  for (auto& [stream, queue] : machine().queues) pending += static_cast<int64_t>(queue.items.size());
  return pending;
}

// Begins a history of blocks if `on` is not 0, else ends and forgets it.
void device_keep_history(int on) {
  std::lock_guard lock(machine().mutex);
  memory().has_history = on != 0;
  memory().history.clear();
}

// Writes the first `most` entries of the history to `out`, five numbers each, and returns how many there are.
int64_t device_history(int64_t* out, int64_t most) {
  std::lock_guard lock(machine().mutex);
  auto& all = memory().history;
  auto some = std::min<int64_t>(most, static_cast<int64_t>(all.size()));
  if (some > 0) std::memcpy(out, all.data(), static_cast<size_t>(some) * sizeof(Entry));
  return static_cast<int64_t>(all.size());
}

// Writes device, address and bytes of the first `most` blocks to `out`, returns how many there are, and notes that in
// the history of each device.
int64_t device_blocks(int64_t* out, int64_t most) {
  std::lock_guard lock(machine().mutex);
  int64_t found = 0;
  for (auto& [address, block] : memory().blocks) {
    if (found++ >= most) continue;
    *out++ = block.stream.first;
    *out++ = reinterpret_cast<int64_t>(address);
    *out++ = static_cast<int64_t>(block.requested);
  }
  for (DeviceIndex device = 0; device < kDevices; ++device) memory().note(kSnapshot, device, nullptr, 0);
  return found;
}

int64_t device_num_async_copies() {
  return machine().num_async_copies;
}
}
