/* Trains: gradients of causal attention move q, k and v until its output is near a wanted one. */
#include <flashjit/flashjit.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SEQLEN = 128, HEADS = 4, HEAD_DIM = 32, SIZE = SEQLEN * HEADS * HEAD_DIM, STEPS = 100 };
enum { Q, K, V, O, DO, DQ, DK, DV, NUM_TENSORS };
static float data[NUM_TENSORS][SIZE], wanted[SIZE], lse[HEADS * SEQLEN];

static flashjit_status make_kernel(flashjit_engine* engine, const char* json, const flashjit_shape* shape,
                                   const flashjit_kernel** kernel) {
  flashjit_spec* spec = NULL;
  flashjit_status status = flashjit_spec_create(json, &spec);
  if (status == FLASHJIT_OK) status = flashjit_engine_get(engine, spec, shape, kernel);
  flashjit_spec_destroy(spec);
  return status;
}

int main(void) {
  flashjit_tensor tensors[NUM_TENSORS];
  for (int t = 0; t < NUM_TENSORS; ++t) {
    const flashjit_tensor tensor = {.data = data[t],
                                    .dtype = FLASHJIT_FP32,
                                    .device_kind = FLASHJIT_CPU,
                                    .rank = 4,
                                    .shape = {1, SEQLEN, HEADS, HEAD_DIM},
                                    .strides = {SIZE, HEADS * HEAD_DIM, HEAD_DIM, 1}};
    tensors[t] = tensor;
  }
  const flashjit_tensor rows = {.data = lse,
                                .dtype = FLASHJIT_FP32,
                                .device_kind = FLASHJIT_CPU,
                                .rank = 3,
                                .shape = {1, HEADS, SEQLEN},
                                .strides = {HEADS * SEQLEN, SEQLEN, 1}};
  for (int i = 0; i < SIZE; ++i) {
    for (int t = Q; t <= V; ++t) data[t][i] = sinf((float)((t + 1) * i));
    wanted[i] = sinf(5.0f * (float)i);
  }

  flashjit_engine* engine = NULL;
  const flashjit_kernel *forward = NULL, *backward = NULL;
  const flashjit_engine_options options = {.struct_size = sizeof options, .device = "cpu"};
  const flashjit_shape shape = {.struct_size = sizeof shape,
                                .batch = 1,
                                .seqlen_q = SEQLEN,
                                .seqlen_k = SEQLEN,
                                .num_heads_q = HEADS,
                                .num_heads_kv = HEADS};
  size_t bytes = 0;
  flashjit_status status = flashjit_engine_create(&options, &engine);
  if (status == FLASHJIT_OK)
    status = make_kernel(
        engine, "{\"op\": \"forward\", \"dtype\": \"fp32\", \"head_dim\": 32, \"mask\": [\"causal\"]}",
        &shape, &forward);
  if (status == FLASHJIT_OK)
    status = make_kernel(
        engine, "{\"op\": \"backward\", \"dtype\": \"fp32\", \"head_dim\": 32, \"mask\": [\"causal\"]}",
        &shape, &backward);
  if (status == FLASHJIT_OK) status = flashjit_kernel_workspace(backward, &shape, &bytes);
  bytes = (bytes + 64) / 64 * 64;
  const flashjit_tensor workspace = {.data = aligned_alloc(64, bytes),
                                     .dtype = FLASHJIT_FP32,
                                     .device_kind = FLASHJIT_CPU,
                                     .rank = 1,
                                     .shape = {(int64_t)(bytes / 4)},
                                     .strides = {1}};
  /* The forward takes the first five. */
  const flashjit_argument args[] = {
      {FLASHJIT_ARG_Q, {.tensor = &tensors[Q]}},   {FLASHJIT_ARG_K, {.tensor = &tensors[K]}},
      {FLASHJIT_ARG_V, {.tensor = &tensors[V]}},   {FLASHJIT_ARG_O, {.tensor = &tensors[O]}},
      {FLASHJIT_ARG_LSE, {.tensor = &rows}},       {FLASHJIT_ARG_DO, {.tensor = &tensors[DO]}},
      {FLASHJIT_ARG_DQ, {.tensor = &tensors[DQ]}}, {FLASHJIT_ARG_DK, {.tensor = &tensors[DK]}},
      {FLASHJIT_ARG_DV, {.tensor = &tensors[DV]}}, {FLASHJIT_ARG_WORKSPACE, {.tensor = &workspace}}};

  float first = 0, loss = 0;
  for (int step = 0; status == FLASHJIT_OK && step < STEPS; ++step) {
    status = flashjit_kernel_launch(forward, args, 5, NULL);
    loss = 0;
    for (int i = 0; i < SIZE; ++i) {
      data[DO][i] = data[O][i] - wanted[i]; /* the gradient of half the squared error */
      loss += data[DO][i] * data[DO][i] / SIZE;
    }
    if (step == 0) first = loss;
    if (status == FLASHJIT_OK) status = flashjit_kernel_launch(backward, args, 10, NULL);
    for (int t = 0; t < 3; ++t)
      for (int i = 0; i < SIZE; ++i) data[Q + t][i] -= 0.1f * data[DQ + t][i];
  }
  if (status == FLASHJIT_OK) {
    printf("loss from %.4f to %.4f in %d steps\n", first, loss, STEPS);
  } else {
    fprintf(stderr, "%s\n", flashjit_last_error_message());
  }
  free(workspace.data);
  flashjit_engine_destroy(engine);
  return status != FLASHJIT_OK || !(loss < first / 2);
}
