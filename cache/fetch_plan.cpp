#include "cache/fetch_plan.hpp"

#include <algorithm>
#include <cmath>

namespace flashjit {

void FetchPlan::answer(bool yes) {
  if (step_ == Step::get) {
    step_ = yes ? Step::use : again_ ? Step::make : Step::lease;
    return;
  }
  leased_ = yes && may_lease_;
  again_ = yes;
  // Who found the lease free at once, without the right to take it, has just asked for the object.
  step_ = !yes ? Step::wait : !may_lease_ && pauses_ == 0 ? Step::make : Step::get;
}

std::chrono::milliseconds FetchPlan::pause(double random) const {
  const double grown =
      static_cast<double>(limits_.first_pause.count()) * std::pow(1.5, std::min(pauses_, 40));
  const double most = static_cast<double>(limits_.longest_pause.count());
  return std::chrono::milliseconds(static_cast<int>(std::min(grown, most) * (0.5 + random)));
}

void FetchPlan::waited(std::chrono::milliseconds time) {
  ++pauses_;
  waited_ += time;
  step_ = waited_ < limits_.patience ? Step::lease : Step::make;
}

}  // namespace flashjit
