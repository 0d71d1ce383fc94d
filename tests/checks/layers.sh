#!/bin/sh
# Checks that includes point one way: templates <- codegen <- cache <- runtime <- tools <- tests, and inside codegen
# base <- spec <- arguments <- formulas <- families <- codegen itself.
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
above='spec|arguments|formulas|families|[a-z_]*\.hpp"'
for room in base spec arguments formulas families; do
  [ "$room" = base ] || above=${above#*|}
  if grep -rnE "^[[:space:]]*#[[:space:]]*include[[:space:]]*\"(codegen|\.\.)/($above)" "codegen/$room"; then
    echo "^ codegen/$room/ may not include from: $above" >&2
    status=1
  fi
done
exit $status
