#!/bin/sh
# tools/gpu-check: packs the built tests; says so where there is no GPU; and, with stand-ins for the tests, its table
# and exit codes. Usage: gpu_check.sh BIN_FOLDER
set -eu
bin=$1
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
expect() { # TEXT FILE
  grep -qF -- "$1" "$2" || {
    echo "expected '$1' in:" && cat "$2"
    exit 1
  }
}
exits() { # CODE COMMAND...
  code=$1
  shift
  got=0
  "$@" >"$work/out" 2>&1 || got=$?
  [ "$got" = "$code" ] || {
    echo "$* ended with $got, not $code:" && cat "$work/out"
    exit 1
  }
}
if command -v shellcheck >/dev/null; then shellcheck tools/gpu-check "$0"; fi

echo '== the real tests'
exits 0 env FLASHJIT_BIN="$bin" tools/gpu-check pack "$work/real"
expect '0 kernels' "$work/out"
"$work/real/bin/numerics_test" --gtest_list_tests >"$work/tests"
if "$work/real/bin/flashjit" doctor --json | grep -q '"cuda": false'; then
  exits 69 "$work/real/run" "$work/nothing"
  expect 'there is no GPU here' "$work/out"
fi
# Every name in a filter is a test's.
for name in Covering TakesNoDeviceMemory CheckMode EveryHeadDim Random EveryMask HeadDim Fp8 Int8 Variants Train; do
  expect "$name" "$work/tests"
done
# Every spec for compute-sanitizer and of bits is one.
sed -n "/^  done <<'END'/,/^END/s/^[a-z_0-9]*|\(.*\)|.*/\1/p" tools/gpu-check >"$work/specs"
[ "$(wc -l <"$work/specs")" -ge 17 ]
while read -r spec; do exits 0 "$bin/flashjit" render "$spec" --target sm_90a; done <"$work/specs"
for wrong in '' 'pack' 'pack x --targets' 'pack x --nothing y' 'unpack x'; do
  # shellcheck disable=SC2086
  exits 64 tools/gpu-check $wrong
done
exits 1 env FLASHJIT_BIN="$work" tools/gpu-check pack "$work/empty"
expect 'is missing' "$work/out"

echo '== stand-ins'
mkdir "$work/bin" "$work/path"
stand_in() { # NAME; the text is standard input
  { echo '#!/bin/sh' && cat; } >"$work/bin/$1"
  chmod +x "$work/bin/$1"
}
stand_in flashjit <<'END'
if [ "${2-}" = --json ]; then echo '{"devices": {"cpu": true, "cuda": true}}'; else echo '  found    gpu    Imaginary'; fi
END
stand_in cuda_device_test <<'END'
echo '[  PASSED  ] 9 tests.'
END
# Prebuilding makes a kernel. The suite has twelve tests, of which the sixth may fail or hang.
stand_in numerics_test <<'END'
if [ -n "${FLASHJIT_TEST_PREBUILD-}" ]; then
  mkdir -p "$FLASHJIT_CACHE_DIR/v3" && echo code >"$FLASHJIT_CACHE_DIR/v3/$FLASHJIT_TEST_PREBUILD.kernel" && exit 1
fi
[ -e "$FLASHJIT_CACHE_PATH/v3/sm_90a.kernel" ] || exit 7
[ "$1" = --gtest_list_tests ] || echo "$1" >>"${ORDER-/dev/null}"
case "$*" in '--gtest_list_tests --gtest_filter=*Covering'*)
  echo 'All/Covering.' && echo '  Forward/cuda0_sm_90a  # GetParam() = cuda0' && echo '  Merge/cuda0_sm_90a'
  exit
  ;;
esac
if [ -n "${FLASHJIT_TEST_PART-}" ]; then
  part=${FLASHJIT_TEST_PART%/*}
  [ "$STAND_IN $part" != 'stops 2' ] || exit 3
  case $1 in
    *Forward*) echo "covering forward sm_90a: $((part + 1)) of 96 rows, $((part * 4 + 120)) of 500 triples" ;;
    *) echo "covering merge sm_90a: $((part + 1)) of 96 rows, 100 of 100 triples" ;;
  esac
  echo '[  PASSED  ] 1 test.'
  exit
fi
if [ "$1" = --gtest_list_tests ]; then
  echo 'All/Forward.'
  for i in 1 2 3 4 5 6 7 8 9 10 11; do echo "  Sizes$i/cuda0_sm_90a  # GetParam() = cuda0"; done
  echo '  EveryHeadDim/cuda0_sm_90a'
  exit
fi
case "$1" in '--gtest_filter=*Cuda.CheckMode'*) [ "$FLASHJIT_CHECK" = 1 ] || exit 8 ;; esac
if [ "$1" = --gtest_filter=All/Forward.Sizes6/cuda0_sm_90a ]; then
  mkdir -p "$FLASHJIT_CACHE_DIR/v3" && echo more >"$FLASHJIT_CACHE_DIR/v3/more.kernel"
  case ${STAND_IN-} in
    fails) echo '[  FAILED  ] 1 test, listed below:' && echo '[  FAILED  ] All/Forward.Sizes/cuda0_sm_90a, where' && exit 1 ;;
    hangs) sleep 60 ;;
  esac
fi
case "${STAND_IN-} $1" in
  'nothing --gtest_filter=*TakesNoDeviceMemory'*) echo '[  PASSED  ] 0 tests.' && exit ;;
esac
echo '[  PASSED  ] 2 tests.'
echo '[  SKIPPED ] 1 test, listed below:'
END
cat >"$work/path/compute-sanitizer" <<'END'
#!/bin/sh
[ "${STAND_IN-}" != refused ] || { echo 'Error: Device not supported' && exit 1; }
while [ "${1#--}" != "$1" ]; do case $1 in --tool | --error-exitcode) shift ;; esac && shift; done
exec "$@"
END
chmod +x "$work/path/compute-sanitizer"
PATH=$work/path:$PATH
cat >"$work/path/python3" <<'END'
#!/bin/sh
case $1 in
  -m) mkdir -p "$5/flashjit" && touch "$5/flashjit/flashjit-command" ;;
  -c) [ "$STAND_IN" != 'no PyTorch' ] ;;
  *) [ -d "$PYTHONPATH/flashjit" ] && [ "$2" = tests ] && [ -e "$1" ] && [ "$STAND_IN" != fails ] ;;
esac
END
chmod +x "$work/path/python3"
touch "$work/wheel"
exits 0 env FLASHJIT_BIN="$work/bin" tools/gpu-check pack "$work/packed" --targets sm_90a --wheel "$work/wheel"
expect '1 kernels' "$work/out"
run() { # CODE STAND_IN [GROUPS [SECONDS]]
  exits "$1" env STAND_IN="$2" ${3:+FLASHJIT_GPU_CHECK_GROUPS="$3"} FLASHJIT_GPU_CHECK_SECONDS="${4-450}" \
    "$work/packed/run" "$work/results"
  cp "$work/results/table.txt" "$work/table"
}
run 0 works
expect 'gpu    Imaginary' "$work/table"
expect 'device                 1       9       0       0' "$work/table"
expect 'suite                 12      24      12       0' "$work/table"
expect 'python                 1       1       0       0' "$work/table"
expect 'memcheck              20      20       0       0' "$work/table"
expect 'synccheck             20      20       0       0' "$work/table"
expect 'bits                   9       9       0       0' "$work/table"
expect '1 kernels compiled here' "$work/table"
expect 'covering             192     192       0       0' "$work/table"
expect '  covering forward sm_90a: 96 of 96 rows, 500 of 500 triples' "$work/table"
expect '  covered in all: 100.0 % of 600 triples' "$work/table"
[ "$(tar -tzf "$work/results/logs.tgz" | grep -c 'suite\.All_Forward_[A-Za-z]*[0-9]*_cuda0_sm_90a$')" = 12 ]
exits 0 env FLASHJIT_BIN="$work/bin" tools/gpu-check pack "$work/again" --kernels "$work/results/kernels.tgz"
expect '2 kernels' "$work/out"
run 1 fails suite
expect 'suite                 12      22      11       1' "$work/table"
expect 'FAILED: exit code 1' "$work/table"
expect '  All/Forward.Sizes/cuda0_sm_90a' "$work/table"
run 1 fails python
expect 'FAILED: exit code 1' "$work/table"
run 0 'no PyTorch' python
expect 'all skipped' "$work/table"
run 1 hangs suite 3
expect 'FAILED: out of time' "$work/table"
run 1 nothing memory
expect 'FAILED: no test ran' "$work/table"
# The longest test begins first, the covering arrays last. Parts after one that did not run count as not covered.
export ORDER="$work/order" FLASHJIT_GPU_CHECK_SHARDS=1
run 1 stops 'covering suite'
unset ORDER FLASHJIT_GPU_CHECK_SHARDS
[ "$(sed -n 1p "$work/order")" = --gtest_filter=All/Forward.EveryHeadDim/cuda0_sm_90a ]
[ "$(sed -n 12p "$work/order")" = --gtest_filter=All/Forward.Sizes11/cuda0_sm_90a ]
[ "$(sed -n 13p "$work/order")" = --gtest_filter=All/Covering.Forward/cuda0_sm_90a ]
expect '  covering forward sm_90a: 2 of 96 rows, 124 of 500 triples' "$work/table"
expect '  covered in all: 37.3 % of 600 triples' "$work/table"
# A group of its own, and none of its jobs begins after its time.
run 1 works covering 40
expect 'covering             192       0       0       0' "$work/table"
[ "$(grep -c suite "$work/table")" = 0 ]
run 0 refused 'memcheck synccheck'
expect 'not possible here' "$work/table"
echo ok
