#include "tests/support/positions.hpp"

#include "tools/verify/element.hpp"
#include "tools/verify/layout.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

// A bell-shaped number of a place.
float bell_shaped(std::uint64_t name, int tensor, std::int64_t position, int head, int dim) {
  const std::uint64_t bits =
      verify::random_bits(name * 8 + static_cast<std::uint64_t>(tensor),
                          (static_cast<std::uint64_t>(position) << 20) +
                              (static_cast<std::uint64_t>(head) << 10) + static_cast<std::uint64_t>(dim));
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<float>(bits >> 16 * i & 0xffff) / 32768.0f - 1.0f;
  return sum;
}

// A number of Values::weightless_column: 0 of q, 1 of k, 2 of v.
float first_number(int tensor, std::int64_t position) {
  constexpr std::int64_t heavy_keys = 23;
  const bool heavy = position % heavy_keys == 0;
  if (tensor == 0) return 8;
  if (tensor == 1) return heavy ? 20.0f : 0.0f;
  return heavy ? 0.0f : -1.2e-38f;
}

}  // namespace

void fill_by_position(Workload& workload, const std::vector<std::uint64_t>& names, Values values) {
  const auto number = [values](std::uint64_t name, int tensor, std::int64_t position, int head, int dim) {
    return dim == 0 && values == Values::weightless_column ? first_number(tensor, position)
                                                           : bell_shaped(name, tensor, position, head, dim);
  };
  const verify::Layout layout(workload.given().spec, workload.host_args());
  const AttentionArgs& args = workload.host_args();
  for (const verify::Sequence& s : layout.sequences) {
    const std::uint64_t name = names[static_cast<std::size_t>(s.batch)];
    for (int head = 0; head < layout.heads_q; ++head)
      for (std::int64_t row = 0; row < s.seqlen_q; ++row)
        for (int c = 0; c < layout.head_dim; ++c)
          verify::store_element(args.q->data, args.q->dtype,
                                layout.index(*args.q, s.batch, s.q_begin + row, head) + c,
                                number(name, 0, s.seqlen_k - s.seqlen_q + row, head, c));
    for (int head = 0; head < layout.heads_kv; ++head) {
      const int head_q = head * (layout.heads_q / layout.heads_kv);
      for (std::int64_t key = 0; key < s.seqlen_k; ++key) {
        for (int c = 0; c < layout.head_dim; ++c)
          verify::store_element(args.k->data, args.k->dtype, layout.key_index(*args.k, s, key, head_q) + c,
                                number(name, 1, key, head, c));
        for (int c = 0; c < layout.head_dim_v; ++c)
          verify::store_element(args.v->data, args.v->dtype, layout.key_index(*args.v, s, key, head_q) + c,
                                number(name, 2, key, head, c));
      }
    }
  }
  for (GuardedTensor* tensor : {&workload.q(), &workload.k(), &workload.v()}) tensor->upload();
  if (!args.d_o) return;
  for (const verify::Sequence& s : layout.sequences)
    for (int head = 0; head < layout.heads_q; ++head)
      for (std::int64_t row = 0; row < s.seqlen_q; ++row) {
        const std::uint64_t name = names[static_cast<std::size_t>(s.batch)];
        const std::int64_t position = s.seqlen_k - s.seqlen_q + row, at = s.q_begin + row;
        for (int c = 0; c < layout.head_dim_v; ++c) {
          verify::store_element(args.o->data, args.o->dtype, layout.index(*args.o, s.batch, at, head) + c,
                                bell_shaped(name, 3, position, head, c));
          verify::store_element(args.d_o->data, args.d_o->dtype,
                                layout.index(*args.d_o, s.batch, at, head) + c,
                                bell_shaped(name, 4, position, head, c));
        }
        verify::store_element(args.lse->data, args.lse->dtype, layout.lse_index(*args.lse, s.batch, at, head),
                              6 + bell_shaped(name, 5, position, head, 0));
        if (args.dlse)
          verify::store_element(args.dlse->data, args.dlse->dtype,
                                layout.lse_index(*args.dlse, s.batch, at, head),
                                bell_shaped(name, 6, position, head, 0));
      }
  for (const TensorMember member :
       {&AttentionArgs::o, &AttentionArgs::d_o, &AttentionArgs::lse, &AttentionArgs::dlse})
    if (args.*member) workload.tensor(member).upload();
}

namespace {

void add_bits(std::vector<std::byte>& bits, const Tensor& t, std::int64_t index, int count) {
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  const auto* from = static_cast<const std::byte*>(t.data) + index * size;
  bits.insert(bits.end(), from, from + count * size);
}

}  // namespace

std::vector<std::byte> bits_of_row(const Workload& workload, int batch, int row) {
  const AttentionArgs& args = workload.host_args();
  const verify::Layout layout(workload.given().spec, args);
  std::vector<std::byte> bits;
  for (const verify::Sequence& s : layout.sequences) {
    if (s.batch != batch) continue;
    for (int head = 0; head < layout.heads_q; ++head) {
      if (args.dq) {
        add_bits(bits, *args.dq, layout.index(*args.dq, batch, s.q_begin + row, head), layout.head_dim);
        continue;
      }
      add_bits(bits, *args.o, layout.index(*args.o, batch, s.q_begin + row, head), layout.head_dim_v);
      add_bits(bits, *args.lse, layout.lse_index(*args.lse, batch, s.q_begin + row, head), 1);
    }
  }
  return bits;
}

std::vector<std::byte> bits_of_key(const Workload& workload, int batch, int key) {
  const AttentionArgs& args = workload.host_args();
  const verify::Layout layout(workload.given().spec, args);
  std::vector<std::byte> bits;
  for (const verify::Sequence& s : layout.sequences) {
    if (s.batch != batch) continue;
    for (int head = 0; head < layout.heads_q; head += layout.heads_q / layout.heads_kv) {
      add_bits(bits, *args.dk, layout.key_index(*args.dk, s, key, head), layout.head_dim);
      add_bits(bits, *args.dv, layout.key_index(*args.dv, s, key, head), layout.head_dim_v);
    }
  }
  return bits;
}

}  // namespace flashjit::testing_support
