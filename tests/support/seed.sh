#!/bin/sh
# Prints the number that decides what samples of tests draw: of the commit, or of the sources where there is no git.
set -eu
cd "$(dirname "$0")/../.."
commit=$(git rev-parse HEAD 2>/dev/null) ||
  commit=$(find codegen cache runtime templates tools tests -type f -print0 | LC_ALL=C sort -z | xargs -0 cat | sha1sum)
printf '%d\n' "0x$(printf %.7s "$commit")"
