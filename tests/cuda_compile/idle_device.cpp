// A CUDA device that does nothing, to be preloaded (`LD_PRELOAD`) before torch's CUDA build on a machine without a GPU.
//
//   memory     pages of the host, zero until a copy writes them
//   copies     are done when the call returns
//   kernels    and products of matrices do nothing and succeed: their results stay what the memory held
//   time       1 ms between any two events
//
// Whatever is compiled for the device, and whatever torch asks it, happens as on a device; no value means anything.
// Names and orders of arguments are those of CUDA 13.0; a symbol without a version satisfies references of every
// version. Functions that are not here are NVIDIA's own, which find no driver and fail.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#define API extern "C" __attribute__((visibility("default")))

namespace {
constexpr int kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kNotSupported = 801;
constexpr size_t kPage = 4096;

// What torch, Inductor and Triton ask of the device that is compiled for.
struct Card {
  int capability;
  const char* name;
  size_t memory;
  int multiprocessors, threads_per_multiprocessor, shared_per_multiprocessor, shared_per_block, cache;
};
constexpr Card kCards[] = {
    {90, "NVIDIA H100 80GB HBM3", size_t{80} << 30, 132, 2048, 233472, 232448, 52428800},
    {89, "NVIDIA GeForce RTX 4090", size_t{24} << 30, 128, 1536, 102400, 101376, 75497472},
};
const Card& card() {
  static const Card* found = [] {
    const char* text = getenv("IDLE_DEVICE_CAPABILITY");
    for (const auto& own : kCards)
      if (own.capability == (text ? atoi(text) : 90)) return &own;
    fprintf(stderr, "idle device: no card has the capability %s\n", text);
    abort();
  }();
  return *found;
}

std::mutex lock;
std::map<uintptr_t, size_t> on_device, pinned;  // address -> bytes
size_t used = 0;
thread_local int last_error = 0;

int fail(int code) { return last_error = code; }
bool is_in(const std::map<uintptr_t, size_t>& ranges, const void* p) {
  auto at = reinterpret_cast<uintptr_t>(p);
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return false;
  --next;
  return at < next->first + next->second;
}
void* pages(size_t n) {
  void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
size_t whole_pages(size_t n) { return (n + kPage - 1) / kPage * kPage; }
int take(std::map<uintptr_t, size_t>& ranges, void** p, size_t n) {
  *p = n ? pages(whole_pages(n)) : nullptr;
  if (n && !*p) return fail(kOutOfMemory);
  if (n) ranges[reinterpret_cast<uintptr_t>(*p)] = whole_pages(n);
  return kOk;
}
int give(std::map<uintptr_t, size_t>& ranges, void* p) {
  auto found = ranges.find(reinterpret_cast<uintptr_t>(p));
  if (!p || found == ranges.end()) return p ? fail(kInvalidValue) : kOk;
  if (&ranges == &on_device) used -= found->second;
  munmap(p, found->second);
  ranges.erase(found);
  return kOk;
}
// A handle that nobody looks into; distinct, because torch keeps memory by handle.
int new_handle(void** out) {
  *out = malloc(64);
  return *out ? kOk : kOutOfMemory;
}
}  // namespace

// ---------------------------------------------------------------- device
API int cudaGetDeviceCount(int* n) { return *n = 1, kOk; }
API int cudaGetDevice(int* i) { return *i = 0, kOk; }
API int cudaSetDevice(int i) { return i == 0 ? kOk : fail(kInvalidDevice); }
API int cudaDriverGetVersion(int* v) { return *v = 13000, kOk; }
API int cudaRuntimeGetVersion(int* v) { return *v = 13000, kOk; }
API int cudaDeviceSynchronize() { return kOk; }
API int cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, kOk; }
API int cudaDeviceGetPCIBusId(char* text, int n, int) { return snprintf(text, n, "0000:01:00.0"), kOk; }
API int cudaDeviceGetDefaultMemPool(void** pool, int) { return *pool = nullptr, fail(kNotSupported); }
API int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return kOk;
}
API int cudaGetDeviceProperties(char* p, int i) {  // `cudaDeviceProp` of CUDA 13.0, 1008 bytes
  if (i != 0) return fail(kInvalidDevice);
  memset(p, 0, 1008);
  auto put = [p](size_t at, int v) { memcpy(p + at, &v, sizeof v); };
  auto put_size = [p](size_t at, size_t v) { memcpy(p + at, &v, sizeof v); };
  snprintf(p, 256, "%s", card().name);
  put_size(288, card().memory), put_size(296, 49152), put(304, 65536), put(308, 32);  // shared, registers of a block; warp
  put(320, 1024), put(324, 1024), put(328, 1024), put(332, 64), put(336, 2147483647), put(340, 65535), put(344, 65535);
  put(360, card().capability / 10), put(364, card().capability % 10), put(384, card().multiprocessors);
  put(596, card().cache), put(604, card().threads_per_multiprocessor), put_size(624, card().shared_per_multiprocessor);
  put(632, 65536), put_size(672, card().shared_per_block);
  return kOk;
}
API int cudaDeviceGetAttribute(int* v, int attribute, int) {
  const std::map<int, int> known{{1, 1024}, {8, 49152}, {10, 32}, {12, 65536}, {16, card().multiprocessors},
      {38, card().cache}, {39, card().threads_per_multiprocessor}, {75, card().capability / 10},
      {76, card().capability % 10}, {81, card().shared_per_multiprocessor}, {82, 65536}, {97, card().shared_per_block}};
  auto found = known.find(attribute);
  return *v = found == known.end() ? 0 : found->second, kOk;
}

// ---------------------------------------------------------------- errors
API int cudaGetLastError() { int code = last_error; return last_error = 0, code; }
API int cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(int code) { return code == kOutOfMemory ? "cudaErrorMemoryAllocation" : code ? "cudaError" : "cudaSuccess"; }
API const char* cudaGetErrorString(int code) { return code == kOutOfMemory ? "out of memory" : code ? "an error of the idle device" : "no error"; }

// ---------------------------------------------------------------- memory
API int cudaMalloc(void** p, size_t n) {
  std::lock_guard guard(lock);
  if (used + n > card().memory) return *p = nullptr, fail(kOutOfMemory);
  used += whole_pages(n);
  return take(on_device, p, n);
}
API int cudaFree(void* p) { std::lock_guard guard(lock); return give(on_device, p); }
API int cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard guard(lock);
  *total = card().memory, *free_bytes = card().memory - used;
  return kOk;
}
API int cudaHostAlloc(void** p, size_t n, unsigned) { std::lock_guard guard(lock); return take(pinned, p, n); }
API int cudaFreeHost(void* p) { std::lock_guard guard(lock); return give(pinned, p); }
API int cudaHostRegister(void* p, size_t n, unsigned) { std::lock_guard guard(lock); return pinned[reinterpret_cast<uintptr_t>(p)] = n, kOk; }
API int cudaHostUnregister(void* p) { std::lock_guard guard(lock); return pinned.erase(reinterpret_cast<uintptr_t>(p)) ? kOk : fail(kInvalidValue); }
API int cudaPointerGetAttributes(char* a, const void* p) {  // type, device, device pointer, host pointer
  std::lock_guard guard(lock);
  memset(a, 0, 24);
  int type = is_in(on_device, p) ? 2 : is_in(pinned, p) ? 1 : 0, owner = type ? 0 : -2;
  memcpy(a, &type, 4), memcpy(a + 4, &owner, 4);
  if (type) memcpy(a + 8, &p, 8);
  if (type != 2) memcpy(a + 16, &p, 8);
  return kOk;
}
API int cudaMemcpy(void* to, const void* from, size_t n, int) { return memmove(to, from, n), kOk; }
API int cudaMemcpyAsync(void* to, const void* from, size_t n, int, void*) { return memmove(to, from, n), kOk; }
API int cudaMemset(void* to, int v, size_t n) { return memset(to, v, n), kOk; }
API int cudaMemsetAsync(void* to, int v, size_t n, void*) { return memset(to, v, n), kOk; }
API int cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, int) { return kOk; }

// ---------------------------------------------------------------- streams, events, capture
API int cudaStreamCreate(void** s) { return new_handle(s); }
API int cudaStreamCreateWithPriority(void** s, unsigned, int) { return new_handle(s); }
API int cudaStreamDestroy(void*) { return kOk; }
API int cudaStreamGetPriority(void*, int* p) { return *p = 0, kOk; }
API int cudaStreamSynchronize(void*) { return kOk; }
API int cudaStreamQuery(void*) { return kOk; }
API int cudaStreamWaitEvent(void*, void*, unsigned) { return kOk; }
API int cudaStreamIsCapturing(void*, int* status) { return *status = 0, kOk; }
API int cudaStreamGetCaptureInfo(void*, int* status, unsigned long long* id, ...) { *status = 0; if (id) *id = 0; return kOk; }
API int cudaThreadExchangeStreamCaptureMode(int*) { return kOk; }
API int cudaEventCreate(void** e) { return new_handle(e); }
API int cudaEventCreateWithFlags(void** e, unsigned) { return new_handle(e); }
API int cudaEventDestroy(void* e) { return free(e), kOk; }
API int cudaEventRecord(void*, void*) { return kOk; }
API int cudaEventRecordWithFlags(void*, void*, unsigned) { return kOk; }
API int cudaEventQuery(void*) { return kOk; }
API int cudaEventSynchronize(void*) { return kOk; }
API int cudaEventElapsedTime(float* ms, void*, void*) { return *ms = 1, kOk; }

// ---------------------------------------------------------------- kernels
struct Size { unsigned x, y, z; };
static thread_local struct { Size grid, block; size_t shared; void* stream; } launch;
API void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, void* stream) { return launch = {grid, block, shared, stream}, 0; }
API int __cudaPopCallConfiguration(Size* grid, Size* block, size_t* shared, void** stream) {
  *grid = launch.grid, *block = launch.block, *shared = launch.shared, *stream = launch.stream;
  return kOk;
}
API int __cudaGetKernel(const void** out, const void* host) { return *out = host, kOk; }
API int __cudaLaunchKernel(const void*, Size, Size, void**, size_t, void*) { return kOk; }
API int cudaLaunchKernel(const void*, Size, Size, void**, size_t, void*) { return kOk; }
API int cudaLaunchKernelExC(const void*, const void*, void**) { return kOk; }
API int cudaFuncSetAttribute(const void*, int, int) { return kOk; }
API int cudaFuncGetAttributes(char* a, const void*) {
  memset(a, 0, 144);
  const int most_threads = 1024, registers = 32;
  memcpy(a + 24, &most_threads, 4), memcpy(a + 28, &registers, 4);
  memcpy(a + 32, &card().capability, 4), memcpy(a + 36, &card().capability, 4), memcpy(a + 44, &card().shared_per_block, 4);
  return kOk;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { return *n = 2, kOk; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { return *n = 2, kOk; }

// ---------------------------------------------------------------- products of matrices
#define NOTHING(name) API int name() { return kOk; }
API int cublasCreate_v2(void** h) { return new_handle(h); }
API int cublasDestroy_v2(void* h) { return free(h), kOk; }
API int cublasGetMathMode(void*, int* mode) { return *mode = 0, kOk; }
API int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0, kOk; }
NOTHING(cublasSetStream_v2) NOTHING(cublasSetWorkspace_v2) NOTHING(cublasSetMathMode) NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSgemm_v2) NOTHING(cublasSgemmEx) NOTHING(cublasGemmEx) NOTHING(cublasSgemv_v2) NOTHING(cublasSdot_v2)
NOTHING(cublasDotEx) NOTHING(cublasSgemmStridedBatched) NOTHING(cublasGemmStridedBatchedEx)
API size_t cublasLtGetVersion() { return 130100; }
API int cublasLtMatmulDescCreate(void** d, int, int) { return new_handle(d); }
API int cublasLtMatmulDescDestroy(void* d) { return free(d), kOk; }
API int cublasLtMatmulPreferenceCreate(void** p) { return new_handle(p); }
API int cublasLtMatmulPreferenceDestroy(void* p) { return free(p), kOk; }
API int cublasLtMatrixLayoutCreate(void** m, int, uint64_t, uint64_t, int64_t) { return new_handle(m); }
API int cublasLtMatrixLayoutDestroy(void* m) { return free(m), kOk; }
NOTHING(cublasLtMatmulDescSetAttribute) NOTHING(cublasLtMatmulPreferenceSetAttribute) NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasLtMatmul)
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found) {
  return memset(results, 0, 64 + 32), *found = 1, kOk;  // the algorithm, its workspace, its state
}

// ---------------------------------------------------------------- the driver, whose name this library has
API int cuInit(unsigned) { return kOk; }
API int cuDeviceGet(int* device, int i) { return *device = i, kOk; }
API int cuDeviceGetCount(int* n) { return *n = 1, kOk; }
API int cuDeviceGetAttribute(int* v, int attribute, int i) { return cudaDeviceGetAttribute(v, attribute, i); }
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) { return *flags = 0, *is_active = 1, kOk; }
API int cuDevicePrimaryCtxRetain(void** context, int) { static char it; return *context = &it, kOk; }
API int cuCtxGetCurrent(void** context) { return cuDevicePrimaryCtxRetain(context, 0); }
API int cuCtxGetDevice(int* device) { return *device = 0, kOk; }
API int cuGetErrorString(int code, const char** text) { return *text = cudaGetErrorString(code), kOk; }
API int cuModuleLoad(void** module, const char*) { return new_handle(module); }
API int cuModuleLoadData(void** module, const void*) { return new_handle(module); }
API int cuModuleLoadDataEx(void** module, const void*, unsigned, void*, void*) { return new_handle(module); }
API int cuModuleUnload(void* module) { return free(module), kOk; }
API int cuModuleGetFunction(void** function, void*, const char*) { return new_handle(function); }
API int cuFuncGetAttribute(int* v, int attribute, void*) { return *v = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, kOk; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int, size_t) { return *n = 2, kOk; }
API int cuPointerGetAttribute(void** value, int, const void* p) { return *value = const_cast<void*>(p), kOk; }
API int cuCtxGetLimit(size_t* bytes, int) { return *bytes = 8 << 20, kOk; }
NOTHING(cuCtxSetCurrent) NOTHING(cuCtxSetLimit) NOTHING(cuOccupancyMaxActiveClusters) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig) NOTHING(cuLaunchKernel) NOTHING(cuLaunchKernelEx)
NOTHING(cuLaunchCooperativeKernel) NOTHING(cuTensorMapEncodeTiled) NOTHING(cuLinkAddData_v2) NOTHING(cuLinkComplete) NOTHING(cuLinkCreate_v2)
API int cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long, int* status) {
  *out = dlsym(RTLD_DEFAULT, name);
  if (status) *status = *out ? 0 : 1;
  return *out ? kOk : fail(kNotSupported);
}
