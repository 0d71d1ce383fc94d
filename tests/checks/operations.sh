#!/bin/sh
# Checks that only the families of an operation ask which operation a spec has. Other code asks the operation's row
# in codegen/spec/operation.hpp, so that a new operation is a new row and no test for others is forgotten.
set -eu
cd "$(dirname "$0")/../.."
value='(flashjit::)?Operation::[a-z_]+'
member='[a-z_.>()-]*[.>]op_?\b'
asks="[=!]= *$value|$value *[=!]=|case +$value|using enum (flashjit::)?Operation;|$member *[=!]=|[=!]= *$member"
asks="$asks|to_string\($member\) *[=!]=|\bop_ *[=!]="
if grep -rnE --include='*.cpp' --include='*.hpp' "$asks" codegen runtime cache tools tests/support |
  grep -v '^codegen/families/'; then
  echo "^ asks which operation it is; a field of OperationInfo (codegen/spec/operation.hpp) would say what is meant" >&2
  exit 1
fi
