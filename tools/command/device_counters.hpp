// Bytes that kernels move between a GPU and its memory, as Nsight Compute (ncu) counts them. It is a part of
// CUDA's toolkit, knows the counters of each GPU, and needs no code here that depends on its version.
#pragma once

#include <string>
#include <vector>

namespace flashjit::command {

struct CountedBytes {
  double read = 0, written = 0;
  int kernels = 0;
};

// The program `ncu`: of PATH, else of a toolkit or of Nsight Compute where they are installed. Throws
// device_failed.
std::string find_ncu();

// Runs a program under ncu and counts its kernels between cuProfilerStart and cuProfilerStop. Throws
// device_failed, with what ncu said, if that fails or the host refuses the counters.
CountedBytes count_device_bytes(const std::string& ncu, const std::vector<std::string>& program);

// The sum over the rows of `ncu --csv --page raw --print-units base`. Other lines do not count.
CountedBytes read_counts(const std::string& output);

}  // namespace flashjit::command
