#!/bin/sh
# clang-tidy over the library, the plugin and the command, as a unity build has them: what many files include is
# looked at once for all; the plugin is of another build: tidy.sh BUILD_FOLDER PLUGINS_BUILD_FOLDER
set -eu
cd "$(dirname "$0")/../.."
check() { # BUILD_FOLDER FOLDERS
  sed -nE "s#^ *\"file\": \"(($1|$PWD)/$2/.*)\",?\$#\\1#p" "$1/compile_commands.json" | sort -u |
    xargs -P "$(nproc)" -n 1 clang-tidy-19 --quiet -p "$1"
}
# Units of many files come first.
check "$1" '(codegen|cache|runtime|tools)'
check "$2" runtime/llvm
