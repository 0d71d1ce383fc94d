#!/bin/sh
# Installs the runtime packages on this machine, uses them and removes them: for a release that debootstrap cannot make
# here, as Ubuntu 24.04. Needs root; keeps nothing. Usage: runtime_packages.sh FOLDER
#   FOLDER/debs      libflashjit*.deb and flashjit*.deb, of cpack
#   FOLDER/kernels   optional: a folder of prebuild that has the kernel of spec.json for this CPU or a lesser target, for
#                    machines to which no libflashjit-llvm is brought
#   FOLDER/spec.json what is computed and verified, on the CPU and on a GPU if there is one
set -eu
folder=$(realpath "$1")
[ "$(id -u)" = 0 ] || { echo "runtime_packages.sh: needs root" >&2 && exit 64; }
work=$(mktemp -d)
# shellcheck disable=SC1091
. /etc/os-release
names=$(for deb in "$folder"/debs/*.deb; do dpkg-deb --field "$deb" Package; done | tr '\n' ' ')
for name in $names; do
  ! dpkg-query --show "$name" >/dev/null 2>&1 || { echo "$name is installed already" >&2 && exit 64; }
done
# shellcheck disable=SC2086 # names are words
trap 'dpkg --purge $names >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
dpkg --install "$folder"/debs/*.deb >"$work/log" 2>&1 || { cat "$work/log" && exit 1; }

export FLASHJIT_CACHE_DIR="$work/cache"
cd "$work"
if [ -d "$folder/kernels" ]; then
  cp -r "$folder/kernels" "$work/kernels"
  chmod -R go-w "$work/kernels"
  export FLASHJIT_CACHE_PATH="$work/kernels"
fi
[ "$(command -v flashjit)" = /usr/bin/flashjit ]
flashjit --version
flashjit doctor || [ $? = 4 ] || [ $? = 5 ]
flashjit run "$folder/spec.json" --device cpu --seqlen-q 64 --verify
if flashjit doctor --json | grep -q '"cuda": true'; then
  flashjit run "$folder/spec.json" --device cuda:0 --seqlen-q 64 --verify
fi

# shellcheck disable=SC2086
dpkg --purge $names >"$work/log" 2>&1 || { cat "$work/log" && exit 1; }
left=$(find /usr /etc -name '*flashjit*' -not -path '*/site-packages/*' 2>/dev/null)
[ -z "$left" ] || { echo "removal left $left" && exit 1; }
echo "$PRETTY_NAME: installed, used, removed"
