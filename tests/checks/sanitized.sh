#!/bin/sh
# The labels unit, cache and numerics in a build with sanitizers: sanitized.sh BUILD_FOLDER. Not, but for FLASHJIT_TEST_ALL=1,
# what goes the same ways many times over.
set -eu
often='^Mask\.|^DropoutStatistics\.|^SearchSpace\.HoldsFitting|^SharedCache\.SixteenProcesses'
[ "${FLASHJIT_TEST_ALL-}" != 1 ] || often='^$'
exec ctest --test-dir "$1" --output-on-failure --no-tests=error --label-regex '^(unit|cache|numerics)$' --exclude-regex "$often"
