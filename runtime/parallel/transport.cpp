#include "runtime/parallel/transport.hpp"

#include <exception>

#include "runtime/arguments/checks.hpp"

namespace flashjit {

void MappedExchange::pass(const CopyStep& step) {
  if (step.sends.empty()) return;
  if (step.to != own_rank()) {
    if (step.box == sent) await(step.to, freed);
    if (step.box == sent_to_second) await(step.to, freed_second);
  }
  for (const RankCopy& copy : step.sends) {
    put(step.to, copy.to, copy.from);
    if (copy.flag >= 0) raise(step.to, copy.flag);
  }
  post(step.to, step.box);
}

const std::string& Transport::reason() const {
  static const std::string text = "the ranks were said to be of one host";
  return text;
}

std::shared_ptr<Exchange> open_exchange(Transport& transport, Device device, std::size_t bytes,
                                        std::size_t bytes_of_step) {
  std::shared_ptr<Exchange> exchange = transport.exchange(device, bytes, bytes_of_step);
  exchange->begin(nullptr);
  for (int rank = 0; rank < transport.size(); ++rank)
    for (const Box box : {freed, freed_second})
      if (rank != transport.rank()) exchange->release(rank, box);
  return exchange;
}

void make_together(Transport& transport, const std::string& work, const std::function<void()>& make) {
  // Told to all before anything is refused, so that no rank waits for one that has refused.
  const std::vector<std::string> all = transport.gather(work);
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      refuse_argument("the ranks of a group were given different work: rank 0 ", all[0], "; rank ", rank, " ",
                      all[rank], "; the same on all ranks would work");
  std::string refusal;
  std::exception_ptr thrown;
  try {
    make();
  } catch (const std::exception& error) {
    refusal = error.what();
    thrown = std::current_exception();
  }
  const std::vector<std::string> refusals = transport.gather(refusal);
  if (thrown) std::rethrow_exception(thrown);
  for (std::size_t rank = 0; rank < refusals.size(); ++rank)
    if (!refusals[rank].empty())
      throw Error(ErrorCode::device_failed,
                  "rank " + std::to_string(rank) + " of the group refused the work: " + refusals[rank]);
}

void run_together(Transport& transport, const std::function<void()>& part) {
  try {
    part();
  } catch (const Error& error) {
    transport.fail(error.message());
    throw;
  } catch (...) {
    transport.fail("out of memory, or an error of another kind");
    throw;
  }
}

void end_together(Transport& transport, const std::function<void()>& finish) noexcept {
  try {
    finish();
    if (transport.maps_memory()) transport.gather({});
  } catch (const std::exception&) {
    // A rank has failed, and none writes any more.
  }
}

}  // namespace flashjit
