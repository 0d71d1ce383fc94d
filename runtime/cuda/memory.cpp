#include "runtime/cuda/memory.hpp"

#include <limits>
#include <string>

#include "codegen/base/error.hpp"

namespace flashjit::cuda {
namespace {

CUstream stream_of(Stream stream) {
  return static_cast<CUstream>(stream);
}
CUdeviceptr address_of(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

}  // namespace

void check_device_pointer(const void* pointer, int device_index, const char* argument) {
  unsigned type = 0, managed = 0;
  int ordinal = -1;
  CUdeviceptr on_device = 0;
  CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                                      CU_POINTER_ATTRIBUTE_DEVICE_POINTER};
  void* values[] = {&type, &managed, &ordinal, &on_device};
  check(driver().PointerGetAttributes(4, attributes, values, address_of(pointer)), "cuPointerGetAttributes");
  if (type == CU_MEMORYTYPE_DEVICE && (ordinal == device_index || managed)) return;
  if (managed || (type == CU_MEMORYTYPE_HOST && on_device == address_of(pointer))) return;

  std::string wrong;
  if (type == CU_MEMORYTYPE_DEVICE) {
    wrong = "is memory of cuda:" + std::to_string(ordinal);
  } else {
    CUdevice device = 0;
    int host_page_tables = 0;
    check(driver().DeviceGet(&device, device_index), "cuDeviceGet");
    check(driver().DeviceGetAttribute(
              &host_page_tables, CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES, device),
          "cuDeviceGetAttribute");
    if (host_page_tables) return;
    wrong = type == CU_MEMORYTYPE_HOST ? "is pinned host memory that is not mapped at this address"
                                       : "is host memory, which the device cannot reach";
  }
  throw Error(ErrorCode::invalid_argument,
              std::string(argument) + ": the pointer " + wrong +
                  "; this kernel needs memory of cuda:" + std::to_string(device_index));
}

std::size_t free_memory(const Context& context) {
  const ContextScope scope(context);
  std::size_t free = 0, total = 0;
  check(driver().MemGetInfo(&free, &total), "cuMemGetInfo");
  return free;
}

void synchronize(const Context& context) {
  const ContextScope scope(context);
  check(driver().CtxSynchronize(), "cuCtxSynchronize");
}

void copy_to_host(const Context& context, void* host, const void* device, std::size_t bytes) {
  const ContextScope scope(context);
  check(driver().MemcpyAsync(address_of(host), address_of(device), bytes, nullptr), "copy to the host");
  synchronize(context);
}

DeviceBuffer::DeviceBuffer(const Context& context, std::size_t bytes) : context_(&context), size_(bytes) {
  if (bytes == 0) return;
  const ContextScope scope(context);
  const CUresult result = driver().MemAlloc(&pointer_, bytes);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    throw Error(ErrorCode::device_failed, "cuda:" + std::to_string(context.index()) + ": " +
                                              std::to_string(bytes) + " bytes were asked for and " +
                                              std::to_string(free_memory(context)) +
                                              " are free; use smaller sizes");
  }
  check(result, "cuMemAlloc");
}

DeviceBuffer::~DeviceBuffer() {
  // A destructor reports no failure, such as a context that is gone with its memory.
  const DriverApi* const api = driver_of_this_process();
  if (pointer_ == 0 || !api || api->CtxPushCurrent(context_->handle()) != CUDA_SUCCESS) return;
  api->MemFree(pointer_);
  CUcontext popped;
  api->CtxPopCurrent(&popped);
}

void DeviceBuffer::copy_from(const void* host, std::size_t bytes, Stream stream) {
  const ContextScope scope(*context_);
  check(driver().MemcpyAsync(pointer_, address_of(host), bytes, stream_of(stream)), "copy to the device");
}

void DeviceBuffer::copy_to(void* host, std::size_t bytes, Stream stream) const {
  const ContextScope scope(*context_);
  check(driver().MemcpyAsync(address_of(host), pointer_, bytes, stream_of(stream)), "copy to the host");
}

void DeviceBuffer::copy_within(std::size_t bytes, Stream stream) {
  const ContextScope scope(*context_);
  check(driver().MemcpyAsync(pointer_ + bytes, pointer_, bytes, stream_of(stream)), "copy on the device");
}

void DeviceBuffer::fill(unsigned char byte, Stream stream) {
  if (size_ == 0) return;
  const ContextScope scope(*context_);
  check(driver().MemsetD8Async(pointer_, byte, size_, stream_of(stream)), "cuMemsetD8Async");
}

OwnedStream::OwnedStream(const Context& context, bool urgent) : context_(context) {
  constexpr int usual = 0, most_urgent = std::numeric_limits<int>::min();  // the driver takes its own limit
  const ContextScope scope(context);
  check(driver().StreamCreateWithPriority(&handle_, CU_STREAM_NON_BLOCKING, urgent ? most_urgent : usual),
        "cuStreamCreateWithPriority");
}

OwnedStream::~OwnedStream() {
  if (const DriverApi* const api = driver_of_this_process()) api->StreamDestroy(handle_);
}

void OwnedStream::synchronize() const {
  const ContextScope scope(context_);
  check(driver().StreamSynchronize(handle_), "cuStreamSynchronize");
}

bool OwnedStream::is_done() const {
  const ContextScope scope(context_);
  const CUresult result = driver().StreamQuery(handle_);
  if (result != CUDA_ERROR_NOT_READY) check(result, "cuStreamQuery");
  return result == CUDA_SUCCESS;
}

Event::Event(const Context& context) : context_(context) {
  const ContextScope scope(context);
  check(driver().EventCreate(&handle_, CU_EVENT_DEFAULT), "cuEventCreate");
}

Event::~Event() {
  if (const DriverApi* const api = driver_of_this_process()) api->EventDestroy(handle_);
}

void Event::hold(Stream stream) const {
  const ContextScope scope(context_);
  check(driver().StreamWaitEvent(stream_of(stream), handle_, 0), "cuStreamWaitEvent");
}

void Event::record(Stream stream) {
  const ContextScope scope(context_);
  check(driver().EventRecord(handle_, stream_of(stream)), "cuEventRecord");
}

void Event::synchronize() const {
  check(driver().EventSynchronize(handle_), "cuEventSynchronize");
}

float elapsed_ms(const Event& start, const Event& stop) {
  start.synchronize();
  stop.synchronize();
  float ms = 0;
  check(driver().EventElapsedTime(&ms, start.handle_, stop.handle_), "cuEventElapsedTime");
  return ms;
}

Graph::Graph(const Context& context, const std::function<void(Stream)>& body) : context_(context) {
  const OwnedStream stream(context);
  const ContextScope scope(context);
  CUgraph graph = nullptr;
  check(driver().StreamBeginCapture(stream_of(stream.get()), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
        "cuStreamBeginCapture");
  try {
    body(stream.get());
  } catch (...) {
    if (driver().StreamEndCapture(stream_of(stream.get()), &graph) == CUDA_SUCCESS)
      driver().GraphDestroy(graph);
    throw;
  }
  check(driver().StreamEndCapture(stream_of(stream.get()), &graph), "cuStreamEndCapture");
  const CUresult result = driver().GraphInstantiate(&handle_, graph, 0);
  driver().GraphDestroy(graph);
  check(result, "cuGraphInstantiate");
}

Graph::~Graph() {
  if (const DriverApi* const api = driver_of_this_process()) api->GraphExecDestroy(handle_);
}

void Graph::launch(Stream stream) const {
  const ContextScope scope(context_);
  check(driver().GraphLaunch(handle_, stream_of(stream)), "cuGraphLaunch");
}

}  // namespace flashjit::cuda
