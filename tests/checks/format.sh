#!/bin/sh
# Checks that every source is formatted by .clang-format; format.sh --fix formats them.
set -eu
cd "$(dirname "$0")/../.."
case "${1-}" in
  --fix) mode=-i ;;
  *) mode='--dry-run -Werror' ;;
esac
# shellcheck disable=SC2086
find codegen cache runtime templates tools tests -type f \
  \( -name '*.cpp' -o -name '*.hpp' -o -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 clang-format-19 $mode
