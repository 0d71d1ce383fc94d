#!/bin/sh
# run.sh BUILD_FOLDER TARGET: runs one fuzz target from its seeds and the
# kept corpus, for FLASHJIT_FUZZ_SECONDS (3; with FLASHJIT_TEST_ALL=1 60).
set -eu
build=$1
target=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$build/fuzz-failures"
case "$target" in spec | manifest | tune_record | entry | compile_request) set -- "-dict=$here/json.dict" ;; *) set -- ;; esac
# A failing input is kept; fuzz_TARGET FILE repeats it.
seconds=3
[ "${FLASHJIT_TEST_ALL-}" != 1 ] || seconds=60
mkdir "$work/found" "$work/corpus"
[ ! -e "$here/corpus/$target.tar.gz" ] || tar -xzf "$here/corpus/$target.tar.gz" -C "$work/corpus"
"$build/bin/fuzz_$target" "$work/found" "$build/fuzz-seeds/$target" "$work/corpus" "$@" \
  -max_total_time="${FLASHJIT_FUZZ_SECONDS:-$seconds}" \
  -timeout=10 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 -verbosity=0 \
  -artifact_prefix="$build/fuzz-failures/$target-" 2>"$work/log" || { tail -60 "$work/log" && exit 1; }
grep -E 'number_of_executed_units|new_units_added' "$work/log"
