#!/bin/sh
# fetch_nvrtc.sh: tools/fetch-nvrtc unpacks a wheel only if it has the digest that the requirements state. pip finds the
# test's own wheel instead of PyPI's.
set -eu
cd "$(dirname "$0")/../.."
if ! python3 -m pip --version >/dev/null 2>&1; then
  echo "pip is not installed"
  exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  cat "$work/log"
  echo "$*" >&2
  exit 1
}
fetch() {
  PIP_NO_INDEX=1 PIP_FIND_LINKS=$work/index tools/fetch-nvrtc "$1" "$work/nvrtc" >"$work/log" 2>&1
}

mkdir -p "$work/index" "$work/nvrtc"
python3 - "$work/index" <<'END'
import sys, zipfile
version = "13.0.88"
for line in open("tools/nvrtc_cuda13.txt"):
    if line.startswith("nvidia-cuda-nvrtc=="):
        version = line.split("==")[1].split()[0]
info = f"nvidia_cuda_nvrtc-{version}.dist-info/"
with zipfile.ZipFile(f"{sys.argv[1]}/nvidia_cuda_nvrtc-{version}-py3-none-any.whl", "w") as wheel:
    wheel.writestr(info + "METADATA", f"Metadata-Version: 2.1\nName: nvidia-cuda-nvrtc\nVersion: {version}\n")
    wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(info + "RECORD", "")
    wheel.writestr("nvidia/cu13/lib/libnvrtc.so.13", "not PyPI's")
END
echo kept >"$work/nvrtc/libnvrtc.so.13"

status=0
fetch tools/nvrtc_cuda13.txt || status=$?
[ "$status" = 3 ] || fail "exit code $status for a wheel with another digest"
grep -q 'is not the one whose digest is in tools/nvrtc_cuda13.txt' "$work/log" || fail "the message does not say why"
[ "$(cat "$work/nvrtc/libnvrtc.so.13")" = kept ] || fail "a wheel with another digest was unpacked"

# Requirements without a digest are refused.
sed 's/ .*//;/--hash/d' tools/nvrtc_cuda13.txt | grep -v '^#' >"$work/no_digest.txt"
if fetch "$work/no_digest.txt"; then fail "no digest is asked for"; fi

digest=$(sha256sum "$work"/index/*.whl | cut -d' ' -f1)
sed "s/ .*/ --hash=sha256:$digest/;/^ /d;/^#/d" tools/nvrtc_cuda13.txt >"$work/digest.txt"
fetch "$work/digest.txt" || fail "a wheel with the digest is refused"
[ "$(cat "$work/nvrtc/libnvrtc.so.13")" = "not PyPI's" ] || fail "the wheel was not unpacked"
[ -z "$(find "$work" -maxdepth 1 -name 'nvrtc.*')" ] || fail "files are left behind"
