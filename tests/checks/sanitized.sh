#!/bin/sh
# sanitized.sh BUILD_FOLDER: runs what the folder holds of the labels unit, cache and numerics, a build with sanitizers.
# Unless FLASHJIT_TEST_ALL=1, it leaves out tests that take the same paths many times over:
#   numerics on more than one CPU target, and the 20 launches after a first: the host's code is the same for all
#   the oracle and its bounds in more than one dtype
#   tables of all masks, configs, covering arrays and models, statistics
#   the simulation of a fleet
#   requests for a kernel of each config, which the fuzz target `compile_request` reads under the same sanitizers
#   specs at random, which the fuzz target `spec` reads under the same sanitizers
#   many compiles, which work mostly in the plugin, where no sanitizer looks
#   under the address sanitizer, the engine's policies, which run under the thread sanitizer
set -eu
often='cpu_x86_64_v4|^All/Invariants\.SameBitsRunAfterRun'
often="$often|^Dtypes/.*/(fp16|fp32|bf16_into_bf16|fp16_into_fp16|fp32_into_fp32|bf16_into_fp32)( |\$)"
often="$often|^Mask\.|^SearchSpace\.(HoldsFitting|OfBackwards|OfTheWidest|BlockSparse|BatchInvariantFixesBlocks\$)"
often="$often|^Of/Covering\.|^Manifest\.(HeuristicConfigs|AModelIs|UsesOf)"
often="$often|^DropoutStatistics\.|^DecodePartition\.FitsTheConfig|^TileSchedule\."
often="$often|^BackwardOracle\.|^Spec\.AnyText|^Schema\.AgreesWithTheParser"
often="$often|^Fleet\.|^CompileRequest\.IsReadAsItIsWritten"
often="$often|^SharedCache\.(SixteenProcesses|KilledCompilers|FilesThatVanish)"
often="$often|^BadEntries\.(OfALayer|AreAnError|MetBy|DoNotCount|GoodOnes)"
case $1 in */asan) often="$often|^PolicyTest\." ;; esac
[ "${FLASHJIT_TEST_ALL-}" != 1 ] || often='^$'
# Its threads race by intent.
case $1 in */tsan) often="$often|^ChangingLengths\." ;; esac
exec ctest --test-dir "$1" --output-on-failure --no-tests=error --label-regex '^(unit|cache|numerics)$' --exclude-regex "$often"
