// Memory of devices and of the host, and copies between them.
//
// Each device is a range of addresses. Freed memory becomes inaccessible, so a late user dies with a segmentation fault
// instead of reading what was there. The capacity is kept: torch's allocator runs out of memory as on a GPU.
#include "machine.h"

#include <cuda.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

using namespace standin;

namespace {

size_t rounded(size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

// What a context takes of the memory, as on a GPU about half a gigabyte; none unless asked for.
size_t context_bytes() {
  static size_t bytes = number_of("CUDA_STANDIN_CONTEXT_BYTES", 0);
  return bytes;
}

bool fits(const Device& it, size_t bytes) { return it.used + bytes + context_bytes() <= it.capacity; }

// The offset of a gap of `bytes` between what is taken.
size_t gap(const Device& it, size_t bytes) {
  size_t at = 0;
  for (auto& [offset, taken] : it.taken) {
    if (offset >= at + bytes) break;
    at = offset + taken;
  }
  return at;
}

void open_pages(void* address, size_t bytes) {
  mprotect(address, bytes, PROT_READ | PROT_WRITE);
  // Touching gigabytes that nobody uses would take the machine's memory; torch's blocks are poisoned one by one.
  constexpr size_t kMost = size_t{32} << 20;
  if (bytes <= kMost) memset(address, kPoison, bytes);
}

// As the driver does, finish all work first.
void close_pages(void* address, size_t bytes) {
  drain_all();
  host_knows_all();
  host_waits_for_all();
  forget(address, bytes);
  madvise(address, bytes, MADV_DONTNEED);
  mprotect(address, bytes, PROT_NONE);
}

}  // namespace

STANDIN_API cudaError_t cudaMalloc(void** address, size_t bytes) {
  Lock lock(machine().mutex);
  auto& it = device(current_device());
  count("cudaMalloc");
  *address = nullptr;
  if (!bytes) return cudaSuccess;
  bytes = rounded(bytes);
  if (!fits(it, bytes)) return fail(cudaErrorMemoryAllocation);
  auto at = gap(it, bytes);
  it.taken[at] = bytes;
  it.used += bytes;
  *address = it.base + at;
  open_pages(*address, bytes);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaFree(void* address) {
  Lock lock(machine().mutex);
  if (!address) {
    device(current_device());
    return cudaSuccess;
  }
  count("cudaFree");
  int index = device_of(address);
  if (index < 0) return fail(cudaErrorInvalidValue);
  auto& it = machine().devices[index];
  auto found = it.taken.find(static_cast<char*>(address) - it.base);
  if (found == it.taken.end()) return fail(cudaErrorInvalidValue);
  close_pages(address, found->second);
  it.used -= found->second;
  it.taken.erase(found);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(machine().mutex);
  auto& it = device(current_device());
  *total = it.capacity;
  *free = it.capacity - std::min(it.capacity, it.used + context_bytes());
  return cudaSuccess;
}

// ---------------------------------------------------------------- memory of the host

STANDIN_API cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  Lock lock(machine().mutex);
  count("cudaHostAlloc");
  auto* got = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  *address = got;
  machine().pinned[reinterpret_cast<uintptr_t>(got)] = {bytes, true};
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaFreeHost(void* address) {
  Lock lock(machine().mutex);
  if (!address) return cudaSuccess;
  auto found = machine().pinned.find(reinterpret_cast<uintptr_t>(address));
  if (found == machine().pinned.end() || !found->second.is_allocated) return fail(cudaErrorInvalidValue);
  drain_all();
  host_knows_all();
  host_waits_for_all();
  forget(address, found->second.bytes);
  munmap(address, std::max<size_t>(found->second.bytes, 1));
  machine().pinned.erase(found);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  Lock lock(machine().mutex);
  count("cudaHostRegister");
  if (!address || !bytes) return fail(cudaErrorInvalidValue);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto next = machine().pinned.lower_bound(at + bytes);
  if (next != machine().pinned.begin() && (--next, next->first + next->second.bytes > at))
    return fail(cudaErrorHostMemoryAlreadyRegistered);
  machine().pinned[at] = {bytes, false};
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaHostUnregister(void* address) {
  Lock lock(machine().mutex);
  count("cudaHostUnregister");
  auto found = machine().pinned.find(reinterpret_cast<uintptr_t>(address));
  if (found == machine().pinned.end() || found->second.is_allocated) return fail(cudaErrorHostMemoryNotRegistered);
  drain_all();
  host_knows_all();
  host_waits_for_all();
  forget(address, found->second.bytes);
  machine().pinned.erase(found);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  Lock lock(machine().mutex);
  int index = device_of(address);
  bool pinned = index < 0 && is_pinned(address);
  auto* it = const_cast<void*>(address);
  *found = {};
  found->type = index >= 0 ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->device = index >= 0 ? index : pinned ? current_device() : cudaInvalidDeviceId;
  found->devicePointer = index >= 0 || pinned ? it : nullptr;
  found->hostPointer = index >= 0 ? nullptr : it;
  return cudaSuccess;
}

// ---------------------------------------------------------------- copies

// Copies to and from memory of the host that is not pinned are over when the call returns, as CUDA's documentation says.
static cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool waits) {
  if (!bytes) return cudaSuccess;
  Lock lock(machine().mutex);
  auto* it = stream_of(stream);
  bool to_device = device_of(to) >= 0, from_device = device_of(from) >= 0;
  bool is_late = !waits && (to_device || is_pinned(to)) && (from_device || is_pinned(from));
  count(to_device ? from_device ? "bytes d2d" : "bytes h2d" : from_device ? "bytes d2h" : "bytes h2h",
        static_cast<int64_t>(bytes));
  if (is_late && to_device != from_device) count("late copies");
  auto work = begin_work(it);
  access(it, work, from, bytes, false, "a copy");
  access(it, work, to, bytes, true, "a copy");
  if (to_device != from_device) copy_seconds(it, to_device, bytes);
  enqueue(it, [=] { memmove(to, from, bytes); });
  if (!is_late) {
    drain(it);
    host_knows(it->clock);
    host_waits_until(it->free_s);
  }
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr, true);
}
STANDIN_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream, false);
}
STANDIN_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream, false);
}
STANDIN_API cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row)
    copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, stream, false);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  Lock lock(machine().mutex);
  auto* it = stream_of(stream);
  access(it, begin_work(it), to, bytes, true, "memset");
  enqueue(it, [=] { memset(to, value, bytes); });
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  auto done = cudaMemsetAsync(to, value, bytes, nullptr);
  drain(stream_of(nullptr));
  return done;
}

// ---------------------------------------------------------------- addresses and memory apart: expandable segments

namespace {
struct Physical {
  int device;
  size_t bytes;
};
char* address_of(CUdeviceptr at) { return reinterpret_cast<char*>(at); }
}  // namespace

STANDIN_API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kGranule;
  return CUDA_SUCCESS;
}
STANDIN_API CUresult cuMemAddressReserve(CUdeviceptr* at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  Lock lock(machine().mutex);
  auto& it = device(current_device());
  auto offset = gap(it, rounded(bytes));
  if (offset + rounded(bytes) > kRange) return CUDA_ERROR_OUT_OF_MEMORY;
  it.taken[offset] = rounded(bytes);
  *at = reinterpret_cast<CUdeviceptr>(it.base + offset);
  return CUDA_SUCCESS;
}
STANDIN_API CUresult cuMemAddressFree(CUdeviceptr at, size_t) {
  Lock lock(machine().mutex);
  auto& it = machine().devices[device_of(address_of(at))];
  it.taken.erase(address_of(at) - it.base);
  return CUDA_SUCCESS;
}
STANDIN_API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* wanted, unsigned long long) {
  Lock lock(machine().mutex);
  auto& it = device(wanted->location.id);
  count("cuMemCreate");
  if (!fits(it, rounded(bytes))) return CUDA_ERROR_OUT_OF_MEMORY;
  it.used += rounded(bytes);
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{wanted->location.id, rounded(bytes)});
  return CUDA_SUCCESS;
}
STANDIN_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Lock lock(machine().mutex);
  auto* physical = reinterpret_cast<Physical*>(handle);
  machine().devices[physical->device].used -= physical->bytes;
  delete physical;
  return CUDA_SUCCESS;
}
STANDIN_API CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc*, size_t) {
  open_pages(address_of(at), bytes);
  return CUDA_SUCCESS;
}
STANDIN_API CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  Lock lock(machine().mutex);
  close_pages(address_of(at), bytes);
  return CUDA_SUCCESS;
}
