#include "graph.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "autograd.hpp"
#include "function.hpp"
#include "torch_kernels.hpp"

namespace flashjit::python {
namespace {

// An owned text of PyTorch.
class TorchText {
 public:
  explicit TorchText(LibTorch::Value owned) : handle_(reinterpret_cast<void*>(owned)) {}
  TorchText(const TorchText&) = delete;
  ~TorchText() { libtorch()->torch_delete_string(handle_); }
  std::string_view view() const {
    const char* data = "";
    std::size_t length = 0;
    libtorch()->torch_string_c_str(handle_, &data);
    libtorch()->torch_string_length(handle_, &length);
    return {data, length};
  }

 private:
  void* const handle_;
};

// The numbers of a call: a list of integers, then one of reals.
struct Numbers {
  LibTorch::Value all[most_numbers];
  std::size_t integers = 0, count = 0;
  void add(LibTorch::Value owned_list) {
    const LibTorch& t = *libtorch();
    void* const list = reinterpret_cast<void*>(owned_list);
    std::size_t size = 0;
    t.torch_list_size(list, &size);
    const bool fits = count + size <= most_numbers;
    for (std::size_t i = 0; fits && i < size; ++i) t.torch_list_get_item(list, i, &all[count++]);
    t.torch_delete_list(list);
    if (!fits) throw std::runtime_error("flashjit.attention has too many numbers for a compiled graph");
  }
};

// Calls of a kind have this in common if their tensors are of the same dtypes, head_dims and device.
struct Plan {
  bool is_backward = false;
  std::string text;  // of the kind
  std::int32_t of_tensors[2 + 4 + 2] = {};
  std::size_t integers = 0, count = 0;  // of numbers
  Ref engine_object, spec_object;
  TorchLaunch launch;
  flashjit_dtype o_dtype = FLASHJIT_FP32;
  bool has_lse = false;
  std::vector<ArgumentInfo> infos;  // of the numbers
};
// They live as long as the process, as kinds do.
std::mutex plans_mutex;
std::vector<std::unique_ptr<const Plan>> plans;

// Throws the pending exception as PyTorch's kernels throw theirs.
[[noreturn]] void throw_pending() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  const Ref owned[] = {Ref(type), Ref(value), Ref(trace)};
  const Ref text(value ? PyObject_Str(value) : nullptr);
  const char* const said = text ? text_of(text.get()) : nullptr;
  PyErr_Clear();
  throw std::runtime_error(std::string("flashjit: ") + (said ? said : "no kernel for this call"));
}

struct WithGil {
  const PyGILState_STATE state = PyGILState_Ensure();
  ~WithGil() { PyGILState_Release(state); }
};

std::unique_ptr<Plan> make_plan(std::unique_ptr<Plan> plan, const flashjit_tensor& q,
                                const flashjit_tensor& k, const flashjit_tensor& v, flashjit_dtype o_dtype) {
  const WithGil gil;
  const Ref text(PyUnicode_FromStringAndSize(plan->text.data(), static_cast<Py_ssize_t>(plan->text.size())));
  const Ref kind(text ? kind_of_text(text.get()) : Ref());
  const Ref function(kind ? PyObject_GetAttrString(kind.get(), plan->is_backward ? "backward" : "forward")
                          : nullptr),
      lse(kind ? PyObject_GetAttrString(kind.get(), "lse") : nullptr);
  if (!function || !lse) throw_pending();
  plan->has_lse = lse.get() == Py_True;
  const auto given_of = [](const flashjit_tensor& tensor) { return static_cast<Given>(tensor.dtype); };
  std::vector<Given> given = {given_of(q), given_of(k), given_of(v)};
  for (std::size_t i = 0; i < plan->count; ++i)
    given.push_back(i < plan->integers ? given_integer : given_real);
  if (plan->is_backward)
    for (const Given one : {static_cast<Given>(o_dtype), static_cast<Given>(FLASHJIT_FP32), given_of(q),
                            not_given, given_of(q), given_of(k), given_of(v)})
      given.push_back(one);
  Planned planned;
  if (!plan_function(function.get(), given, q, v, planned)) throw_pending();
  plan->engine_object = std::move(planned.engine_object);
  plan->spec_object = std::move(planned.spec_object);
  plan->launch = {planned.engine, planned.spec};
  plan->o_dtype = planned.o_dtype;
  const auto first = planned.infos.begin() + tensors_of_call;
  plan->infos.assign(first, first + static_cast<std::ptrdiff_t>(plan->count));
  return plan;
}

const Plan& plan_of(bool is_backward, std::string_view text, const Numbers& numbers, const flashjit_tensor& q,
                    const flashjit_tensor& k, const flashjit_tensor& v, flashjit_dtype o_dtype) {
  for (const flashjit_tensor* const one : {&q, &k, &v})
    if (one->rank != 4 || one->device_kind != q.device_kind || one->device_index != q.device_index)
      throw std::runtime_error(
          "flashjit: q, k and v are not on one device, or not [batch, seqlen, heads, head_dim], which would "
          "work");
  const auto small = [](std::int64_t size) {
    return static_cast<std::int32_t>(std::min<std::int64_t>(size, 1 << 30));
  };
  const std::int32_t of_tensors[] = {q.device_kind, q.device_index, q.dtype,           k.dtype,
                                     v.dtype,       o_dtype,        small(q.shape[3]), small(v.shape[3])};
  const auto find = [&]() -> const Plan* {
    for (const auto& one : plans)
      if (one->is_backward == is_backward && one->integers == numbers.integers &&
          one->count == numbers.count &&
          std::equal(std::begin(of_tensors), std::end(of_tensors), one->of_tensors) && one->text == text)
        return one.get();
    return nullptr;
  };
  {
    const std::lock_guard lock(plans_mutex);
    if (const Plan* const found = find()) return *found;
  }
  auto plan = std::make_unique<Plan>();
  plan->is_backward = is_backward;
  plan->text = text;
  std::copy(std::begin(of_tensors), std::end(of_tensors), plan->of_tensors);
  plan->integers = numbers.integers;
  plan->count = numbers.count;
  plan = make_plan(std::move(plan), q, k, v, o_dtype);  // takes the GIL, so not under the lock
  const std::lock_guard lock(plans_mutex);
  if (const Plan* const found = find()) return *found;  // of another thread
  plans.push_back(std::move(plan));
  return *plans.back();
}

void add_numbers(const Plan& plan, const Numbers& numbers, TorchArguments& to) {
  for (std::size_t i = 0; i < numbers.count; ++i) {
    const ArgumentInfo& info = plan.infos[i];
    const bool is_integer = i < numbers.integers;
    flashjit_argument one;
    one.id = info.id;
    double real = 0;
    if (is_integer)
      real = static_cast<double>(static_cast<std::int64_t>(numbers.all[i]));
    else
      std::memcpy(&real, &numbers.all[i], sizeof real);
    if (info.kind == Kind::tensor || (info.kind == Kind::integer && !is_integer))
      throw std::runtime_error("flashjit.attention has a number in place of " +
                               std::string(info.kind == Kind::tensor ? "a tensor" : "an int"));
    if (info.kind == Kind::real)
      one.value.real = real;
    else
      one.value.integer = static_cast<std::int64_t>(numbers.all[i]);
    to.add(one);
  }
}

// qkv_forward(str kind, Tensor q, Tensor k, Tensor v, SymInt[] integers, float[] reals) -> (Tensor, Tensor)
void forward(LibTorch::Value* stack, std::uint64_t, std::uint64_t) {
  const TorchText text(stack[0]);
  const TorchTensor given[] = {TorchTensor(stack[1]), TorchTensor(stack[2]), TorchTensor(stack[3])};
  Numbers numbers;
  numbers.add(stack[4]);
  numbers.integers = numbers.count;
  numbers.add(stack[5]);
  flashjit_tensor q, k, v, o, lse;
  if (!given[0].read(q) || !given[1].read(k) || !given[2].read(v))
    throw std::runtime_error("flashjit.attention got a tensor that its kernels cannot read");
  const Plan& plan = plan_of(false, text.view(), numbers, q, k, v, FLASHJIT_FP32);
  TorchArguments arguments;
  arguments.add(FLASHJIT_ARG_Q, q);
  arguments.add(FLASHJIT_ARG_K, k);
  arguments.add(FLASHJIT_ARG_V, v);
  add_numbers(plan, numbers, arguments);
  const std::int64_t sizes[] = {q.shape[0], q.shape[1], q.shape[2], v.shape[3]},
                     rows[] = {q.shape[0], q.shape[2], q.shape[1]}, none[] = {0};
  TorchTensor made_o = make(q, plan.o_dtype, 4, sizes, o),
              made_lse =
                  plan.has_lse ? make(q, FLASHJIT_FP32, 3, rows, lse) : make(q, FLASHJIT_FP32, 1, none, lse);
  if (!made_o || !made_lse) fail(q, "an output");
  arguments.add(FLASHJIT_ARG_O, o);
  if (plan.has_lse) arguments.add(FLASHJIT_ARG_LSE, lse);
  launch(plan.launch, q, k, arguments);
  stack[0] = made_o.release();
  stack[1] = made_lse.release();
}

// qkv_backward(str kind, Tensor q, Tensor k, Tensor v, SymInt[] integers, float[] reals, Tensor o, Tensor
// lse, Tensor do) -> (Tensor, Tensor, Tensor)
void backward(LibTorch::Value* stack, std::uint64_t, std::uint64_t) {
  const TorchText text(stack[0]);
  const TorchTensor given[] = {TorchTensor(stack[1]), TorchTensor(stack[2]), TorchTensor(stack[3]),
                               TorchTensor(stack[6]), TorchTensor(stack[7]), TorchTensor(stack[8])};
  Numbers numbers;
  numbers.add(stack[4]);
  numbers.integers = numbers.count;
  numbers.add(stack[5]);
  flashjit_tensor q, k, v, o;
  TorchTensor gradients[tensors_of_call];
  TorchArguments arguments;
  bool done = false;
  if (given[of_q].read(q) && given[of_k].read(k) && given[of_v].read(v) && given[of_o].read(o)) {
    const Plan& plan = plan_of(true, text.view(), numbers, q, k, v, static_cast<flashjit_dtype>(o.dtype));
    add_numbers(plan, numbers, arguments);
    done = launch_backward(
        plan.launch, {&given[of_q], &given[of_k], &given[of_v], &given[of_o], &given[of_lse], &given[of_do]},
        arguments, gradients);
  }
  if (!done) throw std::runtime_error("flashjit.attention got a tensor that its kernels cannot read");
  for (std::size_t i = 0; i < tensors_of_call; ++i) stack[i] = gradients[i].release();
}

// register_graph_operators() -> whether PyTorch has all that the kernels need. The operators are defined.
PyObject* register_graph_operators(PyObject*, PyObject*) {
  const LibTorch* const t = libtorch();
  if (!t) Py_RETURN_FALSE;
  for (const char* const device : {"CPU", "CUDA"}) {
    if (std::strcmp(device, "CUDA") == 0 && !t->aoti_torch_get_current_cuda_stream) continue;
    void* library = nullptr;  // kernels stay as long as the library, which is never closed
    if (t->aoti_torch_library_init_impl("flashjit", device, __FILE__, __LINE__, &library) != 0 ||
        t->torch_library_impl(library, "qkv_forward", forward, LibTorch::version) != 0 ||
        t->torch_library_impl(library, "qkv_backward", backward, LibTorch::version) != 0)
      Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {{"register_graph_operators", register_graph_operators, METH_NOARGS, nullptr}, {}};

}  // namespace

int add_graph_operators(PyObject* module) {
  return PyModule_AddFunctions(module, methods);
}

}  // namespace flashjit::python
