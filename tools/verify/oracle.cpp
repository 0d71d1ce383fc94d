#include "tools/verify/oracle.hpp"

namespace flashjit::verify {
#define FLASHJIT_ORACLE(name) \
  Oracle name##_oracle(const AttentionSpec&, const AttentionArgs&, const OracleOptions&);
FLASHJIT_FOR_EACH_OPERATION(FLASHJIT_ORACLE)
#undef FLASHJIT_ORACLE

Oracle oracle_of(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options) {
#define FLASHJIT_ORACLE(name) &name##_oracle,
  static constexpr decltype(&forward_oracle) oracles[] = {FLASHJIT_FOR_EACH_OPERATION(FLASHJIT_ORACLE)};
#undef FLASHJIT_ORACLE
  return oracles[static_cast<std::size_t>(info_of(spec.op).op)](spec, args, options);
}

}  // namespace flashjit::verify
