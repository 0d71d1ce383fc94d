#include "tools/command/session.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "runtime/timing.hpp"

namespace flashjit::command {

TemporaryFolder::TemporaryFolder() {
  path_ = (std::filesystem::temp_directory_path() / "flashjit-XXXXXX").string();
  if (!mkdtemp(path_.data())) {
    throw Error(ErrorCode::device_failed,
                "temporary folder '" + path_ + "' cannot be made: " + std::strerror(errno));
  }
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

double measure_hot_us(Engine& engine, const AttentionSpec& spec, const Shape& shape) {
  constexpr int times = 20000;
  engine.get(spec, shape);
  const double start = now_ms(Clock::wall);
  for (int i = 0; i < times; ++i) engine.get(spec, shape);
  return (now_ms(Clock::wall) - start) * 1e3 / times;
}

GetTimes measure_get(const EngineOptions& options, const AttentionSpec& spec, const Shape& shape,
                     const KernelInfo& first, bool cold) {
  GetTimes times;
  if (first.origin == Origin::compiled) {
    times.cold_ms = first.get_ms;
  } else if (cold) {
    const TemporaryFolder empty;
    EngineOptions anew = options;
    anew.cache_dir = empty.path();
    anew.cache_path = anew.cache_remote = "";
    try {
      times.cold_ms = Engine(anew).get(spec, shape).info().get_ms;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::compiler_unavailable) throw;
    }
  }
  Engine engine(options);
  const KernelInfo& again = engine.get(spec, shape).info();
  if (again.origin == Origin::disk) times.warm_ms = again.get_ms;
  times.hot_us = measure_hot_us(engine, spec, shape);
  return times;
}

}  // namespace flashjit::command
