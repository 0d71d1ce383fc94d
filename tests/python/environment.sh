#!/bin/sh
# environment.sh PYTHON FOLDER REQUIREMENTS: makes a virtual environment of the tests from that file, unless it is there.
# If that fails, for want of a registry, FOLDER/why says so, and the tests are skipped.
set -eu
python=$1 folder=$2 wanted=$3
cmp -s "$wanted" "$folder/made" && exit 0
rm -rf "$folder"
"$python" -m venv "$folder"
if "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --requirement "$wanted" \
  >"$folder/log" 2>&1; then
  cp "$wanted" "$folder/made"
else
  { echo "the packages of $wanted cannot be installed:" && tail -n 3 "$folder/log"; } >"$folder/why"
fi
