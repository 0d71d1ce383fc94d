#!/bin/sh
# wheel.sh FOLDER: builds the wheel, and checks what is promised of it: size, platform tag, stable ABI, and that it works
# when it is installed. FOLDER is the environment of the tests; exit code 77 if there is none.
set -eu
if [ ! -e "$1/made" ]; then
  cat "$1/why"
  exit 77
fi
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$1/bin/python
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" runtime/python
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --requirement tests/python/requirements.txt auditwheel \
  abi3audit "$work"/*.whl

bytes=$(stat -c %s "$work"/*.whl)
echo "$bytes bytes"
[ "$bytes" -le 34000000 ]
tag=$("$work/venv/bin/auditwheel" show "$work"/*.whl | sed -n 's/.*"manylinux_2_\([0-9]*\)_x86_64".*/\1/p' | head -n 1)
echo "manylinux_2_$tag"
[ "$tag" -le 34 ]
# The licences of what is linked in.
for of in LICENSE licences/libstdc++6.txt licences/llvm-*-dev.txt licences/libclang-*-dev.txt licences/libzstd-dev.txt \
  licences/nlohmann-json3-dev.txt licences/libcli11-dev.txt; do
  # shellcheck disable=SC2086
  ls "$work"/venv/lib/python3*/site-packages/flashjit/$of
done
"$work/venv/bin/abi3audit" --strict "$work"/*.whl
unset PYTHONPATH
for test in attention error example; do
  "$work/venv/bin/python" -W error "tests/python/${test}_test.py"
done
"$work/venv/bin/flashjit" --version
