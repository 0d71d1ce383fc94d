#!/bin/sh
# Compiles everything file by file, in build/files: no file may
# need an include of another file of its unit, or hide its names.
set -eu
cd "$(dirname "$0")/../.."
cmake --preset release -B build/files -DCMAKE_BUILD_TYPE=Debug -DFLASHJIT_TESTS=ON -DFLASHJIT_LADDER=OFF -DFLASHJIT_UNITY=OFF \
  -DFLASHJIT_LLVM_FROM="$PWD/build/release" --log-level=WARNING
cmake --build build/files
