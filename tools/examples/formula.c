/* Attention with a score of one's own, ALiBi with softcap, on this machine's CPU. */
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
  for (int i = 0; i < SEQLEN * HEADS * HEAD_DIM; ++i) q[i] = k[i] = 0.1f;
  for (int i = 0; i < SEQLEN * HEADS * HEAD_DIM; ++i) v[i] = (float)(i / (HEADS * HEAD_DIM)); /* the key */

  flashjit_engine* engine = NULL;
  flashjit_spec* spec = NULL;
  const flashjit_kernel* kernel = NULL;
  const flashjit_engine_options options = {.struct_size = sizeof options, .device = "cpu"};
  const char* json =
      "{\"op\": \"forward\", \"dtype\": \"fp32\", \"head_dim\": 64, \"mask\": [\"causal\"], \"lse\": false,"
      " \"score\": [\"score + slope[head] * (key - position)\", \"cap * tanh(score / cap)\"],"
      " \"tables\": {\"slope\": {\"dtype\": \"fp32\", \"shape\": [\"heads_q\"]}},"
      " \"scalars\": {\"cap\": \"fp32\"}}";
  const flashjit_shape shape = {.struct_size = sizeof shape,
                                .batch = 1,
                                .seqlen_q = SEQLEN,
                                .seqlen_k = SEQLEN,
                                .num_heads_q = HEADS,
                                .num_heads_kv = HEADS};
  float slopes[HEADS] = {1, 0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f, 0.0078125f};
  const flashjit_tensor slope = {.data = slopes,
                                 .dtype = FLASHJIT_FP32,
                                 .device_kind = FLASHJIT_CPU,
                                 .rank = 1,
                                 .shape = {HEADS},
                                 .strides = {1}};
  const flashjit_tensor tq = tensor(q), tk = tensor(k), tv = tensor(v), to = tensor(o);
  flashjit_argument args[] = {{FLASHJIT_ARG_Q, {.tensor = &tq}},
                              {FLASHJIT_ARG_K, {.tensor = &tk}},
                              {FLASHJIT_ARG_V, {.tensor = &tv}},
                              {FLASHJIT_ARG_O, {.tensor = &to}},
                              {0, {.tensor = &slope}}, /* the ids are asked for below */
                              {0, {.real = 30}}};

  flashjit_status status = flashjit_engine_create(&options, &engine);
  if (status == FLASHJIT_OK) status = flashjit_spec_create(json, &spec);
  if (status == FLASHJIT_OK) status = flashjit_spec_argument(spec, "slope", &args[4].id);
  if (status == FLASHJIT_OK) status = flashjit_spec_argument(spec, "cap", &args[5].id);
  if (status == FLASHJIT_OK) status = flashjit_engine_get(engine, spec, &shape, &kernel);
  if (status == FLASHJIT_OK) status = flashjit_kernel_launch(kernel, args, 6, NULL);
  if (status == FLASHJIT_OK) {
    /* The steeper the slope, the nearer the keys that count. */
    for (int head = 0; head < HEADS; ++head)
      printf("head %d: %.1f\n", head, o[((SEQLEN - 1) * HEADS + head) * HEAD_DIM]);
  } else {
    fprintf(stderr, "%s\n", flashjit_last_error_message());
  }
  flashjit_spec_destroy(spec);
  flashjit_engine_destroy(engine);
  return status;
}
