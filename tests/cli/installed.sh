#!/bin/sh
# The installed tree can be moved and serves programs through find_package and through pkg-config. The README and
# tools/examples/README.md show the programs that are built here. Usage: installed.sh BUILD_FOLDER
set -eu
build=$1
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export FLASHJIT_CACHE_DIR="$work/cache"

cmake --install "$build" --prefix "$work/first" >"$work/install.log"
mv "$work/first" "$work/prefix"
# Each header alone; without FLASHJIT_TEST_ALL=1 a third of them, from where the seed says.
every=3
[ "${FLASHJIT_TEST_ALL-}" != 1 ] || every=1
place=${FLASHJIT_TEST_SEED:-$(tests/support/seed.sh)}
for header in $(cd "$work/prefix/include" && find flashjit -type f | LC_ALL=C sort); do
  place=$((place + 1))
  [ $((place % every)) = 0 ] || continue
  case "$header" in *.h) language=c ;; *) language='c++ -std=c++20' ;; esac
  # shellcheck disable=SC2086
  echo "#include <$header>" | c++ -x $language -fsyntax-only -Wall -Wextra -Werror -I"$work/prefix/include" -
done

echo '== find_package'
cmake -S tools/examples -B "$work/examples" -DCMAKE_PREFIX_PATH="$work/prefix" \
  -DCMAKE_C_FLAGS='-Wall -Wextra -Werror' -DCMAKE_CXX_FLAGS='-Wall -Wextra -Werror' >"$work/cmake.log"
cmake --build "$work/examples" >"$work/build.log" || { cat "$work/build.log" && exit 1; }
"$work/examples/attention_cpp" | tee "$work/first.txt"
"$work/examples/attention_c"
grep -q 'compiled: o\[0\] = 0.100' "$work/first.txt"
"$work/examples/formula_cpp" | tee "$work/formula.txt"
grep -q 'row 99: 0.000' "$work/formula.txt" && grep -q 'row 100: 1.000' "$work/formula.txt"
"$work/examples/formula_c" | grep -q 'head 0: 510.'
"$work/examples/cascade" cpu 5 96
"$work/examples/decode_step" | tee "$work/decode_step.txt"
"$work/examples/latent_step" | tee "$work/latent_step.txt"
grep -q 'request 0: 19.500' "$work/latent_step.txt" && grep -q 'request 1: 7.800' "$work/latent_step.txt"
grep -q 'request 0: 19.500' "$work/decode_step.txt" && grep -q 'request 2: 15.600' "$work/decode_step.txt"
"$work/examples/train_cpp" # fails unless the loss falls
"$work/examples/train_c"

echo '== pkg-config'
PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name flashjit.pc)")
export PKG_CONFIG_PATH
# shellcheck disable=SC2046
c++ -std=c++20 tools/examples/attention.cpp $(pkg-config --cflags --libs flashjit) -o "$work/cpp"
# shellcheck disable=SC2046
cc tools/examples/attention.c $(pkg-config --cflags --libs flashjit) -o "$work/c"
"$work/cpp" | grep 'disk: o\[0\] = 0.100'
"$work/c" | grep 'o\[0\] = 0.100'
[ "$(pkg-config --modversion flashjit)" = "$("$work/prefix/bin/flashjit" --version | cut -d' ' -f2)" ]

echo '== the command, installed'
"$work/prefix/bin/flashjit" run tools/examples/full_fp32.json --seqlen-q 64 --verify

echo '== what else is installed'
for file in share/bash-completion/completions/flashjit share/zsh/vendor-completions/_flashjit \
  share/fish/vendor_completions.d/flashjit.fish share/flashjit/spec.schema.json share/flashjit/manifest.schema.json \
  share/doc/flashjit/examples/attention.cpp share/doc/flashjit/reference/spec.md; do
  [ -s "$work/prefix/$file" ] || { echo "$file is not installed" >&2 && exit 1; }
done
if command -v pandoc >/dev/null; then [ -s "$work/prefix/share/man/man1/flashjit.1" ]; fi

echo '== uninstall'
cmake --install "$build" --prefix "$work/second" >"$work/install.log"
touch "$work/second/lib/of_another"
cmake -DMANIFEST="$build/install_manifest.txt" -P tools/package/uninstall.cmake
[ "$(find "$work/second" ! -type d)" = "$work/second/lib/of_another" ] ||
  { echo "uninstall left $(find "$work/second" ! -type d | head -3)" >&2 && exit 1; }
[ ! -e "$work/second/include" ] || { echo "uninstall left empty folders" >&2 && exit 1; }

echo '== pages'
# The block that follows the comment "tools/examples/NAME; a test compares the two" in a page.
shown() {
  awk -v mark="tools/examples/$1; a test compares the two" \
    'index($0, mark) { wanted = 1 } $0 == "```" { inside = 0 } inside { print } wanted && /^```./ { inside = 1; wanted = 0 }' \
    "$2"
}
for example in attention.cpp attention.c; do
  shown "$example" tools/examples/README.md | diff - "tools/examples/$example"
done
# Parts of examples.
part_of() {
  part=$(shown "$1" "$2")
  case $(cat "tools/examples/$1") in
    *"${part:?}"*) ;;
    *) echo "the part of $1 that $2 shows is not in it" >&2 && exit 1 ;;
  esac
}
part_of attention.cpp README.md
awk '/^```/ { inside = 0 } inside { print } /^```json/ { inside = 1 }' README.md >"$work/spec.json"
"$work/prefix/bin/flashjit" render "$work/spec.json" --target sm_90a >/dev/null
for example in train.cpp formula.cpp decode_step.cpp; do part_of $example tools/examples/README.md; done
