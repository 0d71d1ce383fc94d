// Compiled to the object that the fuzzing of objects begins
// with. It has calls, constants, data and a table of addresses.
extern "C" float exp2f(float);
extern "C" void* memset(void*, int, unsigned long);

namespace {
int counter;
int answers[4] = {1, 2, 3, 4};
const float weights[4] = {0.5f, 0.25f, 0.125f, 1.0f};
int* const table[2] = {&counter, &answers[1]};
}  // namespace

int shared_counter;

extern "C" float kernel(float* data, int n) {
  memset(data, 0, 4);
  for (int i = 0; i < n; ++i) data[i] = exp2f(data[i]) * weights[i & 3];
  ++shared_counter;
  return static_cast<float>(++*table[n & 1]);
}
