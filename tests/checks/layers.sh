#!/bin/sh
# Checks that includes point one way: templates <- codegen <- cache <- runtime <- tools <- tests.
set -eu
cd "$(dirname "$0")/../.."
status=0
above='codegen|cache|runtime|tools|tests'
for folder in templates codegen cache runtime tools; do
  [ "$folder" = templates ] || above=${above#*|}
  if grep -rnE "^[[:space:]]*#[[:space:]]*include[[:space:]]*[\"<](\.\./)*($above)/" "$folder"; then
    echo "^ $folder/ may not include from: $above" >&2
    status=1
  fi
done
exit $status
