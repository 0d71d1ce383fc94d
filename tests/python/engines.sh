#!/bin/sh
# engines.sh PYTHON FOLDER VERSIONS: puts the interface files of inference engines, from the wheels of VERSIONS, into the
# folder, unless they are there. If that fails, for want of a registry, FOLDER/why says so, and the test is skipped.
set -eu
python=$1 folder=$2 versions=$3
cmp -s "$versions" "$folder/made" && exit 0
rm -rf "$folder"
mkdir -p "$folder"
if ! "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
  --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --dest "$folder/wheels" --requirement "$versions" \
  >"$folder/log" 2>&1; then
  { echo "the wheels of $versions cannot be downloaded:" && tail -n 3 "$folder/log"; } >"$folder/why"
  exit 0
fi
"$python" - "$folder" <<'END'
import pathlib, sys, zipfile

folder = pathlib.Path(sys.argv[1])
kept = ("vllm/v1/attention/", "vllm/utils/import_utils.py", "sglang/srt/layers/attention/", "sglang/srt/arg_groups/")
for wheel in (folder / "wheels").iterdir():
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder, [name for name in files.namelist() if name.startswith(kept) and name.endswith(".py")])
END
rm -r "$folder/wheels"
cp "$versions" "$folder/made"
