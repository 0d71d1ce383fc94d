#!/bin/sh
# diffs.sh [PAGE]: the diffs that a page quotes, of codegen/adding_a_mask.md without PAGE, as `git apply` reads them.
exec awk '/^```diff$/ { inside = 1; next } /^```/ { inside = 0 } inside' "${1:-$(dirname "$0")/../../codegen/adding_a_mask.md}"
