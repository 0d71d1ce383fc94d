#!/bin/sh
# deploy.sh BUILD_FOLDER: the files of tools/deploy are what their programs take, and `show` shows what it says.
set -eu
build=$(realpath "$1")
deploy=$(cd "$(dirname "$0")/../../tools/deploy" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PATH=$PATH:/usr/sbin:/sbin
if command -v systemd-analyze >/dev/null; then
  # The command lies elsewhere here than where it is installed.
  sed "s|/usr/bin/flashjit|$build/bin/flashjit|" "$deploy/flashjit-serve.service" >"$work/flashjit-serve.service"
  cp "$deploy/flashjit-serve.socket" "$work"
  systemd-analyze verify --man=no "$work/flashjit-serve.socket" "$work/flashjit-serve.service" >"$work/said" 2>&1 || true
  if grep flashjit-serve "$work/said"; then exit 1; fi
fi
# Options that the unit and the image give are options that the command has.
"$build/bin/flashjit" serve --help >"$work/help"
for option in $(grep -ohE -e '--[a-z-]+' "$deploy/flashjit-serve.service") \
  $(sed -n '/^ENTRYPOINT/,$p' "$deploy/Containerfile" | grep -oE -e '--[a-z-]+'); do
  grep -q -e "$option" "$work/help" || { echo "flashjit serve has no $option" && exit 1; }
done
"$deploy/show" "$build"
