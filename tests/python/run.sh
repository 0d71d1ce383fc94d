#!/bin/sh
# run.sh FOLDER TEST: runs the test in that environment; exit code 77 if there is none.
set -eu
if [ ! -e "$1/made" ]; then
  cat "$1/why" 2>/dev/null || echo "$1 is missing: tools/test --python makes it"
  exit 77
fi
# Compiled modules of the packages stay in the environment, so that each test need not compile what it imports.
export PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX="$1/pycache"
# Threads of PyTorch's own would wait for each other longer than they compute.
export OMP_NUM_THREADS=1
exec "$1/bin/python" -W error -X faulthandler "$2"
