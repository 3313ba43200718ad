// Seconds, none of them of a wall clock: each stream and each thread of time of the host has a time of its own.
//
// A work begins when its stream is through with all before it, and not before the host issues it; it takes its price.
// An event has the time of its place. A stream that waits for it goes on at this time or later, and so does the host.
// What the host does takes no time but what it says itself. Until a test starts the clock nothing takes time, and every
// event is past.
//
// All threads of a process are one thread of time, but for those that call themselves another one.
#include "machine.h"

#include <algorithm>

using namespace standin;

namespace {

constexpr int kMostThreads = 8;

struct Link {
  double latency_s = 0, s_per_byte = 0;
};

struct Times {
  bool is_used = false;
  double now_s[kMostThreads] = {};
  Link to_device, to_host;
};

Times& times() {
  static auto* it = new Times();
  return *it;
}

int& own_thread() {
  static thread_local int index = 0;
  return index;
}

}  // namespace

namespace standin {

bool is_clocked() { return times().is_used; }
bool is_past(double at_s) { return !times().is_used || at_s <= times().now_s[own_thread()]; }
double place_s(const Stream* stream) { return std::max(stream->free_s, times().now_s[own_thread()]); }

void spend(Stream* stream, double seconds) {
  if (times().is_used) stream->free_s = stream->worked_until_s = place_s(stream) + seconds;
}

void copy_seconds(Stream* stream, bool to_device, size_t bytes) {
  auto& link = to_device ? times().to_device : times().to_host;
  spend(stream, link.latency_s + link.s_per_byte * static_cast<double>(bytes));
}

void host_waits_until(double at_s) {
  auto& now = times().now_s[own_thread()];
  now = std::max(now, at_s);
}

void host_waits_for_all() {
  for (auto* stream : machine().streams) host_waits_until(stream->free_s);
}

}  // namespace standin

// Let time go on from where it stood, with these links between host and device.
STANDIN_API void standin_start_clock(double h2d_latency_s, double h2d_s_per_byte, double d2h_latency_s, double d2h_s_per_byte) {
  Lock lock(machine().mutex);
  drain_all();
  times().is_used = true;
  times().to_device = {h2d_latency_s, h2d_s_per_byte};
  times().to_host = {d2h_latency_s, d2h_s_per_byte};
}
// Let all be past, and time stand.
STANDIN_API void standin_stop_clock() {
  Lock lock(machine().mutex);
  host_waits_for_all();
  for (auto now : times().now_s) host_waits_until(now);
  for (auto& now : times().now_s) now = times().now_s[own_thread()];
  times().is_used = false;
}
STANDIN_API void standin_be_thread(int index) { own_thread() = index; }
STANDIN_API double standin_now_s(int index) {
  Lock lock(machine().mutex);
  return times().now_s[index];
}
STANDIN_API void standin_wait_until(double at_s) {
  Lock lock(machine().mutex);
  host_waits_until(at_s);
}
STANDIN_API void standin_spend(cudaStream_t stream, double seconds) {
  Lock lock(machine().mutex);
  spend(stream_of(stream), seconds);
}
// When the next work of the stream could begin; when the host could issue it; when its last work with a price was over.
STANDIN_API void standin_moments(cudaStream_t stream, double* free_s, double* now, double* worked_until_s) {
  Lock lock(machine().mutex);
  auto* it = stream_of(stream);
  *free_s = it->free_s;
  *now = times().now_s[own_thread()];
  *worked_until_s = it->worked_until_s;
}
