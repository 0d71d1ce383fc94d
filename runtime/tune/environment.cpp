#include "runtime/tune/environment.hpp"

#include "runtime/cuda/driver.hpp"
#include "runtime/device.hpp"
#include "runtime/thread_pool.hpp"

namespace flashjit {

TuneKey tune_key(const AttentionSpec& spec, const Target& target, Device device, const Shape& shape) {
  return {.spec = spec.to_json(),
          .target = target.str(),
          .device = device_model(device),
          .bucket = bucket(shape)};
}

TuneEnvironment tune_environment(const EngineOptions& options) {
  TuneEnvironment environment{.flashjit = version()};
  if (Device::parse(options.device).kind == Device::Kind::cuda) {
    environment.driver = cuda_driver_version();
  } else if (!options.parallel_for) {  // the number of a host's own threads is unknown
    environment.num_threads = options.num_threads > 0 ? options.num_threads : available_cpus();
  }
  return environment;
}

TuneStore tune_store(const OpenedCache& cache) {
  std::vector<std::string> layers;
  for (const DiskCache& layer : cache.layers) layers.push_back(layer.folder());
  TuneStore store(cache.disk ? cache.disk->folder() : std::string(), std::move(layers));
  store.use_signatures(cache.verifier, cache.signer);
  return store;
}

}  // namespace flashjit
