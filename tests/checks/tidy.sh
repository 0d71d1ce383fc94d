#!/bin/sh
# clang-tidy over the library, the plugin and the command, as a unity build has them: what many files include is
# looked at once for all. tidy.sh BUILD_FOLDER
set -eu
cd "$(dirname "$0")/../.."
# Units of many files come first.
sed -nE "s#^ *\"file\": \"(($1|$PWD)/(codegen|cache|runtime|tools)/.*)\",?\$#\\1#p" "$1/compile_commands.json" | sort -u |
  xargs -P "$(nproc)" -n 1 clang-tidy-19 --quiet -p "$1"
