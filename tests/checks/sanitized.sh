#!/bin/sh
# The labels unit, cache and numerics in a build with sanitizers: sanitized.sh BUILD_FOLDER. Not, but for FLASHJIT_TEST_ALL=1,
# what goes the same ways many times over: numerics on more than one CPU target, as the host's code is one for all.
set -eu
often='^Mask\.|^DropoutStatistics\.|^SearchSpace\.HoldsFitting|^SharedCache\.(SixteenProcesses|KilledCompilers)|cpu_x86_64_v4'
[ "${FLASHJIT_TEST_ALL-}" != 1 ] || often='^$'
exec ctest --test-dir "$1" --output-on-failure --no-tests=error --label-regex '^(unit|cache|numerics)$' --exclude-regex "$often"
