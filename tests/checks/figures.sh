#!/bin/sh
# Pages have the figures of tests/bench/results, and mark those of earlier kernels. In a copy, an edit of a header marks
# the figures that it takes part in, and an edit of a figure is found.
set -eu
cd "$(dirname "$0")/../.."
tests/bench/figures
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/tests"
cp -r README.md templates "$work"
cp -r tests/bench "$work/tests"
cd "$work"
# The copy's figures are of today's kernels.
python3 - <<'END'
import json, pathlib, subprocess
path = pathlib.Path("tests/bench/results/models.json")
result = json.loads(path.read_text())
for series in result["series"].values():
    told = subprocess.run(["tests/bench/figures", "--digest", *series["templates"]], capture_output=True, text=True, check=True)
    series["digest"] = told.stdout.strip()
path.write_text(json.dumps(result))
END
tests/bench/figures --fix
if grep -q ' (earlier kernels)' README.md; then
  echo "figures of today's kernels are marked as those of earlier ones" >&2
  exit 1
fi
echo '// edited' >>templates/cuda/online_softmax.cuh
if tests/bench/figures 2>errors; then
  echo 'tests/bench/figures does not see that a header has changed' >&2
  exit 1
fi
tests/bench/figures --fix
tests/bench/figures
grep -q ' (earlier kernels)' README.md && grep -q 'earlier kernels' tests/bench/models.svg ||
  { echo 'figures of a header that was edited are not marked' >&2 && exit 1; }
sed -i 's/^MIT licence/5<!-- figure: models.forward.rest_mean 2 --> MIT licence/' README.md
if tests/bench/figures 2>errors; then
  echo 'tests/bench/figures does not see that a figure is not that of its result' >&2
  exit 1
fi
grep -q 'README.md' errors
