#!/bin/sh
# The labels unit, cache and numerics in a build with sanitizers: sanitized.sh BUILD_FOLDER. Not, but for FLASHJIT_TEST_ALL=1,
# tests that go the same ways many times over:
#   numerics on more than one CPU target, and the 20 launches after a first, as the host's code is one for all of them
#   the oracle and its bounds in more than one dtype
#   tables of all masks, configs and models, statistics
#   specs at random, which the fuzz target `spec` reads under the same sanitizers
#   many compiles, most of whose work is the plugin's: no sanitizer sees that
set -eu
often='cpu_x86_64_v4|^All/Invariants\.SameBitsRunAfterRun'
often="$often|^Dtypes/.*/(fp16|fp32|bf16_into_bf16|fp16_into_fp16|fp32_into_fp32|bf16_into_fp32)( |\$)"
often="$often|^Mask\.|^SearchSpace\.HoldsFitting|^Manifest\.HeuristicConfigs|^DropoutStatistics\."
often="$often|^Spec\.AnyText|^Schema\.AgreesWithTheParser"
often="$often|^SharedCache\.(SixteenProcesses|KilledCompilers|FilesThatVanish)"
[ "${FLASHJIT_TEST_ALL-}" != 1 ] || often='^$'
exec ctest --test-dir "$1" --output-on-failure --no-tests=error --label-regex '^(unit|cache|numerics)$' --exclude-regex "$often"
