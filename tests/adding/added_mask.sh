#!/bin/sh
# added_mask.sh FLASHJIT COMPILE_TEXT CLANG: codegen/adding_a_mask.md is true. Its command with a formula runs. Its diffs
# apply to a copy of the sources. Of the copy this compiles what renders the mask's kernels and what computes its
# oracle. A kernel for CPUs must be right by the mask's definition and by the formula; NVRTC, where there is one, must
# compile one for GPUs; a size of 0 must be refused.
# added_mask.sh: does what the page says in the copy, which takes minutes.
set -eu
sources=$(cd "$(dirname "$0")/../.." && pwd)
page=$sources/codegen/adding_a_mask.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "added_mask.sh: $1" >&2
  exit 1
}

# The page's blocks of commands: the formula's, then those that build.
awk -v work="$work" '/^```sh$/ { file = work "/commands" ++blocks; next } /^```/ { file = "" } file { print >file }' "$page"
mkdir "$work/copy"
cd "$sources"
cp -r CMakeLists.txt CMakePresets.json LICENSE codegen cache runtime templates tests tools "$work/copy"
cd "$work/copy"
if [ $# = 0 ]; then
  sh -eux "$work/commands2"
  exit
fi
flashjit=$1 compile_text=$2 clang=$3

flashjit() { "$flashjit" "$@"; }
. "$work/commands1"
sh tests/adding/diffs.sh | git apply -v || fail "$page: its diffs do not apply to the sources"

# unit NAME FILES...: compiles files together, since most of the time goes to headers.
unit() {
  name=$work/$1.cpp
  shift
  for file; do echo "#include \"$file\""; done >"$name"
  "$clang" -std=c++20 -O0 -Wall -Wextra -Werror -I. -Itemplates -I"$work" -c "$name" -o "${name%.cpp}.o"
}
families=
for family in forward_cpu forward_sm80; do
  echo "FLASHJIT_FAMILY($family)" >>"$work/families.inc"
  families="$families codegen/families/$family.cpp"
done
# Families come first: later files declare functions of the names that they have.
apart='_(cpu|cuda|sm[0-9]+a?)\.cpp$|/formula_(patterns|writer)\.cpp$'
unit codegen $families $(find codegen -name '*.cpp' | grep -Ev "$apart")
unit patterns codegen/formulas/formula_patterns.cpp tools/verify/mask.cpp
unit writer codegen/formulas/formula_writer.cpp tools/verify/row_softmax.cpp
unit formulas tools/verify/formula.cpp
unit oracle tests/adding/added_mask.cpp tools/verify/forward_oracle.cpp tools/verify/rows.cpp \
  tools/verify/report.cpp tools/verify/random_tensor.cpp runtime/dropout.cpp
"$clang" "$work"/*.o -o "$work/added_mask"

spec() { echo "{\"op\": \"forward\", \"dtype\": \"$1\", \"head_dim\": 16, \"mask\": $2}"; }
formula=$(sed -n "s/.*\"mask\": \(.*\)}'\$/\1/p" "$work/commands1")
mask=$(sed -n "s/.*\"mask\": \(.*\)}'\$/\1/p" "$work/commands2")
"$work/added_mask" render "$(spec fp32 "$mask")" x86-64-v3 >"$work/kernel.cpp"
"$clang" -std=c++20 -O1 -march=x86-64-v3 -shared -fPIC "$work/kernel.cpp" -o "$work/kernel.so"
"$work/added_mask" verify "$(spec fp32 "$mask")" "$work/kernel.so" "$(spec fp32 "$formula")" ||
  fail "the kernel with $mask is wrong"
"$work/added_mask" refusal "$(spec fp32 "$(echo "$mask" | sed 's/[0-9][0-9]*/0/')")" || fail "a size of 0 is accepted"
"$work/added_mask" render "$(spec fp16 "$mask")" sm_80 >"$work/kernel.cu"
"$compile_text" sm_80 <"$work/kernel.cu" || [ $? = 77 ] || fail "NVRTC does not compile the kernel with $mask"
