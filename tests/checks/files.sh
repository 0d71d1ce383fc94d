#!/bin/sh
# Everything compiles file by file: no file needs what another of its unit includes, or hides its names. In build/files.
set -eu
cd "$(dirname "$0")/../.."
cmake --preset release -B build/files -DCMAKE_BUILD_TYPE=Debug -DFLASHJIT_TESTS=ON -DFLASHJIT_LADDER=OFF -DFLASHJIT_UNITY=OFF \
  -DFLASHJIT_LLVM_FROM="$PWD/build/release" --log-level=WARNING
cmake --build build/files
