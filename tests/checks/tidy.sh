#!/bin/sh
# clang-tidy over the library, the plugin and the command: tidy.sh BUILD_FOLDER
set -eu
cd "$(dirname "$0")/../.."
sed -nE "s#^ *\"file\": \"$PWD/((codegen|cache|runtime|tools)/.*\\.cpp)\",?\$#\\1#p" "$1/compile_commands.json" | sort -u |
  xargs -P "$(nproc)" -n 4 clang-tidy-19 --quiet -p "$1"
