#!/bin/sh
# run.sh FOLDER TEST: runs the test in that environment; exit code 77 if there is none.
set -eu
if [ ! -e "$1/made" ]; then
  cat "$1/why" 2>/dev/null || echo "$1 is missing: tools/test --python makes it"
  exit 77
fi
exec "$1/bin/python" -W error -X faulthandler "$2"
