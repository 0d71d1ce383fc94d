#!/bin/sh
# tidy.sh BUILD_FOLDER PLUGINS_BUILD_FOLDER: runs clang-tidy over the library, the plugin and the command. A
# unity build's units make it look only once at a header that many files include. The plugin is of another build.
set -eu
cd "$(dirname "$0")/../.."
check() { # BUILD_FOLDER FOLDERS
  sed -nE "s#^ *\"file\": \"(($1|$PWD)/$2/.*)\",?\$#\\1#p" "$1/compile_commands.json" | sort -u |
    xargs -P "$(nproc)" -n 1 clang-tidy-19 --quiet -p "$1"
}
# Units of many files come first, since they take longest.
check "$1" '(codegen|cache|runtime|tools)'
check "$2" runtime/llvm
