#!/bin/sh
# clang-tidy over every host source of ours that the build knows: tidy.sh BUILD_FOLDER
set -eu
cd "$(dirname "$0")/../.."
sed -nE 's/^ *"file": "(.*\.cpp)",?$/\1/p' "$1/compile_commands.json" | sort -u | grep -v "^$1" |
  xargs -P "$(nproc)" -n 4 clang-tidy-19 --quiet -p "$1"
