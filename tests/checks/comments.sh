#!/bin/sh
# Comments that clang-format broke. It wraps a line that is too long, and puts the rest of it at the indentation of the
# line, not under the text of the item that the line begins:
#   // 2. Two products and a sum are off by at most 2^-23, since |c|, |s| <= 1;
#   // with
#   //    tables 2^-23 times the larger of 1, |c| and |s|.
# An item is "1. text", "A. text", "- text" or "label  text".
set -eu
cd "$(dirname "$0")/../.."
export LC_ALL=C
find codegen cache runtime templates tools tests -type f \
  \( -name '*.cpp' -o -name '*.hpp' -o -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) |
  awk -v limit="$(sed -n 's/^ColumnLimit: //p' .clang-format)" '
# The column at which the text of an item begins; 0 if the comment begins none.
function text_column(column, comment) {
  if (match(comment, /^([0-9]+\.|[A-Z]\.|-) +/) || match(comment, /^[^ ]+( [^ ]+)*  +/)) return column + RLENGTH
  return 0
}
function first_word(line,   words) {
  split(line, words, " ")
  return words[2]
}
{
  file = $0
  number = column = suspect = 0
  while ((getline line < file) > 0) {
    ++number
    if (line !~ /^ *\/\/ *[^ ]/) {
      column = suspect = 0
      continue
    }
    match(line, /^ *\/\/ */)
    here = RLENGTH
    if (suspect && here == column) {
      print file ":" suspect ": not under the text of its item, as the next line is: shorten the line before it"
      failed = 1
    }
    suspect = 0
    begins = text_column(here, substr(line, here + 1))
    if (begins > 0)
      column = begins
    else if (here < column && length(before) + 1 + length(first_word(line)) > limit)
      suspect = number
    before = line
  }
  close(file)
}
END { exit failed }' >&2
