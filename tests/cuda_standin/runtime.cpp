// Devices, streams, events and launches of the CUDA runtime, and what torch asks of the driver beside them.
//
// The functions replace those of the genuine libraries, which are loaded as well, because the loader looks here first.
// No kernel runs: a launch is an error with the kernel's name. Whatever has no function here is refused by name too
// (`refused.cpp`, made by `build.py`).
#include "machine.h"

#include <cuda.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace standin;

// ---------------------------------------------------------------- devices

namespace {
const char* device_name() {
  const char* name = getenv("CUDA_STANDIN_NAME");
  return name ? name : "NVIDIA H100 80GB HBM3";
}
constexpr int kVersion = 13000;
constexpr int kMajor = 9, kMinor = 0, kNumProcessors = 132, kThreads = 1024, kWarp = 32;
constexpr int kSharedBytes = 49152, kSharedBytesOptIn = 232448;
}  // namespace

STANDIN_API cudaError_t cudaGetDeviceCount(int* num) { return *num = machine().num_devices, cudaSuccess; }
STANDIN_API cudaError_t cudaGetDevice(int* index) { return *index = current_device(), cudaSuccess; }
STANDIN_API cudaError_t cudaSetDevice(int index) {
  if (index < 0 || index >= machine().num_devices) return fail(cudaErrorInvalidDevice);
  current_device() = index;
  device(index);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaDriverGetVersion(int* version) { return *version = kVersion, cudaSuccess; }
STANDIN_API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = kVersion, cudaSuccess; }
STANDIN_API cudaError_t cudaDeviceSynchronize() {
  Lock lock(machine().mutex);
  count("cudaDeviceSynchronize");
  drain_all();
  host_knows_all();
  host_waits_for_all();
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaDeviceCanAccessPeer(int* can, int from, int to) { return *can = from != to, cudaSuccess; }
STANDIN_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
STANDIN_API cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int index) {
  snprintf(text, bytes, "0000:%02x:00.0", index + 1);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int index) {
  if (index < 0 || index >= machine().num_devices) return fail(cudaErrorInvalidDevice);
  auto& it = *found = {};
  snprintf(it.name, sizeof it.name, "%s", device_name());
  memset(&it.uuid, 0xFA, sizeof it.uuid - 1);
  reinterpret_cast<char*>(&it.uuid)[sizeof it.uuid - 1] = static_cast<char>(index);
  it.totalGlobalMem = machine().devices[index].capacity;
  it.major = kMajor;
  it.minor = kMinor;
  it.multiProcessorCount = kNumProcessors;
  it.warpSize = kWarp;
  it.maxThreadsPerBlock = it.maxThreadsDim[0] = it.maxThreadsDim[1] = kThreads;
  it.maxThreadsDim[2] = 64;
  it.maxGridSize[0] = 2147483647;
  it.maxGridSize[1] = it.maxGridSize[2] = 65535;
  it.maxThreadsPerMultiProcessor = 2048;
  it.maxBlocksPerMultiProcessor = 32;
  it.regsPerBlock = it.regsPerMultiprocessor = 65536;
  it.sharedMemPerBlock = kSharedBytes;
  it.sharedMemPerBlockOptin = kSharedBytesOptIn;
  it.sharedMemPerMultiprocessor = 233472;
  it.totalConstMem = 65536;
  it.textureAlignment = 512;
  it.l2CacheSize = 52428800;
  it.memoryBusWidth = 5120;
  it.asyncEngineCount = 3;
  it.pciBusID = index + 1;
  it.canMapHostMemory = it.concurrentKernels = it.ECCEnabled = it.unifiedAddressing = it.managedMemory = 1;
  it.streamPrioritiesSupported = it.cooperativeLaunch = it.computePreemptionSupported = it.hostRegisterSupported = 1;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
  cudaDeviceProp found;
  if (auto error = cudaGetDeviceProperties(&found, index)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = kMajor; break;
    case cudaDevAttrComputeCapabilityMinor: *value = kMinor; break;
    case cudaDevAttrMultiProcessorCount: *value = kNumProcessors; break;
    case cudaDevAttrWarpSize: *value = kWarp; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = kThreads; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = found.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kSharedBytes; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = kSharedBytesOptIn; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(found.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxRegistersPerBlock: *value = found.regsPerBlock; break;
    case cudaDevAttrL2CacheSize: *value = found.l2CacheSize; break;
    case cudaDevAttrAsyncEngineCount: *value = found.asyncEngineCount; break;
    case cudaDevAttrPciBusId: *value = found.pciBusID; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = found.memoryBusWidth; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrCooperativeLaunch: case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanMapHostMemory: case cudaDevAttrConcurrentKernels: case cudaDevAttrStreamPrioritiesSupported:
      *value = 1;
      break;
    default: *value = 0;  // a feature that this device lacks
  }
  return cudaSuccess;
}

// ---------------------------------------------------------------- errors

namespace {
struct Named {
  cudaError_t error;
  const char *name, *text;
};
constexpr Named kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "the CUDA stand-in has no kernels: an op reached one of the GPU's, named above"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "the CUDA stand-in has no such function, named above"},
};
const Named& named(cudaError_t error) {
  for (auto& each : kErrors)
    if (each.error == error) return each;
  static constexpr Named other{cudaErrorUnknown, "cudaErrorUnknown", "unknown error"};
  return other;
}
}  // namespace

STANDIN_API const char* cudaGetErrorName(cudaError_t error) { return named(error).name; }
STANDIN_API const char* cudaGetErrorString(cudaError_t error) { return named(error).text; }

// What a library would compute or know, and nobody stands in for. Says the name, and returns what that library calls failure.
STANDIN_API int standin_refuse(const char* name, int error) {
  fprintf(stderr, "cuda stand-in: %s is not there\n", name);
  if (error == cudaErrorNotSupported) fail(cudaErrorNotSupported);
  return error;
}

// ---------------------------------------------------------------- streams

STANDIN_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
  Lock lock(machine().mutex);
  auto* it = new Stream();
  it->index = static_cast<int>(machine().streams.size());
  it->device = current_device();
  it->priority = priority;
  machine().streams.push_back(it);
  *out = reinterpret_cast<cudaStream_t>(it);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
STANDIN_API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return drain(stream_of(stream)), cudaSuccess; }
STANDIN_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return *priority = stream_of(stream)->priority, cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(machine().mutex);
  count("cudaStreamSynchronize");
  drain(stream_of(stream));
  host_knows(stream_of(stream)->clock);
  host_waits_until(stream_of(stream)->free_s);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(machine().mutex);
  auto* it = stream_of(stream);
  if (!is_past(it->free_s)) return cudaErrorNotReady;
  if (it->items.empty()) return host_knows(it->clock), cudaSuccess;
  run_until(it, it->num_run + 1);  // so that a loop of queries ends
  return cudaErrorNotReady;
}
STANDIN_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(machine().mutex);
  count("cudaStreamWaitEvent");
  Event held = *reinterpret_cast<Event*>(event);  // as it is recorded now
  auto* it = stream_of(stream);
  it->clock.merge(held.clock);
  it->free_s = std::max(it->free_s, held.at_s);
  if (held.stream && held.stream != it) enqueue_until(it, [held] { return run_until(held.stream, held.place); });
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void* data, unsigned) {
  enqueue(stream_of(stream), [=] { call(stream, cudaSuccess, data); });
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* data) {
  enqueue(stream_of(stream), [=] { call(data); });
  return cudaSuccess;
}

// No stream is captured into a graph of CUDA.
STANDIN_API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
STANDIN_API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
    const cudaGraphEdgeData** edges, size_t* num) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (num) *num = 0;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// ---------------------------------------------------------------- events

namespace {
double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// torch's threads that look whether collectives are over tell nobody else: the rest of the host must wait by itself.
bool is_watchdog() {
  static thread_local const bool it = [] {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return strncmp(name, "pt_nccl", 7) == 0;
  }();
  return it;
}
}  // namespace

STANDIN_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  auto* it = new Event();
  it->flags = flags;
  *out = reinterpret_cast<cudaEvent_t>(it);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
STANDIN_API cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<Event*>(event), cudaSuccess; }
STANDIN_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(machine().mutex);
  count("cudaEventRecord");
  auto* it = stream_of(stream);
  auto& held = *reinterpret_cast<Event*>(event);
  begin_work(it);
  auto at_ms = std::make_shared<double>(0);
  held.stream = it;
  held.place = it->num_issued() + 1;
  held.clock = it->clock;
  held.at_ms = at_ms;
  held.at_s = place_s(it);
  enqueue(it, [at_ms] { *at_ms = now_ms(); });
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
STANDIN_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(machine().mutex);
  auto& held = *reinterpret_cast<Event*>(event);
  if (!is_past(held.at_s)) return cudaErrorNotReady;
  if (!held.stream || held.stream->num_run >= held.place) {
    if (!is_watchdog()) host_knows(held.clock);
    return cudaSuccess;
  }
  run_until(held.stream, held.stream->num_run + 1);
  return cudaErrorNotReady;
}
STANDIN_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(machine().mutex);
  count("cudaEventSynchronize");
  auto& held = *reinterpret_cast<Event*>(event);
  if (held.stream) wait_until(held.stream, held.place);
  host_knows(held.clock);
  host_waits_until(held.at_s);
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  auto &first = *reinterpret_cast<Event*>(from), &second = *reinterpret_cast<Event*>(to);
  bool is_timed = !((first.flags | second.flags) & cudaEventDisableTiming);
  if (!first.stream || !second.stream || !is_timed) return fail(cudaErrorInvalidResourceHandle);
  if (*first.at_ms == 0 || *second.at_ms == 0 || !is_past(std::max(first.at_s, second.at_s))) return cudaErrorNotReady;
  if (is_clocked()) return *ms = static_cast<float>(1e3 * (second.at_s - first.at_s)), cudaSuccess;
  *ms = static_cast<float>(*second.at_ms - *first.at_ms);
  return cudaSuccess;
}

// ---------------------------------------------------------------- kernels

namespace {
std::string readable(const std::string& name) {
  int status = 0;
  char* plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string found = plain ? plain : name;
  free(plain);
  return found.substr(0, 400);
}

cudaError_t launch(const void* kernel) {
  Lock lock(machine().mutex);
  auto found = machine().kernels.find(kernel);
  std::string name = found == machine().kernels.end() ? "an unknown kernel" : found->second;
  if (name.find("spin_kernel") != std::string::npos) return cudaSuccess;  // torch.cuda._sleep: no time passes here
  count("refused kernels");
  fprintf(stderr, "cuda stand-in: no kernel %s\n", readable(name).c_str());
  return fail(cudaErrorInvalidDeviceFunction);
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local Configuration configuration;
}  // namespace

STANDIN_API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
STANDIN_API void __cudaRegisterFatBinaryEnd(void**) {}
STANDIN_API void __cudaUnregisterFatBinary(void**) {}
STANDIN_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
STANDIN_API char __cudaInitModule(void**) { return 1; }
STANDIN_API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*, int*) {
  machine().kernels[kernel] = name;
}
STANDIN_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}
STANDIN_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, cudaStream_t* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *stream = configuration.stream;
  return cudaSuccess;
}
STANDIN_API cudaError_t __cudaGetKernel(const void** out, const void* kernel) { return *out = kernel, cudaSuccess; }
STANDIN_API cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
STANDIN_API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
STANDIN_API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) { return launch(kernel); }
STANDIN_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) { return launch(kernel); }
STANDIN_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = kThreads;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = 10 * kMajor + kMinor;
  found->maxDynamicSharedSizeBytes = kSharedBytesOptIn;
  return cudaSuccess;
}
STANDIN_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
STANDIN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num, const void*, int, size_t) { return *num = 2, cudaSuccess; }
STANDIN_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num, const void*, int, size_t, unsigned) {
  return *num = 2, cudaSuccess;
}

// ---------------------------------------------------------------- the driver

STANDIN_API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuDriverGetVersion(int* version) { return *version = kVersion, CUDA_SUCCESS; }
STANDIN_API CUresult cuDeviceGetCount(int* num) { return *num = machine().num_devices, CUDA_SUCCESS; }
STANDIN_API CUresult cuDeviceGet(CUdevice* found, int index) { return *found = index, CUDA_SUCCESS; }
STANDIN_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice index) {
  // Expandable segments look at two features that the runtime has no name for.
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) return *value = 1, CUDA_SUCCESS;
  return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), index));
}
STANDIN_API CUresult cuDevicePrimaryCtxGetState(CUdevice index, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = machine().devices[index].base != nullptr;
  return CUDA_SUCCESS;
}
STANDIN_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS;
}
STANDIN_API CUresult cuCtxGetCurrent(CUcontext* context) { return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS; }
STANDIN_API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
STANDIN_API CUresult cuPointerGetAttribute(void* data, CUpointer_attribute, CUdeviceptr at) {
  return memcpy(data, &at, sizeof at), CUDA_SUCCESS;
}
STANDIN_API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the CUDA stand-in";
  return CUDA_SUCCESS;
}

// torch asks for each function of the driver by name; those that are not here are refused when they are called.
static CUresult no_such_function() { return static_cast<CUresult>(standin_refuse("a function of the driver", CUDA_ERROR_NOT_SUPPORTED)); }
STANDIN_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** out, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  auto* found = dlsym(RTLD_DEFAULT, name);
  *out = found ? found : reinterpret_cast<void*>(&no_such_function);
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ---------------------------------------------------------------- libraries: handles, and nothing that computes

// A new handle each time: torch keeps a workspace for each handle and stream.
STANDIN_API int cublasCreate_v2(void** handle) { return *handle = malloc(16), 0; }
STANDIN_API int cublasDestroy_v2(void* handle) { return free(handle), 0; }
STANDIN_API int cublasSetStream_v2(void*, void*) { return 0; }
STANDIN_API int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
STANDIN_API int cublasSetMathMode(void*, int) { return 0; }
STANDIN_API int cublasGetMathMode(void*, int* mode) { return *mode = 0, 0; }
STANDIN_API int cublasSetPointerMode_v2(void*, int) { return 0; }
STANDIN_API int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, 0; }
STANDIN_API size_t cublasLtGetVersion() { return 130100; }
STANDIN_API int cuptiGetResultString(int, const char** text) { return *text = "the CUDA stand-in has no CUPTI", 0; }
STANDIN_API size_t cudnnGetVersion() { return 91900; }
STANDIN_API int cudnnGetProperty(int part, int* value) { return *value = part == 0 ? 9 : part == 1 ? 19 : 0, 0; }
