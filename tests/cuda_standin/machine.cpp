// Queues of works, and the order of accesses to memory by clocks: see machine.h.
#include "machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace standin {

size_t number_of(const char* variable, size_t otherwise) {
  const char* text = getenv(variable);
  return text && *text ? strtoull(text, nullptr, 0) : otherwise;
}

Machine::Machine() {
  num_devices = static_cast<int>(std::min<size_t>(kMaxDevices, number_of("CUDA_STANDIN_DEVICES", 2)));
  policy = static_cast<Policy>(number_of("CUDA_STANDIN_POLICY", kEarly));
  random.seed(number_of("CUDA_STANDIN_SEED", 0));
  for (int index = 0; index < kMaxDevices; ++index) {
    auto& null_stream = devices[index].null_stream;
    null_stream.index = null_stream.device = index;
    devices[index].capacity = number_of("CUDA_STANDIN_BYTES", size_t{8} << 30);
    streams.push_back(&null_stream);
  }
}

Machine& machine() {
  static auto* it = new Machine();  // never destroyed: torch frees memory while the process ends
  return *it;
}

int& current_device() {
  static thread_local int index = 0;
  return index;
}

namespace {
thread_local cudaError_t last_error = cudaSuccess;
}

cudaError_t fail(cudaError_t error) { return last_error = error; }

void count(const char* what, int64_t num) {
  Lock lock(machine().mutex);
  machine().counts[what] += num;
}

// ---------------------------------------------------------------- places

Device& device(int index) {
  auto& it = machine().devices[index];
  if (!it.base) {
    auto* base = mmap(nullptr, kRange, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
      perror("cuda stand-in: no addresses for a device");
      abort();
    }
    it.base = static_cast<char*>(base);
  }
  return it;
}

int device_of(const void* address) {
  auto* at = static_cast<const char*>(address);
  for (int index = 0; index < machine().num_devices; ++index) {
    auto* base = machine().devices[index].base;
    if (base && at >= base && at < base + kRange) return index;
  }
  return -1;
}

bool is_pinned(const void* address) {
  Lock lock(machine().mutex);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto next = machine().pinned.upper_bound(at);
  if (next == machine().pinned.begin()) return false;
  --next;
  return at < next->first + next->second.bytes;
}

Stream* stream_of(cudaStream_t stream) {
  // 0, 1 and 2 are names of the default stream of the current device.
  if (reinterpret_cast<uintptr_t>(stream) > 2) return reinterpret_cast<Stream*>(stream);
  return &device(current_device()).null_stream;
}

// ---------------------------------------------------------------- queues

void Mutex::let_others_go_on() {
  const int depth = depth_;
  for (int i = 0; i < depth; ++i) unlock();
  usleep(50);
  for (int i = 0; i < depth; ++i) lock();
}

bool run_until(Stream* stream, int64_t place) {
  Lock lock(machine().mutex);
  while (stream->num_run < place && !stream->items.empty()) {
    if (!stream->items.front()()) return false;
    stream->items.pop_front();
    stream->num_run += 1;
  }
  return stream->num_run >= place;
}

void wait_until(Stream* stream, int64_t place) {
  Lock lock(machine().mutex);
  while (!run_until(stream, place)) machine().mutex.let_others_go_on();
}

void drain(Stream* stream) {
  Lock lock(machine().mutex);
  wait_until(stream, stream->num_issued());
}

void drain_all() {
  Lock lock(machine().mutex);
  for (auto* stream : machine().streams) drain(stream);
}

void enqueue(Stream* stream, std::function<void()> item) {
  enqueue_until(stream, [item = std::move(item)] { return item(), true; });
}

void enqueue_until(Stream* stream, std::function<bool()> item) {
  auto& m = machine();
  Lock lock(m.mutex);
  stream->items.push_back(std::move(item));
  if (m.policy == kEarly) {
    run_until(stream, stream->num_issued());
  } else if (m.policy == kRandom) {
    for (auto* other : m.streams) {
      auto pending = other->items.size();
      if (pending) run_until(other, other->num_run + static_cast<int64_t>(m.random() % (pending + 1)));
    }
  }
}

// ---------------------------------------------------------------- order of accesses

void Clock::merge(const Clock& other) {
  if (known_.size() < other.known_.size()) known_.resize(other.known_.size(), 0);
  for (size_t stream = 0; stream < other.known_.size(); ++stream)
    known_[stream] = std::max(known_[stream], other.known_[stream]);
}

void Clock::advance(int stream, int64_t work) {
  if (stream >= static_cast<int>(known_.size())) known_.resize(stream + 1, 0);
  known_[stream] = work;
}

namespace {

struct Access {
  int stream = -1;  // -1: none
  int64_t work = 0;
  const char* what = "";
};

// What happened last to the bytes from a key of `spans` to `end`. Its strings live as long as the process.
struct Span {
  uintptr_t end = 0;
  Access write;
  std::vector<Access> reads;  // one for each stream, since the write
};

std::map<uintptr_t, Span>& spans() {
  static auto* it = new std::map<uintptr_t, Span>();
  return *it;
}

// Let a span begin at `at`, if one holds it.
void split(uintptr_t at) {
  auto next = spans().upper_bound(at);
  if (next == spans().begin()) return;
  --next;
  if (next->first == at || next->second.end <= at) return;
  Span tail = next->second;
  next->second.end = at;
  spans()[at] = std::move(tail);
}

// Who accesses memory: a work of a stream, or the host.
struct Who {
  const Clock& knows;
  int stream;  // -1: the host
  const char* what;
};

void check(const Who& who, const Access& before, bool is_write, bool was_write, uintptr_t at, size_t bytes) {
  if (before.stream < 0 || before.stream == who.stream || who.knows.knows(before.stream, before.work)) return;
  auto& races = machine().counts["races"];
  constexpr int kMostShown = 20;
  if (++races > kMostShown) return;
  auto place = who.stream < 0 ? std::string("the host") : "stream " + std::to_string(who.stream);
  fprintf(stderr, "cuda stand-in: race: %s on %s %s %zu bytes at %p, which no wait puts after the %s by %s on stream %d\n",
          who.what, place.c_str(), is_write ? "writes" : "reads", bytes, reinterpret_cast<void*>(at),
          was_write ? "write" : "read", before.what, before.stream);
}

void check_all(const Who& who, const Span& span, bool is_write, uintptr_t at, size_t bytes) {
  check(who, span.write, is_write, true, at, bytes);
  if (is_write)
    for (auto& read : span.reads) check(who, read, true, false, at, bytes);
}

}  // namespace

int64_t begin_work(Stream* stream) {
  stream->clock.merge(machine().host);
  stream->clock.advance(stream->index, ++stream->num_works);
  return stream->num_works;
}

void access(Stream* stream, int64_t work, const void* address, size_t bytes, bool is_write, const char* what) {
  if (!bytes) return;
  Lock lock(machine().mutex);
  auto start = reinterpret_cast<uintptr_t>(address), end = start + bytes;
  split(start);
  split(end);
  Who who{stream->clock, stream->index, what};
  Access now{stream->index, work, what};
  auto first = spans().lower_bound(start), last = spans().lower_bound(end);
  for (auto it = first; it != last; ++it) check_all(who, it->second, is_write, start, bytes);
  if (is_write) {  // one span for all: what was before the write is behind it
    spans().erase(first, last);
    spans()[start] = {end, now, {}};
    return;
  }
  for (auto cursor = start; cursor < end;) {
    auto next = spans().lower_bound(cursor);
    if (next == spans().end() || next->first > cursor) {  // memory that nobody wrote
      auto until = next == spans().end() ? end : std::min(end, next->first);
      next = spans().emplace(cursor, Span{until, {}, {}}).first;
    }
    auto& reads = next->second.reads;
    auto mine = std::find_if(reads.begin(), reads.end(), [&](const Access& read) { return read.stream == now.stream; });
    if (mine == reads.end()) reads.push_back(now);
    else *mine = now;
    cursor = next->second.end;
  }
}

void host_access(const void* address, size_t bytes, bool is_write, const char* what) {
  if (!bytes) return;
  Lock lock(machine().mutex);
  auto start = reinterpret_cast<uintptr_t>(address), end = start + bytes;
  auto it = spans().upper_bound(start);
  if (it != spans().begin() && std::prev(it)->second.end > start) --it;
  for (; it != spans().end() && it->first < end; ++it)
    check_all({machine().host, -1, what}, it->second, is_write, start, bytes);
}

void forget(const void* address, size_t bytes) {
  auto start = reinterpret_cast<uintptr_t>(address), end = start + bytes;
  split(start);
  split(end);
  spans().erase(spans().lower_bound(start), spans().lower_bound(end));
}

void host_knows(const Clock& clock) { machine().host.merge(clock); }

void host_knows_all() {
  for (auto* stream : machine().streams) host_knows(stream->clock);
}

}  // namespace standin

using namespace standin;

STANDIN_API cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}
STANDIN_API cudaError_t cudaPeekAtLastError() { return last_error; }

// ---------------------------------------------------------------- for the arithmetic and for tests

// Run what the stream was given before, begin a work on it, and return the work.
STANDIN_API int64_t standin_begin(cudaStream_t stream) {
  Lock lock(machine().mutex);
  auto* it = stream_of(stream);
  drain(it);
  return begin_work(it);
}
STANDIN_API void standin_access(cudaStream_t stream, int64_t work, const void* address, size_t bytes, bool is_write, const char* what) {
  Lock lock(machine().mutex);
  access(stream_of(stream), work, address, bytes, is_write, what);
}
STANDIN_API void standin_host_access(const void* address, size_t bytes, bool is_write, const char* what) {
  if (is_pinned(address)) host_access(address, bytes, is_write, what);
}
// Poison memory in the order of the stream: the works before still find what was there.
STANDIN_API void standin_poison(cudaStream_t stream, void* address, size_t bytes, const char* what) {
  Lock lock(machine().mutex);
  auto* it = stream_of(stream);
  access(it, begin_work(it), address, bytes, true, what);
  enqueue(it, [=] { memset(address, kPoison, bytes); });
}
STANDIN_API void standin_set_policy(int policy, uint64_t seed) {
  Lock lock(machine().mutex);
  drain_all();
  machine().policy = static_cast<Policy>(policy);
  machine().random.seed(seed);
}
STANDIN_API void standin_set_capacity(int index, size_t bytes) {
  Lock lock(machine().mutex);
  machine().devices[index].capacity = bytes;
}
STANDIN_API size_t standin_capacity(int index) { return machine().devices[index].capacity; }
STANDIN_API int64_t standin_count(const char* what) {
  Lock lock(machine().mutex);
  auto found = machine().counts.find(what);
  return found == machine().counts.end() ? 0 : found->second;
}
STANDIN_API int64_t standin_num_pending() {
  Lock lock(machine().mutex);
  int64_t found = 0;
  for (auto* stream : machine().streams) found += static_cast<int64_t>(stream->items.size());
  return found;
}
