#include "runtime/parallel/nccl.hpp"

#include <dlfcn.h>

#include <thread>
#include <type_traits>

#include "cache/environment.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/library_file.hpp"

namespace flashjit {
namespace {

// The part of NCCL's interface that we call, written from its documentation.
using ncclResult_t = int;
using ncclComm_t = void*;
constexpr int ncclUint8 = 1;
constexpr ncclResult_t ncclSuccess = 0, ncclInProgress = 7;  // in progress: communicators that do not block

#define FLASHJIT_NCCL_FUNCTIONS(X)                                                     \
  X(GetErrorString, const char*(ncclResult_t))                                         \
  X(CommCount, ncclResult_t(ncclComm_t, int*))                                         \
  X(CommUserRank, ncclResult_t(ncclComm_t, int*))                                      \
  X(CommCuDevice, ncclResult_t(ncclComm_t, int*))                                      \
  X(CommGetAsyncError, ncclResult_t(ncclComm_t, ncclResult_t*))                        \
  X(AllGather, ncclResult_t(const void*, void*, std::size_t, int, ncclComm_t, Stream)) \
  X(GroupStart, ncclResult_t())                                                        \
  X(GroupEnd, ncclResult_t())                                                          \
  X(Send, ncclResult_t(const void*, std::size_t, int, int, ncclComm_t, Stream))        \
  X(Recv, ncclResult_t(void*, std::size_t, int, int, ncclComm_t, Stream))

struct NcclApi {
#define FLASHJIT_MEMBER(name, ...) std::add_pointer_t<__VA_ARGS__> name = nullptr;
  FLASHJIT_NCCL_FUNCTIONS(FLASHJIT_MEMBER)
#undef FLASHJIT_MEMBER
};

[[noreturn]] void unavailable(const std::string& why) {
  throw Error(
      ErrorCode::target_unavailable,
      "NCCL: " + why + "; the library that made the communicator, named by FLASHJIT_NCCL, would work");
}

// A communicator belongs to the library that made it, which the process has.
void* open_nccl() {
  constexpr char library_name[] = "libnccl.so.2";
  std::string why;
  if (const std::string named = environment_variable(Variable::nccl); !named.empty()) {
    if (void* const library = open_library(named, &why)) return library;
    unavailable(why);
  }
  if (dlsym(RTLD_DEFAULT, "ncclCommCount")) return RTLD_DEFAULT;
  if (void* const library = dlopen(library_name, RTLD_NOW | RTLD_NOLOAD)) return library;
  if (void* const library = open_library(library_name, &why)) return library;
  unavailable(why);
}

const NcclApi& nccl() {
  static const NcclApi api = [] {
    void* const library = open_nccl();
    NcclApi made;
#define FLASHJIT_FIND(name, ...)                                                               \
  made.name = reinterpret_cast<std::add_pointer_t<__VA_ARGS__>>(dlsym(library, "nccl" #name)); \
  if (!made.name) unavailable("the library lacks nccl" #name);
    FLASHJIT_NCCL_FUNCTIONS(FLASHJIT_FIND)
#undef FLASHJIT_FIND
    return made;
  }();
  return api;
}

}  // namespace

NcclCommunicator::NcclCommunicator(void* comm) : comm_(comm) {
  if (!comm) refuse_argument("comm is null; an ncclComm_t would work");
  check(nccl().CommUserRank(comm_, &rank_), "ncclCommUserRank");
  check(nccl().CommCount(comm_, &size_), "ncclCommCount");
  check(nccl().CommCuDevice(comm_, &device_), "ncclCommCuDevice");
}

void NcclCommunicator::all_gather(const void* from, void* to, std::size_t bytes, Stream stream) const {
  const ncclResult_t result = nccl().AllGather(from, to, bytes, ncclUint8, comm_, stream);
  if (result != ncclInProgress) check(result, "ncclAllGather");
}

void NcclCommunicator::send_and_receive(int to, const std::vector<Message>& sends, int from,
                                        const std::vector<Message>& receives, Stream stream) const {
  ncclResult_t result = nccl().GroupStart();
  check(result, "ncclGroupStart");
  const auto add = [&](ncclResult_t added) {
    if (result == ncclSuccess && added != ncclInProgress) result = added;
  };
  for (const auto& [data, bytes] : sends) add(nccl().Send(data, bytes, ncclUint8, to, comm_, stream));
  for (const auto& [data, bytes] : receives) add(nccl().Recv(data, bytes, ncclUint8, from, comm_, stream));
  const ncclResult_t ended = nccl().GroupEnd();
  check(result, "ncclSend or ncclRecv");
  if (ended == ncclInProgress)
    wait_until([] { return true; }, patience);  // others' work on the stream comes after it
  else
    check(ended, "ncclGroupEnd");
}

bool NcclCommunicator::is_ready() const {
  ncclResult_t state = ncclSuccess;
  check(nccl().CommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
  if (state != ncclInProgress) check(state, "the communicator has failed, which its owner has to abort");
  return state != ncclInProgress;
}

void NcclCommunicator::require_alive() const {
  (void)is_ready();
}

void NcclCommunicator::wait_until(const std::function<bool()>& done, std::chrono::milliseconds most) const {
  const auto last = std::chrono::steady_clock::now() + most;
  while (!is_ready() || !done()) {
    if (std::chrono::steady_clock::now() > last)
      throw Error(ErrorCode::device_failed, "not all ranks of the communicator have come within " +
                                                std::to_string(most.count()) +
                                                " ms; its owner has to abort it");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void NcclCommunicator::check(int result, const char* what) const {
  if (result != ncclSuccess)
    throw Error(ErrorCode::device_failed, std::string(what) + ": " + nccl().GetErrorString(result));
}

}  // namespace flashjit
