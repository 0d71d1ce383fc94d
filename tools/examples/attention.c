/* Causal attention on this machine's CPU, from a spec. */
#include <flashjit/flashjit.h>
#include <stdio.h>

enum { SEQLEN = 512, HEADS = 8, HEAD_DIM = 64 };
static float q[SEQLEN * HEADS * HEAD_DIM], k[SEQLEN * HEADS * HEAD_DIM], v[SEQLEN * HEADS * HEAD_DIM],
    o[SEQLEN * HEADS * HEAD_DIM];

/* [batch, seqlen, heads, head_dim], row-major */
static flashjit_tensor tensor(float* data) {
  const flashjit_tensor t = {.data = data,
                             .dtype = FLASHJIT_FP32,
                             .device_kind = FLASHJIT_CPU,
                             .rank = 4,
                             .shape = {1, SEQLEN, HEADS, HEAD_DIM},
                             .strides = {SEQLEN * HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEAD_DIM, 1}};
  return t;
}

int main(void) {
  for (int i = 0; i < SEQLEN * HEADS * HEAD_DIM; ++i) q[i] = k[i] = v[i] = 0.1f;

  flashjit_engine* engine = NULL;
  flashjit_spec* spec = NULL;
  const flashjit_kernel* kernel = NULL;
  const flashjit_engine_options options = {.struct_size = sizeof options, .device = "cpu"};
  const char* json =
      "{\"op\": \"forward\", \"dtype\": \"fp32\", \"head_dim\": 64, \"mask\": [\"causal\"], \"lse\": false}";
  const flashjit_shape shape = {.struct_size = sizeof shape,
                                .batch = 1,
                                .seqlen_q = SEQLEN,
                                .seqlen_k = SEQLEN,
                                .num_heads_q = HEADS,
                                .num_heads_kv = HEADS};
  const flashjit_tensor tq = tensor(q), tk = tensor(k), tv = tensor(v), to = tensor(o);
  const flashjit_argument args[] = {{FLASHJIT_ARG_Q, {.tensor = &tq}},
                                    {FLASHJIT_ARG_K, {.tensor = &tk}},
                                    {FLASHJIT_ARG_V, {.tensor = &tv}},
                                    {FLASHJIT_ARG_O, {.tensor = &to}}};

  flashjit_status status = flashjit_engine_create(&options, &engine);
  if (status == FLASHJIT_OK) status = flashjit_spec_create(json, &spec);
  if (status == FLASHJIT_OK) status = flashjit_engine_get(engine, spec, &shape, &kernel);
  if (status == FLASHJIT_OK) status = flashjit_kernel_launch(kernel, args, 4, NULL);
  if (status == FLASHJIT_OK) {
    printf("o[0] = %.3f\n", o[0]);
  } else {
    fprintf(stderr, "%s\n", flashjit_last_error_message());
  }
  flashjit_spec_destroy(spec);
  flashjit_engine_destroy(engine);
  return status;
}
