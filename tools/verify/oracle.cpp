#include "tools/verify/oracle.hpp"

#include "tools/verify/append_oracle.hpp"
#include "tools/verify/backward_oracle.hpp"
#include "tools/verify/block_lists_oracle.hpp"
#include "tools/verify/forward_oracle.hpp"
#include "tools/verify/merge_oracle.hpp"

namespace flashjit::verify {
namespace {

constexpr struct {
  Operation op;
  Oracle (*make)(const AttentionSpec&, const AttentionArgs&, const OracleOptions&);
} oracles[] = {
    {Operation::forward, forward_oracle},  {Operation::backward, backward_oracle},
    {Operation::decode, decode_oracle},    {Operation::merge, merge_oracle},
    {Operation::append_kv, append_oracle}, {Operation::make_block_lists, block_lists_oracle},
};

}  // namespace

Oracle oracle_of(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options) {
  for (const auto& [op, make] : oracles)
    if (op == spec.op) return make(spec, args, options);
  throw Error(ErrorCode::unsupported,
              std::string("no float64 oracle for the operation ") + to_string(spec.op));
}

}  // namespace flashjit::verify
