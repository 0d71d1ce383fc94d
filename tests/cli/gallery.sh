#!/bin/sh
# The pictures in tools/examples/masks are those that the command draws now: gallery.sh FLASHJIT
# To draw them anew: tools/examples/masks/draw build/release/bin/flashjit
set -eu
cd "$(dirname "$0")/../../tools/examples/masks"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
./draw "$1" "$work"
cp draw README.md "$work/"
diff -r . "$work"
