#!/bin/sh
# keep.sh BUILD_FOLDER TARGET SECONDS: makes a target's kept corpus anew,
# from the old one and everything that so many seconds of fuzzing find.
set -eu
build=$1
target=$2
seconds=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/found" "$work/smallest"
kept="$here/corpus/$target.tar.gz"
[ ! -e "$kept" ] || tar -xzf "$kept" -C "$work/found"
"$build/bin/fuzz_$target" "$work/found" "$build/fuzz-seeds/$target" -max_total_time="$seconds" -max_len=65536
"$build/bin/fuzz_$target" -merge=1 -use_counters=0 -max_len=16384 "$work/smallest" "$work/found"
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -C "$work/smallest" -c . | gzip -9n >"$kept"
