// The requests of a host to a store, in order, until it has an object or makes it: a plan without a clock
// and without a network, so that a simulation follows the same one.
//
//   get -> absent -> lease -> ours  -> get -> absent -> make it, with the lease
//                          -> taken -> wait -> lease ...
//
// Who made an object stores it before the lease is given back, so the lease alone is polled.
#pragma once

#include <chrono>

namespace flashjit {

struct FetchLimits {
  std::chrono::milliseconds lease{30'000};     // how long a lease lasts if nobody gives it back
  std::chrono::milliseconds patience{60'000};  // how long others wait for who has it
  std::chrono::milliseconds first_pause{20}, longest_pause{1000};  // between their questions
};

class FetchPlan {
 public:
  enum class Step {
    get,    // ask for the object
    lease,  // ask for the lease, or, without the right to store anything, whether another has it
    wait,   // for pause(), then call waited()
    use,    // the object that was got
    make,   // make the object
  };
  FetchPlan(const FetchLimits& limits, bool may_lease) : limits_(limits), may_lease_(may_lease) {}

  Step step() const { return step_; }
  // Whether this host has the lease.
  bool leased() const { return leased_; }

  // The answer to get or lease. `yes`: the object is there; the lease is ours, or, if it may not be,
  // nobody's.
  void answer(bool yes);
  // The store does not answer: goes on without it.
  void give_up() { step_ = Step::make; }

  // The time until the next question, drawn by a number in [0, 1): hosts that began together drift apart.
  std::chrono::milliseconds pause(double random) const;
  void waited(std::chrono::milliseconds time);

 private:
  FetchLimits limits_;
  bool may_lease_ = false, leased_ = false, again_ = false;
  Step step_ = Step::get;
  int pauses_ = 0;
  std::chrono::milliseconds waited_{0};
};

}  // namespace flashjit
