#!/bin/sh
# The pages of tools/reference are what the command writes from its tables, and the environment is read by its table
# alone. Usage: reference.sh FLASHJIT [--fix]
set -eu
flashjit=$(realpath "$1")
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
for page in tools/reference/*.md; do
  name=$(basename "$page" .md)
  [ "$name" != README ] || continue
  "$flashjit" reference "$name" >"$work/$name.md"
  if [ "${2-}" = --fix ]; then
    cp "$work/$name.md" "$page"
  elif ! diff -u "$page" "$work/$name.md" >"$work/difference"; then
    head -20 "$work/difference" >&2
    echo "$page: not what the tables say; tests/checks/reference.sh FLASHJIT --fix writes it" >&2
    failed=1
  fi
done
# A page that the command knows and the folder lacks.
pages=$("$flashjit" reference --help | sed -n 's/.*PAGE.*REQUIRED *//p' | tr -d ',' | sed 's/ or / /; s/ and / /')
for name in ${pages:?the help of flashjit reference names no page}; do
  [ -e "tools/reference/$name.md" ] || { echo "tools/reference/$name.md is missing" >&2 && failed=1; }
done
if grep -rnE --include='*.cpp' --include='*.hpp' '\b(secure_)?getenv *\(' codegen cache runtime tools |
  grep -v '^cache/environment\.cpp:'; then
  echo "^ reads the environment beside cache/environment.hpp, so the reference lacks the variable" >&2
  failed=1
fi
for variable in $(grep -rhoE --include='*.py' "environ[^\"']*[\"'](FLASHJIT|CUDA)_[A-Z_]+" runtime/python |
  grep -oE '(FLASHJIT|CUDA)_[A-Z_]+' | sort -u); do
  grep -q "\"$variable\"" cache/environment.hpp ||
    { echo "the package for Python reads $variable, which cache/environment.hpp lacks" >&2 && failed=1; }
done
exit $failed
