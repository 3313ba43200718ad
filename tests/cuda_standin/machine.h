// The devices of the stand-in: memory, streams, events, and the order of all accesses to memory.
//
// Each stream is a queue of works. Copies wait in it until the policy, or a wait, runs them; arithmetic runs when it is
// issued, after everything that its stream was given before. A work of several processes is tried until all of them have
// come to it; its stream stays there. One mutex guards everything here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#define STANDIN_API extern "C" __attribute__((visibility("default")))

namespace standin {

constexpr int kMaxDevices = 8;
constexpr size_t kGranule = size_t{1} << 21;  // of device memory, as the driver's
constexpr size_t kRange = size_t{1} << 40;    // addresses of a device: expandable segments reserve more than its memory
constexpr int kPoison = 0xFF;                 // NaN in every floating point format

// When queued copies run: at once, when a wait forces them, or at random moments between.
enum Policy { kEarly, kLate, kRandom };

// For each stream, the newest of its works that is known to be over.
class Clock {
 public:
  void merge(const Clock& other);
  void advance(int stream, int64_t work);
  bool knows(int stream, int64_t work) const {
    return stream < static_cast<int>(known_.size()) && known_[stream] >= work;
  }

 private:
  std::vector<int64_t> known_;
};

struct Stream {
  int index = 0;
  int device = 0;
  int priority = 0;
  Clock clock;               // what is over before the next work of the stream
  int64_t num_works = 0;     // works that the clocks count
  double free_s = 0;         // when all that it was given is over, see clock.cpp
  double worked_until_s = 0;  // when its last work with a price is over
  std::deque<std::function<bool()>> items;  // each is tried until it is over
  int64_t num_run = 0;
  int64_t num_issued() const { return num_run + static_cast<int64_t>(items.size()); }
};

struct Event {
  unsigned flags = 0;
  Stream* stream = nullptr;  // null until it is recorded
  int64_t place = 0;         // in the queue of the stream
  Clock clock;
  std::shared_ptr<double> at_ms;
  double at_s = 0;  // see clock.cpp
};

struct Device {
  char* base = nullptr;
  size_t capacity = 0;
  size_t used = 0;
  std::map<size_t, size_t> taken;  // offset to bytes of allocations
  Stream null_stream;
};

struct Pinned {
  size_t bytes;
  bool is_allocated;  // by cudaHostAlloc; else registered
};

// A recursive mutex whose holder can let other threads go on.
class Mutex {
 public:
  void lock() { mutex_.lock(), ++depth_; }
  void unlock() { --depth_, mutex_.unlock(); }
  void let_others_go_on();

 private:
  std::recursive_mutex mutex_;
  int depth_ = 0;  // how often its holder has it
};

struct Machine {
  Mutex mutex;
  int num_devices;
  Device devices[kMaxDevices];
  std::map<uintptr_t, Pinned> pinned;
  std::vector<Stream*> streams;
  std::map<const void*, std::string> kernels;
  std::map<std::string, int64_t> counts;
  Policy policy;
  std::mt19937_64 random;
  Clock host;  // one for all threads: a wait of one thread counts for all
  Machine();
};

Machine& machine();
using Lock = std::lock_guard<Mutex>;

size_t number_of(const char* variable, size_t otherwise);
int& current_device();
cudaError_t fail(cudaError_t error);  // remembers it for cudaGetLastError
void count(const char* what, int64_t num = 1);

// ---------------------------------------------------------------- places

Device& device(int index);          // reserves its addresses first
int device_of(const void* address);  // -1: no device's
bool is_pinned(const void* address);
Stream* stream_of(cudaStream_t stream);

// ---------------------------------------------------------------- queues

void enqueue(Stream* stream, std::function<void()> item);
void enqueue_until(Stream* stream, std::function<bool()> item);  // tried again until it returns true
bool run_until(Stream* stream, int64_t place);                   // as far as its works go now: whether it came to the place
void wait_until(Stream* stream, int64_t place);
void drain(Stream* stream);
void drain_all();

// ---------------------------------------------------------------- order of accesses

int64_t begin_work(Stream* stream);  // after all that the host knows to be over
void access(Stream* stream, int64_t work, const void* address, size_t bytes, bool is_write, const char* what);
void host_access(const void* address, size_t bytes, bool is_write, const char* what);
void host_knows(const Clock& clock);
void host_knows_all();
void forget(const void* address, size_t bytes);  // the memory goes: later accesses are to other memory

// ---------------------------------------------------------------- seconds: see clock.cpp

bool is_clocked();
bool is_past(double at_s);  // for the calling thread
double place_s(const Stream* stream);  // when a work without a price would be over that the stream is given now
void spend(Stream* stream, double seconds);
void copy_seconds(Stream* stream, bool to_device, size_t bytes);
void host_waits_until(double at_s);
void host_waits_for_all();

}  // namespace standin
