#!/bin/sh
# Every relative link of a document leads to a file, and to a heading where it names one. Every document but the root
# README has a link from another. Prose has at most 120 columns. The changelog has the version of CMakeLists.txt.
# comments.sh checks the comments of code.
set -eu
cd "$(dirname "$0")/../.."
export LC_ALL=C
sh tests/checks/comments.sh
version=$(sed -n 's/^project(flashjit VERSION \([0-9.]*\) .*/\1/p' CMakeLists.txt)
grep -qx "## $version" tools/package/CHANGELOG.md ||
  { echo "tools/package/CHANGELOG.md: no section \"## $version\", the version of CMakeLists.txt" >&2; exit 1; }
find README.md cache codegen runtime templates tools tests -name '*.md' | awk '
# The anchor that GitHub makes of a heading.
function slug(text) {
  text = tolower(text)
  gsub(/[^a-z0-9_ -]/, "", text)
  gsub(/ /, "-", text)
  return text
}
function complain(where, what) {
  print where ": " what
  failed = 1
}
# The path without "." and "..".
function resolved(path) {
  while (sub(/\/\.\//, "/", path)) {}
  while (match(path, /[^\/]+\/\.\.\//)) path = substr(path, 1, RSTART - 1) substr(path, RSTART + RLENGTH)
  return path
}
{
  document = $0
  folder = document
  if (!sub(/[^\/]*$/, "", folder)) folder = ""
  fenced = number = 0
  while ((getline line < document) > 0) {
    ++number
    if (line ~ /^```/) fenced = !fenced
    columns = line
    gsub(/[\200-\277]/, "", columns)  # of a character in UTF-8 its first byte counts
    if (line !~ /^\|/ && length(columns) > 120) complain(document ":" number, length(columns) " columns, at most 120")
    if (fenced || line ~ /^    /) continue
    if (line ~ /^#+ /) {
      heading = line
      sub(/^#+ /, "", heading)
      headings[document "#" slug(heading)]
    }
    gsub(/`[^`]*`/, "", line)
    while (match(line, /\]\([^()]*\)/)) {
      link = substr(line, RSTART + 2, RLENGTH - 3)
      line = substr(line, RSTART + RLENGTH)
      if (link ~ /^[a-z]+:/) continue
      target = link
      anchor = ""
      if (match(target, /#/)) {
        anchor = substr(target, RSTART)
        target = substr(target, 1, RSTART - 1)
      }
      target = target == "" ? document : resolved(folder target)
      places[++links] = document ":" number
      if (target != document) linked[target]
      files[links] = target
      anchors[links] = anchor
    }
  }
  close(document)
  documents[document]
}
END {
  for (document in documents)
    if (document != "README.md" && !(document in linked)) complain(document, "no other document links to it")
  for (i = 1; i <= links; ++i) {
    if (system("test -e \"" files[i] "\"") != 0)
      complain(places[i], "links to " files[i] ", which does not exist")
    else if (anchors[i] != "" && !((files[i] anchors[i]) in headings))
      complain(places[i], "links to " files[i] anchors[i] ", and no heading makes that anchor")
  }
  exit failed
}' >&2
