// Expects body() to throw a flashjit::Error with this code and a message that contains every part.
#pragma once

#include <gmock/gmock.h>

#include <initializer_list>

#include "codegen/base/error.hpp"

namespace flashjit {

template <class Body>
void expect_error(ErrorCode code, std::initializer_list<const char*> parts, Body body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_STREQ(to_string(error.code()), to_string(code)) << error.what();
    for (const char* part : parts) EXPECT_THAT(error.message(), testing::HasSubstr(part));
    EXPECT_LT(error.message().size(), 600u);
    return;
  }
  ADD_FAILURE() << "no error";
}

}  // namespace flashjit
