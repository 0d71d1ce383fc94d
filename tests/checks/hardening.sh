#!/bin/sh
# hardening.sh LIBRARY PLUGIN COMMAND: checks what harden() in the CMakeLists.txt of the root promises of these files.
set -eu
failed=0
# expect FILE WHAT PATTERN COMMAND...: the command's output has a line that matches
expect() {
  file=$1 what=$2 pattern=$3
  shift 3
  "$@" "$file" 2>/dev/null | grep -qE "$pattern" || { echo "$file: $what" >&2 && failed=1; }
}

for file in "$@"; do
  expect "$file" 'no RELRO (-z relro)' 'GNU_RELRO' readelf --segments --wide
  expect "$file" 'lazy binding leaves relocations writable (-z now)' 'FLAGS_1.* NOW' readelf --dynamic --wide
  expect "$file" 'executable stack' 'GNU_STACK .* RW ' readelf --segments --wide
  expect "$file" 'fixed address (-pie)' 'Type: *DYN' readelf --file-header
  expect "$file" 'no stack protectors' ' U __stack_chk_fail' nm --dynamic --undefined-only
  expect "$file" 'library calls are not checked (_FORTIFY_SOURCE)' ' U __[a-z]+_chk(@|$)' \
    nm --dynamic --undefined-only
  expect "$file" 'no mark for shadow stacks' 'x86 feature:.* SHSTK' readelf --notes --wide
done

# Only the library is marked: on some systems the C library's start files, and LLVM's libraries, have no landing pads.
expect "$1" 'no mark for landing pads' 'x86 feature: IBT' readelf --notes --wide
if readelf --dynamic --wide "$1" | grep -qE '\((INIT|FINI)\)'; then
  echo "$1: the C library's _init or _fini is called, which may have no landing pad" >&2
  failed=1
fi
expect "$1" 'no landing pad' 'endbr64' objdump --disassemble=flashjit_engine_create
expect "$2" 'no landing pad' 'endbr64' objdump --disassemble=flashjit_llvm_plugin
expect "$3" 'no landing pad' 'endbr64' objdump --disassemble=main
exit $failed
