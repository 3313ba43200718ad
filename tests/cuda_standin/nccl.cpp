// NCCL between processes of one machine, for `torch.distributed`: ranks meet in a folder of shared memory, which the unique id names.
//
// Each operation is a work of its stream. When the stream comes to it, the rank writes what the others need to a file, and the
// work is over when the files of all ranks are there: at times later than NCCL's, never earlier. The stream stays where it is
// meanwhile, and a thread goes on with it, so no rank needs the host of another. Sums are made in the order of the ranks.
#include "machine.h"

// Of 16 bits are torch's own numbers: NVIDIA's, which nccl.h includes, need headers that its packages for running programs lack.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <nccl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <type_traits>

using namespace standin;
namespace fs = std::filesystem;

// A rank's end of a group. It is never deleted: queued works name it.
struct ncclComm {
  fs::path folder;
  int rank, num_ranks, device;
  int64_t num_issued = 0, num_over = 0;       // of operations of all ranks
  std::map<int, int64_t> num_sent, num_received;  // messages, by peer
  int num_splits = 0;
  std::map<int, double> factors;  // of sums whose terms are multiplied before
  bool is_aborted = false;
  ncclResult_t error = ncclSuccess;
};

namespace {

enum Kind { kAllGather, kAllReduce, kReduceScatter, kReduce, kBroadcast, kAllToAll, kSend, kReceive };
constexpr const char* kNames[] = {
    "ncclAllGather", "ncclAllReduce", "ncclReduceScatter", "ncclReduce", "ncclBroadcast", "ncclAlltoAll", "ncclSend", "ncclRecv"};

// What all ranks have to agree on, and the beginning of each file.
struct Subject {
  Kind kind;
  size_t count;
  ncclDataType_t type;
  int reduction;
  int root;
  bool operator==(const Subject&) const = default;
};

struct Operation {
  ncclComm* comm;
  Subject subject;
  const void* send;
  void* receive;
  cudaStream_t stream;
  int64_t number = 0;  // among those of all ranks, or among the messages to or from a peer
  bool is_written = false, is_over = false;
};

size_t bytes_of(ncclDataType_t type) {
  constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return kBytes[type];
}

// ---------------------------------------------------------------- files

void write_file(const fs::path& path, const Subject& subject, const void* data, size_t bytes) {
  auto made = path;
  made += ".made";
  std::ofstream file(made, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&subject), sizeof subject);
  file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  file.close();
  if (!file) {
    fprintf(stderr, "cuda stand-in: no room for %zu bytes in %s\n", bytes, path.c_str());
    abort();
  }
  fs::rename(made, path);
}

Subject subject_in(const fs::path& path) {
  Subject found{};
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&found), sizeof found);
  return found;
}

void read_file(const fs::path& path, size_t from, void* to, size_t bytes) {
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(sizeof(Subject) + from));
  file.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
}

fs::path file_of(const ncclComm* comm, int64_t number, int rank) {
  return comm->folder / (std::to_string(number) + "." + std::to_string(rank));
}

// ---------------------------------------------------------------- sums

template <class T>
using Math = std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float, T>;

// One more rank's elements, rounded to their type after each step as NCCL does.
template <class T>
void add(T* into, const T* more, size_t count, int reduction) {
  using M = Math<T>;
  for (size_t i = 0; i < count; ++i) {
    auto a = static_cast<M>(into[i]), b = static_cast<M>(more[i]);
    M found = reduction == ncclProd ? a * b : reduction == ncclMax ? std::max(a, b) : reduction == ncclMin ? std::min(a, b) : a + b;
    into[i] = static_cast<T>(found);
  }
}

template <class T>
void reduce(const Operation& op, size_t from) {
  const auto& [kind, count, type, reduction, root] = op.subject;
  constexpr bool kIsWhole = std::is_integral_v<T>;
  const int n = op.comm->num_ranks;
  const bool is_mean = reduction == ncclAvg, has_factor = reduction >= ncclNumOps || (is_mean && !kIsWhole);
  const auto factor = static_cast<Math<T>>(is_mean ? 1.0 / n : has_factor ? op.comm->factors[reduction] : 1.0);
  std::vector<T> sum(count), term(count);
  for (int rank = 0; rank < n; ++rank) {
    auto& into = rank ? term : sum;
    read_file(file_of(op.comm, op.number, rank), from * sizeof(T), into.data(), count * sizeof(T));
    if (has_factor)
      for (auto& each : into) each = static_cast<T>(static_cast<Math<T>>(each) * factor);
    if (rank) add(sum.data(), term.data(), count, reduction);
  }
  if (is_mean && kIsWhole)
    for (auto& each : sum) each = static_cast<T>(static_cast<Math<T>>(each) / static_cast<Math<T>>(n));
  memcpy(op.receive, sum.data(), count * sizeof(T));
}

bool reduce_any(const Operation& op, size_t from) {
  switch (op.subject.type) {
    case ncclInt8: return reduce<int8_t>(op, from), true;
    case ncclUint8: return reduce<uint8_t>(op, from), true;
    case ncclInt32: return reduce<int32_t>(op, from), true;
    case ncclUint32: return reduce<uint32_t>(op, from), true;
    case ncclInt64: return reduce<int64_t>(op, from), true;
    case ncclUint64: return reduce<uint64_t>(op, from), true;
    case ncclFloat16: return reduce<c10::Half>(op, from), true;
    case ncclFloat32: return reduce<float>(op, from), true;
    case ncclFloat64: return reduce<double>(op, from), true;
    case ncclBfloat16: return reduce<c10::BFloat16>(op, from), true;
    default: return false;
  }
}

// ---------------------------------------------------------------- operations

size_t elements_sent(const Operation& op) {
  const auto& subject = op.subject;
  switch (subject.kind) {
    case kReduceScatter: case kAllToAll: return subject.count * op.comm->num_ranks;
    case kBroadcast: return op.comm->rank == subject.root ? subject.count : 0;
    case kReceive: return 0;
    default: return subject.count;
  }
}

size_t elements_received(const Operation& op) {
  const auto& subject = op.subject;
  switch (subject.kind) {
    case kAllGather: case kAllToAll: return subject.count * op.comm->num_ranks;
    case kReduce: return op.comm->rank == subject.root ? subject.count : 0;
    case kSend: return 0;
    default: return subject.count;
  }
}

// Of any group: torch asks for the last error of none.
std::string& last_why() {
  static auto* it = new std::string();
  return *it;
}

bool mismatch(Operation& op, const std::string& why) {
  fprintf(stderr, "cuda stand-in: %s of rank %d: %s\n", kNames[op.subject.kind], op.comm->rank, why.c_str());
  op.comm->error = ncclInvalidUsage;
  last_why() = why;
  return true;
}

// What the rank has of the files of all. True: it is over.
bool finish(Operation& op) {
  auto* comm = op.comm;
  const auto& subject = op.subject;
  const size_t bytes = subject.count * bytes_of(subject.type);
  for (int rank = 0; rank < comm->num_ranks; ++rank) {
    auto theirs = subject_in(file_of(comm, op.number, rank));
    if (theirs == subject) continue;
    return mismatch(op, "rank " + std::to_string(rank) + " calls " + kNames[theirs.kind] + " of " + std::to_string(theirs.count) +
        " elements meanwhile, this rank has " + std::to_string(subject.count) + ", or another type, sum or root");
  }
  auto take = [&](int rank, size_t from, size_t to) {
    read_file(file_of(comm, op.number, rank), from, static_cast<char*>(op.receive) + to, bytes);
  };
  switch (subject.kind) {
    case kAllGather:
      for (int rank = 0; rank < comm->num_ranks; ++rank) take(rank, 0, rank * bytes);
      return true;
    case kAllToAll:
      for (int rank = 0; rank < comm->num_ranks; ++rank) take(rank, comm->rank * bytes, rank * bytes);
      return true;
    case kBroadcast: return take(subject.root, 0, 0), true;
    case kReduce:
      if (comm->rank != subject.root) return true;
      [[fallthrough]];
    default:
      return reduce_any(op, subject.kind == kReduceScatter ? comm->rank * subject.count : 0) || mismatch(op, "no sum of this type");
  }
}

// An operation of all ranks, as far as it goes now.
bool go_on_together(Operation& op) {
  auto* comm = op.comm;
  if (comm->num_over < op.number) return false;
  if (!op.is_written) write_file(file_of(comm, op.number, comm->rank), op.subject, op.send, elements_sent(op) * bytes_of(op.subject.type));
  op.is_written = true;
  for (int rank = 0; rank < comm->num_ranks; ++rank)
    if (!fs::exists(file_of(comm, op.number, rank))) return false;
  finish(op);
  comm->num_over += 1;
  // All have begun this operation, so nobody reads the files of the one before.
  std::error_code gone;
  fs::remove(file_of(comm, op.number - 1, comm->rank), gone);
  return true;
}

// A message is over when its receiver has it.
bool go_on_between_two(Operation& op) {
  auto* comm = op.comm;
  const auto& subject = op.subject;
  bool is_send = subject.kind == kSend;
  int from = is_send ? comm->rank : subject.root, to = is_send ? subject.root : comm->rank;
  auto path = comm->folder / ("message." + std::to_string(from) + "." + std::to_string(to) + "." + std::to_string(op.number));
  const size_t bytes = subject.count * bytes_of(subject.type);
  if (is_send) {
    if (!op.is_written) write_file(path, subject, op.send, bytes);
    op.is_written = true;
    return !fs::exists(path);
  }
  if (!fs::exists(path)) return false;
  auto theirs = subject_in(path);
  if (theirs.count != subject.count || theirs.type != subject.type)
    return mismatch(op, "rank " + std::to_string(from) + " sends " + std::to_string(theirs.count) + " elements, " + std::to_string(subject.count) + " are expected");
  read_file(path, 0, op.receive, bytes);
  return fs::remove(path), true;
}

bool go_on(Operation& op) {
  if (!op.is_over) op.is_over = op.comm->is_aborted || (op.subject.kind < kSend ? go_on_together(op) : go_on_between_two(op));
  return op.is_over;
}

// ---------------------------------------------------------------- queues

// Where an operation is in the queue of its stream.
struct Place {
  ncclComm* comm;
  Stream* stream;
  int64_t place;
};
std::vector<Place>& places() {
  static auto* it = new std::vector<Place>();
  return *it;
}

// A GPU needs no host to go on: peers wait for the operations of this process though it waits for nothing.
void go_on_forever() {
  for (;;) {
    usleep(2000);
    Lock lock(machine().mutex);
    for (auto& [comm, stream, place] : places()) run_until(stream, place);
    std::erase_if(places(), [](auto& it) { return it.stream->num_run >= it.place; });
  }
}

// Operations that were issued together: all go on until all are over.
void launch(std::vector<Operation> operations) {
  Lock lock(machine().mutex);
  std::map<Stream*, std::shared_ptr<std::vector<Operation>>> by_stream;
  for (auto& op : operations) {
    auto* stream = stream_of(op.stream);
    auto& subject = op.subject;
    op.number = subject.kind < kSend ? op.comm->num_issued++ : (subject.kind == kSend ? op.comm->num_sent : op.comm->num_received)[subject.root]++;
    auto work = begin_work(stream);
    const char* name = kNames[subject.kind];
    count(name);
    access(stream, work, op.send, elements_sent(op) * bytes_of(subject.type), false, name);
    access(stream, work, op.receive, elements_received(op) * bytes_of(subject.type), true, name);
    auto& together = by_stream[stream];
    if (!together) together = std::make_shared<std::vector<Operation>>();
    together->push_back(op);
    places().push_back({op.comm, stream, stream->num_issued() + 1});
  }
  for (auto& [stream, together] : by_stream)
    enqueue_until(stream, [together] {
      return std::count_if(together->begin(), together->end(), go_on) == static_cast<int64_t>(together->size());
    });
}

struct Group {
  int depth = 0;
  std::vector<Operation> operations;
};
thread_local Group group;

ncclResult_t issue(ncclComm* comm, Subject subject, const void* send, void* receive, cudaStream_t stream) {
  if (!comm || subject.type >= ncclNumTypes) return ncclInvalidArgument;
  Operation op{comm, subject, send, receive, stream};
  if (group.depth) group.operations.push_back(op);
  else launch({op});
  return comm->error;
}

// ---------------------------------------------------------------- groups of ranks

const fs::path kBase = "/dev/shm/cuda-standin-nccl";

// Remove what processes have left that ended without leaving their group.
void sweep() {
  std::error_code error;
  for (auto& group : fs::directory_iterator(kBase, error)) {
    int num_ranks = 0, num_alive = 0;
    for (auto& file : fs::directory_iterator(group, error)) {
      if (!file.path().filename().string().starts_with("rank.")) continue;
      num_ranks += 1;
      num_alive += kill(static_cast<pid_t>(subject_in(file).count), 0) == 0;
    }
    if (num_ranks && !num_alive) fs::remove_all(group, error);
  }
}

// Wait until each rank has written the file `name.RANK`; false if that takes as long as a rank that never comes.
bool meet(const fs::path& folder, const std::string& name, int num_ranks) {
  auto until = std::chrono::steady_clock::now() + std::chrono::minutes(5);
  for (int rank = 0; rank < num_ranks;) {
    if (fs::exists(folder / (name + "." + std::to_string(rank)))) ++rank;
    else if (std::chrono::steady_clock::now() > until) return false;
    else usleep(200);
  }
  return true;
}

ncclResult_t join(ncclComm_t* out, const fs::path& folder, int num_ranks, int rank) {
  static std::once_flag once;
  std::call_once(once, [] { std::thread(go_on_forever).detach(); });
  fs::create_directories(folder);
  write_file(folder / ("rank." + std::to_string(rank)), {kAllGather, static_cast<size_t>(getpid())}, nullptr, 0);
  if (!meet(folder, "rank", num_ranks)) return ncclSystemError;
  *out = new ncclComm{folder, rank, num_ranks, current_device()};
  return ncclSuccess;
}

// The last rank that leaves takes the folder with it.
void leave(ncclComm* comm) {
  std::error_code gone;
  if (!fs::exists(comm->folder)) return;
  write_file(comm->folder / ("left." + std::to_string(comm->rank)), {}, nullptr, 0);
  for (int rank = 0; rank < comm->num_ranks; ++rank)
    if (!fs::exists(comm->folder / ("left." + std::to_string(rank)))) return;
  fs::remove_all(comm->folder, gone);
}

}  // namespace

STANDIN_API ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
STANDIN_API const char* ncclGetErrorString(ncclResult_t error) {
  constexpr const char* kTexts[] = {"no error", "unhandled cuda error", "a rank never came", "internal error", "invalid argument",
                                    "ranks call different operations", "remote error", "in progress"};
  return error < ncclNumResults ? kTexts[error] : "unknown error";
}
STANDIN_API const char* ncclGetLastError(ncclComm_t) { return last_why().c_str(); }
STANDIN_API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  sweep();
  auto now = std::chrono::system_clock::now().time_since_epoch().count();
  *id = {};
  snprintf(id->internal, sizeof id->internal, "%d-%lld", getpid(), static_cast<long long>(now));
  return ncclSuccess;
}
STANDIN_API ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return join(comm, kBase / id.internal, num_ranks, rank);
}
STANDIN_API ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank) {
  return join(comm, kBase / id.internal, num_ranks, rank);
}
STANDIN_API ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int num_ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return join(comm, kBase / ids[0].internal, num_ranks, rank);
}
// Ranks of one color are a new group, in the order of their keys.
STANDIN_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  auto name = "split" + std::to_string(comm->num_splits++);
  write_file(comm->folder / (name + "." + std::to_string(comm->rank)), {kAllGather, 0, ncclInt8, color, key}, nullptr, 0);
  if (!meet(comm->folder, name, comm->num_ranks)) return ncclSystemError;
  std::vector<std::pair<int, int>> members;
  for (int rank = 0; rank < comm->num_ranks; ++rank) {
    auto theirs = subject_in(comm->folder / (name + "." + std::to_string(rank)));
    if (theirs.reduction == color) members.emplace_back(theirs.root, rank);
  }
  *out = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::sort(members.begin(), members.end());
  auto mine = std::find(members.begin(), members.end(), std::pair{key, comm->rank}) - members.begin();
  auto folder = comm->folder;
  folder += "." + name + "." + std::to_string(color);
  return join(out, folder, static_cast<int>(members.size()), static_cast<int>(mine));
}
STANDIN_API ncclResult_t ncclCommAbort(ncclComm_t comm) {
  Lock lock(machine().mutex);
  comm->is_aborted = true;
  return leave(comm), ncclSuccess;
}
// After what was issued is over.
STANDIN_API ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  Lock lock(machine().mutex);
  auto issued = places();
  for (auto& [theirs, stream, place] : issued)
    if (theirs == comm) wait_until(stream, place);
  return ncclSuccess;
}
STANDIN_API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ncclCommFinalize(comm);
  return leave(comm), ncclSuccess;
}
STANDIN_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) { return *error = comm->error, ncclSuccess; }
STANDIN_API ncclResult_t ncclCommCount(const ncclComm_t comm, int* num) { return *num = comm->num_ranks, ncclSuccess; }
STANDIN_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) { return *device = comm->device, ncclSuccess; }
STANDIN_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }

STANDIN_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* out, void* scalar, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t comm) {
  double factor = type == ncclFloat64 ? *static_cast<double*>(scalar)
      : type == ncclFloat32 ? *static_cast<float*>(scalar)
      : type == ncclFloat16 ? static_cast<float>(*static_cast<c10::Half*>(scalar))
                            : static_cast<float>(*static_cast<c10::BFloat16*>(scalar));
  int number = ncclNumOps + static_cast<int>(comm->factors.size());
  comm->factors[number] = factor;
  return *out = static_cast<ncclRedOp_t>(number), ncclSuccess;
}
// Works that are queued may still need the factor.
STANDIN_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

STANDIN_API ncclResult_t ncclGroupStart() { return ++group.depth, ncclSuccess; }
STANDIN_API ncclResult_t ncclGroupEnd() {
  if (--group.depth == 0 && !group.operations.empty()) launch(std::exchange(group.operations, {}));
  return ncclSuccess;
}

STANDIN_API ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {kAllGather, count, type, 0, 0}, send, receive, stream);
}
STANDIN_API ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {kAllReduce, count, type, op, 0}, send, receive, stream);
}
STANDIN_API ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {kReduceScatter, count, type, op, 0}, send, receive, stream);
}
STANDIN_API ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {kReduce, count, type, op, root}, send, receive, stream);
}
STANDIN_API ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {kBroadcast, count, type, 0, root}, send, receive, stream);
}
STANDIN_API ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
STANDIN_API ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {kAllToAll, count, type, 0, 0}, send, receive, stream);
}
STANDIN_API ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {kSend, count, type, 0, peer}, send, nullptr, stream);
}
STANDIN_API ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return issue(comm, {kReceive, count, type, 0, peer}, nullptr, receive, stream);
}
