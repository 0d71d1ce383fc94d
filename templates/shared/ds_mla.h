// A key of a latent cache (MLA) as inference engines keep it, "kv_dtype": "fp8_ds_mla": 656 bytes. First come
// 512 columns in fp8_e4m3, which are the value, too; then a float32 scale for each 128 of them, by which the
// stored numbers are multiplied; then the 64 columns of the rotary embedding in bf16.
#pragma once

#include "shared/kv_element.h"

namespace flashjit::device {

struct DsMla {
  static constexpr int columns = 512, group = 128, groups = columns / group, rotary_columns = 64;
  static constexpr int scales = columns, rotary = scales + groups * 4;  // their first bytes
  static constexpr int bytes = rotary + rotary_columns * 2;
};
static_assert(DsMla::bytes == 656);

// A byte of such a key.
struct fp8_ds_mla {
  unsigned char bits;
};

}  // namespace flashjit::device
