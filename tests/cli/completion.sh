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
expect 'train serve' flashjit prebuild llama-3-8b --use ''
expect 'int8' flashjit prebuild llama-3-8b --kv-dtype int
cd "$work"
touch own_spec.json
expect 'own_spec.json' flashjit run own
# Every verb that the help shows is offered.
for verb in $("$flashjit" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p'); do
  expect "$verb" flashjit "$verb"
done
if command -v zsh >/dev/null; then
  zsh -n "$work/zsh"
  # zsh_offers TEXT WORD...: what zsh's script gives to compadd for the last word.
  zsh_offers() {
    wanted=$1
    shift
    # shellcheck disable=SC2016
    given=$(zsh -fc 'script=$1; shift; words=("$@"); CURRENT=$#; PREFIX=${@[-1]}
      compadd() { shift; for one in "$@"; do [[ $one != $PREFIX* ]] || print -r -- $one; done }
      . $script' zsh "$work/zsh" "$@" | tr '\n' ' ')
    [ "$given" = "$wanted " ] || { echo "zsh offers '$given' for '$*', expected '$wanted'" >&2 && exit 1; }
  }
  zsh_offers 'clear' flashjit cache cl
  zsh_offers '--verify --verify-rows' flashjit run --verif
  zsh_offers 'sm_90 sm_90a' flashjit render --target sm_9
fi
if command -v fish >/dev/null; then
  fish -n "$work/fish"
  # offered TEXT LINE: what fish offers for the line, without the descriptions.
  offered() {
    [ "$(HOME=$work fish -c "source $work/fish; complete -C '$2'" | cut -f 1 | tr '\n' ' ')" = "$1 " ] ||
      { echo "fish does not offer '$1' for '$2'" >&2 && exit 1; }
  }
  offered 'clear' 'flashjit cache cl'
  offered '--verify --verify-rows' 'flashjit run --verif'
  offered 'sm_90 sm_90a' 'flashjit render --target sm_9'
fi
if "$flashjit" completion csh 2>"$work/error"; then exit 1; fi
grep -q 'there is one for bash, zsh and fish' "$work/error"
