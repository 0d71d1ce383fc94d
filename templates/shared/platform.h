// Types and functions for every compiler that reads templates/: NVRTC, nvcc, Clang in process, the host's
// compiler.
#pragma once

#if defined(__CUDACC__)
#define FLASHJIT_FN __device__ __forceinline__
#elif defined(__clang__)
#define FLASHJIT_FN inline __attribute__((always_inline))
#else
#define FLASHJIT_FN inline  // Clang alone compiles kernels for CPUs
#endif

namespace flashjit::device {

using i64 = long long;
using u32 = unsigned int;
using u64 = unsigned long long;

// Storage types of tensor elements. Kernels compute in types of their own.
struct bf16 {
  unsigned short bits;
};
struct fp16 {
  unsigned short bits;
};
using fp32 = float;

template <class T>
FLASHJIT_FN constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FLASHJIT_FN constexpr T max(T a, T b) {
  return a < b ? b : a;
}

// std::conditional
template <bool condition, class A, class B>
struct Choose {
  using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using type = B;
};
// The element type of an output. void in a Spec stands for the element type of the inputs.
template <class Given, class Element>
struct OutputElement {
  using type = Given;
};
template <class Element>
struct OutputElement<void, Element> {
  using type = Element;
};

// For a >= 0, b > 0.
FLASHJIT_FN constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}
FLASHJIT_FN constexpr int round_up(int a, int b) {
  return ceil_div(a, b) * b;
}

constexpr float ln_2 = 0.6931471805599453f;
constexpr float minus_infinity = __builtin_bit_cast(float, 0xff800000u);
constexpr float not_a_number = __builtin_bit_cast(float, 0x7fffffffu);

}  // namespace flashjit::device
