#!/bin/bash
# The scripts of "flashjit completion": bash completes verbs, options and values by its own; zsh and fish read theirs,
# where they are installed. Usage: completion.sh FLASHJIT
set -eu
flashjit=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for shell in bash zsh fish; do "$flashjit" completion $shell >"$work/$shell"; done
# shellcheck disable=SC1091
. "$work/bash"

# candidates WORD...: what bash offers for the last word.
candidates() {
  COMP_WORDS=("$@")
  COMP_CWORD=$(($# - 1))
  COMPREPLY=()
  _flashjit
  echo "${COMPREPLY[*]}"
}
# expect TEXT WORD...
expect() {
  wanted=$1
  shift
  [ "$(candidates "$@")" = "$wanted" ] ||
    { echo "completion of '$*': '$(candidates "$@")', expected '$wanted'" >&2 && exit 1; }
}
expect 'cache' flashjit ca
expect 'clear' flashjit cache cl
expect '--verify --verify-rows' flashjit run --verif
expect 'backward' flashjit run spec.json --op b
expect 'sm_90 sm_90a' flashjit render --target sm_9
cd "$work"
touch own_spec.json
expect 'own_spec.json' flashjit run own
# Every verb that the help shows is offered.
for verb in $("$flashjit" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p'); do
  expect "$verb" flashjit "$verb"
done
for shell in zsh fish; do
  if command -v $shell >/dev/null; then $shell -n "$work/$shell"; fi
done
if "$flashjit" completion csh 2>"$work/error"; then exit 1; fi
grep -q 'there is one for bash, zsh and fish' "$work/error"
