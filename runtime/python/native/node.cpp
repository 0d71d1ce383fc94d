#include "node.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "errors.hpp"
#include "function.hpp"
#include "torch_kernels.hpp"

namespace flashjit::python {
namespace {

constexpr std::size_t most_plans = 4096, most_plans_of_kind = 64;

PyObject* not_implemented() {
  return Ref::borrowed(Py_NotImplemented).release();
}

// A backward has to know this beside its tensors. The node keeps the plan's number, so a plan lives as long
// as the process.
struct Plan {
  const void* spec_of_forward = nullptr;
  std::vector<flashjit_argument> given;  // the numbers of the call, as the forward takes them
  Ref kind, numbers;                     // what the operators of a graph take
  Ref engine_object, spec_object;
  TorchLaunch of_backward;
  std::vector<flashjit_argument> backward;  // the numbers as the backward takes them
  std::int64_t number = 0;

  bool is_of(const Launch& launch) const {
    return spec_of_forward == launch.spec && given.size() == launch.arguments.size() - tensors_of_call &&
           std::equal(given.begin(), given.end(), launch.arguments.data() + tensors_of_call,
                      [](const flashjit_argument& a, const flashjit_argument& b) {
                        return a.id == b.id && a.value.integer == b.value.integer;
                      });
  }
};
// Threads of autograd read it without the GIL.
std::atomic<const Plan*> plans[most_plans];
std::size_t count_of_plans;
std::unordered_map<PyObject*, std::vector<const Plan*>> plans_of_kind;  // kinds live as long as the process

// PyTorch's operator, or none before register_node().
PyObject* node_operator;

// The work of the forward's kernel, which is called by PyTorch in the thread that calls the operator.
struct Recording {
  const Launch& launch;
  const Plan& plan;
  bool done = false;
  flashjit_status status = FLASHJIT_OK;
  std::string message, detail;
};
thread_local Recording* recording;

// PyTorch's kernel of the forward: the tensors were read before.
void forward_kernel(LibTorch::Value* stack, std::uint64_t, std::uint64_t) {
  for (std::size_t i = 0; i < tensors_of_call; ++i) const TorchTensor owned(stack[i]);
  if (!recording)
    throw std::runtime_error(
        "aten::_scaled_dot_product_fused_attention_overrideable has kernels for flashjit.attention alone "
        "here");
  Recording& r = *recording;
  const Launch& launch = r.launch;
  const flashjit_tensor& q = *launch.arguments.data()[0].value.tensor;
  TorchArguments arguments;
  for (std::size_t i = 0; i < launch.arguments.size(); ++i) arguments.add(launch.arguments.data()[i]);
  flashjit_tensor o, lse, workspace;
  TorchTensor made_o = make(q, launch.o_dtype, launch.o_rank, launch.o_sizes, o);
  TorchTensor made_lse = make(q, FLASHJIT_FP32, launch.o_rank - 1, launch.lse_sizes, lse), made_workspace;
  if (!made_o || !made_lse) fail(q, "an output");
  if (r.plan.of_backward.heads_first) put_rows_first(o);
  arguments.add(FLASHJIT_ARG_O, o);
  arguments.add(FLASHJIT_ARG_LSE, lse);
  if (launch.workspace_bytes > 0) {
    const auto bytes = static_cast<std::int64_t>(launch.workspace_bytes);
    made_workspace = make(q, FLASHJIT_UINT8, 1, &bytes, workspace);
    if (!made_workspace) fail(q, "a workspace");
    arguments.add(FLASHJIT_ARG_WORKSPACE, workspace);
  }
  r.status = flashjit_kernel_launch(launch.kernel, arguments.all, arguments.count, launch.stream);
  if (r.status != FLASHJIT_OK) {
    r.message = flashjit_last_error_message();
    r.detail = flashjit_last_error_detail();
    fail_with_last();
  }
  r.done = true;
  stack[0] = made_o.release();
  stack[1] = made_lse.release();
  for (const int nothing : {2, 3, 6, 7, 8}) stack[nothing] = TorchTensor::undefined().release();
  stack[4] = static_cast<LibTorch::Value>(r.plan.number);
  stack[5] = 0;
}

enum Place { do_, q_, k_, v_, bias, mask, o_, lse_, cum_q, cum_k, max_q, max_k, p, causal, seed, offset };

// The backward by the operators of graphs: they have gradients that say why they have none, and see tensors
// without memory.
void backward_by_operators(const Plan& plan, TorchTensor (&tensors)[16], LibTorch::Value* stack) {
  LibTorch::Value values[] = {static_cast<LibTorch::Value>(plan.number),
                              tensors[q_].release(),
                              tensors[k_].release(),
                              tensors[v_].release(),
                              tensors[o_].release(),
                              tensors[lse_].release(),
                              tensors[do_].release()};
  if (libtorch()->torch_call_dispatcher("flashjit::attention_backward_of_node", "", values,
                                        LibTorch::version) != 0)
    throw std::runtime_error("flashjit::attention_backward_of_node failed");
  std::copy_n(values, 3, stack);
  stack[3] = TorchTensor::undefined().release();
}

// PyTorch's kernel of the backward.
void backward_kernel(LibTorch::Value* stack, std::uint64_t, std::uint64_t) {
  const LibTorch& t = *libtorch();
  TorchTensor given[16];
  for (const Place place : {do_, q_, k_, v_, bias, o_, lse_, cum_q, cum_k, seed, offset})
    given[place] = TorchTensor(stack[place]);
  t.torch_delete_list(reinterpret_cast<void*>(stack[mask]));
  const std::size_t number = stack[max_q];
  const Plan* const plan = number < most_plans ? plans[number].load(std::memory_order_acquire) : nullptr;
  if (!plan)
    throw std::runtime_error(
        "aten::_scaled_dot_product_fused_attention_overrideable_backward has kernels for flashjit.attention "
        "alone "
        "here");
  TorchTensor gradients[tensors_of_call];
  TorchArguments arguments;
  for (const flashjit_argument& one : plan->backward) arguments.add(one);
  if (t.aoti_torch_grad_mode_is_enabled() ||
      !launch_backward(plan->of_backward,
                       {&given[q_], &given[k_], &given[v_], &given[o_], &given[lse_], &given[do_]}, arguments,
                       gradients))
    return backward_by_operators(*plan, given, stack);
  for (std::size_t i = 0; i < tensors_of_call; ++i) stack[i] = gradients[i].release();
  stack[3] = TorchTensor::undefined().release();
}

// The plan of a call that comes for the first time; null with an exception, or without one if there is no
// room.
const Plan* make_plan(PyObject* kind, PyObject* const* values, const Launch& launch) {
  std::vector<const Plan*>& known = plans_of_kind[kind];
  if (count_of_plans == most_plans || known.size() == most_plans_of_kind ||
      launch.arguments.size() > tensors_of_call + most_numbers)
    return nullptr;
  const Ref backward(PyObject_GetAttrString(kind, "backward")),
      first(PyObject_GetAttrString(kind, "heads_first"));
  if (!backward || !first) return nullptr;
  auto plan = std::make_unique<Plan>();
  plan->spec_of_forward = launch.spec;
  plan->given.assign(launch.arguments.data() + tensors_of_call,
                     launch.arguments.data() + launch.arguments.size());
  plan->kind = Ref::borrowed(kind);
  plan->of_backward.heads_first = first.get() == Py_True;
  const std::size_t numbers = plan->given.size();
  plan->numbers = Ref(PyTuple_New(static_cast<Py_ssize_t>(numbers)));
  std::vector<Given> given;
  const auto dtype = [&](std::size_t i) { return Given(launch.arguments.data()[i].value.tensor->dtype); };
  for (std::size_t i = 0; i < tensors_of_call; ++i) given.push_back(dtype(i));
  for (std::size_t i = 0; i < numbers; ++i) {
    PyObject* const value = values[tensors_of_call + i];
    if (!plan->numbers ||
        PyTuple_SetItem(plan->numbers.get(), static_cast<Py_ssize_t>(i), Ref::borrowed(value).release()) != 0)
      return nullptr;
    given.push_back(given_number(value));
  }
  for (const Given one :
       {Given(launch.o_dtype), Given(FLASHJIT_FP32), dtype(0), not_given, dtype(0), dtype(1), dtype(2)})
    given.push_back(one);
  Planned planned;
  const flashjit_tensor &q = *launch.arguments.data()[0].value.tensor,
                        &v = *launch.arguments.data()[2].value.tensor;
  if (!plan_function(backward.get(), given, q, v, planned)) return nullptr;
  Arguments arguments;
  for (std::size_t i = tensors_of_call; i < tensors_of_call + numbers; ++i)
    if (!arguments.add(planned.infos[i], "of the backward", values[i])) return nullptr;
  plan->backward.assign(arguments.data(), arguments.data() + arguments.size());
  plan->of_backward.engine = planned.engine;
  plan->of_backward.spec = planned.spec;
  plan->engine_object = std::move(planned.engine_object);
  plan->spec_object = std::move(planned.spec_object);
  if (count_of_plans == most_plans) return nullptr;  // another thread came first, while Python ran
  plan->number = static_cast<std::int64_t>(count_of_plans);
  known.push_back(plan.get());
  plans[count_of_plans++].store(plan.get(), std::memory_order_release);
  return plan.release();
}

// register_node(operator) -> whether PyTorch has all that kernels of the node need. operator: PyTorch's
// function that calls the forward's operator.
PyObject* register_node(PyObject*, PyObject* op) {
  const LibTorch* const t = libtorch();
  if (!t) Py_RETURN_FALSE;
  if (!node_operator) {
    const auto impl = [&](const std::string& key, const std::string& name, LibTorch::Kernel kernel) {
      void* library = nullptr;  // kernels stay as long as the library, which is never closed
      return t->aoti_torch_library_init_impl("aten", key.c_str(), __FILE__, __LINE__, &library) == 0 &&
             t->torch_library_impl(library, name.c_str(), kernel, LibTorch::version) == 0;
    };
    const std::string forward = "_scaled_dot_product_fused_attention_overrideable",
                      of_backward = forward + "_backward";
    for (const std::string device : {"CPU", "CUDA"}) {
      if (device == "CUDA" && !t->aoti_torch_get_current_cuda_stream) continue;
      // Autograd's own kernel of the backward would refuse gradients of gradients without a reason.
      if (!impl(device, forward, forward_kernel) || !impl("Autograd" + device, of_backward, backward_kernel))
        Py_RETURN_FALSE;
    }
    node_operator = Ref::borrowed(op).release();
  }
  Py_RETURN_TRUE;
}

// call_of_node(number) -> (kind, numbers) of the call whose node keeps the number
PyObject* call_of_node(PyObject*, PyObject* number) {
  const std::size_t at = PyLong_AsSize_t(number);
  if (at == static_cast<std::size_t>(-1) && PyErr_Occurred()) return nullptr;
  const Plan* const plan = at < most_plans ? plans[at].load(std::memory_order_acquire) : nullptr;
  return plan ? PyTuple_Pack(2, plan->kind.get(), plan->numbers.get()) : refuse("no call has this node");
}

PyMethodDef methods[] = {
    {"register_node", register_node, METH_O, nullptr}, {"call_of_node", call_of_node, METH_O, nullptr}, {}};

}  // namespace

bool has_node(PyObject* kind) {
  if (!node_operator) return false;
  const Ref may(PyObject_GetAttrString(kind, "may_have_node"));
  if (!may) PyErr_Clear();
  return may.get() == Py_True;
}

PyObject* call_with_node(PyObject* kind, PyObject* forward, PyObject* const* values, std::size_t count,
                         const Tensor* const* read) {
  Launch launch;
  if (!plan_launch(forward, values, count, read, launch)) return nullptr;
  const Plan* plan = nullptr;
  for (const Plan* const one : plans_of_kind[kind])
    if (one->is_of(launch)) plan = one;
  if (!plan && !(plan = make_plan(kind, values, launch)))
    return PyErr_Occurred() ? nullptr : not_implemented();
  Recording mine{launch, *plan};
  Recording* const before = std::exchange(recording, &mine);
  const Ref made(PyObject_CallFunctionObjArgs(node_operator, values[0], values[1], values[2], nullptr));
  recording = before;
  if (mine.status != FLASHJIT_OK) {
    PyErr_Clear();
    return raise(mine.status, mine.message, mine.detail);
  }
  if (!mine.done) {  // no memory, or another kernel in place of ours: the function of autograd says more
    if (!made && !PyErr_ExceptionMatches(PyExc_RuntimeError)) return nullptr;
    PyErr_Clear();
    return not_implemented();
  }
  return made ? Ref::borrowed(PyTuple_GetItem(made.get(), 0)).release() : nullptr;
}

int add_node(PyObject* module) {
  return PyModule_AddFunctions(module, methods);
}

}  // namespace flashjit::python
