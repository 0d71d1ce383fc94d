#!/bin/sh
# sanitized.sh FOLDER BUILD INCLUDE: compiles the extension with the sanitizers of addresses and undefined behaviour, and
# runs the tests with it that stay in one process. FOLDER is their environment, BUILD the build tree whose library is
# used, INCLUDE the folder of CPython's headers. Exit code 77 if there is no environment, or no GCC with sanitizers.
set -eu
venv=$1 build=$2 include=$3
if [ ! -e "$venv/made" ]; then
  cat "$venv/why"
  exit 77
fi
runtime=$(g++ -print-file-name=libasan.so) || exit 77
[ -e "$runtime" ] || exit 77
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/flashjit"
ln -s "$PWD"/runtime/python/flashjit/* "$work/flashjit/"
for file in runtime/python/native/*.cpp; do
  g++ -std=c++20 -O1 -g -fPIC -fvisibility=hidden -fsanitize=address,undefined -fno-sanitize-recover=all -I. \
    -isystem "$include" -c "$file" -o "$work/$(basename "$file").o"
done
g++ -shared -fsanitize=address,undefined "$work"/*.o -o "$work/flashjit/_native.abi3.so" -L"$build/lib" -lflashjit \
  -Wl,-rpath,"$build/lib"
# CPython frees much only when the process has ended, so leaks are for objects_test.py to find.
for test in exchange_test.py attention_test.py error_test.py "parallel_test.py Conversions Failures"; do
  LD_PRELOAD="$runtime $(g++ -print-file-name=libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
    PYTHONPATH=$work "$venv/bin/python" tests/python/$test
done
