#!/bin/sh
# The packages that cpack makes of a build: for Debian, which are installed, used and removed in a debootstrap of each
# release where that works, and the archive of the sources. Usage: packages.sh BUILD_FOLDER
set -eu
build=$(realpath "$1")
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "$*" >&2
  exit 1
}
for tool in dpkg-deb dpkg-shlibdeps; do
  command -v $tool >/dev/null || { echo "skipped: there is no $tool" && exit 77; }
done

echo '== packages'
cpack --config "$build/CPackConfig.cmake" -D CPACK_DEBIAN_COMPRESSION_TYPE=none -B "$work/debs" >"$work/cpack.log" 2>&1 ||
  { cat "$work/cpack.log" && exit 1; }
rm -rf "$work/debs/_CPack_Packages"
abi=$(sed -n 's/^#define FLASHJIT_ABI_VERSION //p' runtime/flashjit.h)
names=$(for deb in "$work"/debs/*.deb; do dpkg-deb --field "$deb" Package; done | sort | tr '\n' ' ')
wanted="flashjit libflashjit$abi libflashjit-dev libflashjit-llvm libflashjit-remote "
[ "$names" = "$(echo "$wanted" | tr ' ' '\n' | sed '/^$/d' | sort | tr '\n' ' ')" ] || fail "cpack made $names"
for deb in "$work"/debs/*.deb; do
  [ -n "$(dpkg-deb --field "$deb" Depends)" ] || fail "$deb depends on nothing"
  # Libraries of this machine alone, such as NVRTC's, belong into none.
  if dpkg-deb --contents "$deb" | grep -E '/nvrtc|/test'; then fail "^ is in $deb"; fi
done

# use ROOT: computes with the command, and with a program that is built against the packages if there is a compiler.
use='set -e
flashjit run /usr/share/doc/flashjit/examples/full_fp32.json --seqlen-q 32 --verify >/dev/null
if command -v c++ >/dev/null; then
  c++ -std=c++20 /usr/share/doc/flashjit/examples/attention.cpp $(pkg-config --cflags --libs flashjit) -o /tmp/attention
  /tmp/attention
fi'

echo '== each release'
site=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | grep -v security | head -1)
for release in bookworm trixie; do
  root=$work/$release
  if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null ||
    ! debootstrap --variant=minbase --include=g++,pkg-config "$release" "$root" "$site" >"$work/$release.log" 2>&1; then
    echo "$release: not tried, there is no debootstrap or no archive of packages"
    continue
  fi
  cp "$work"/debs/*.deb "$root/tmp"
  # Each release has another version of hiredis, which has no stable interface.
  # shellcheck disable=SC1091
  [ "$release" = "$(. /etc/os-release && echo "${VERSION_CODENAME-}")" ] || rm "$root"/tmp/libflashjit-remote_*.deb
  chroot "$root" sh -c 'apt-get install -y -qq --no-install-recommends /tmp/*.deb' >"$work/$release.log" 2>&1 ||
    { tail -20 "$work/$release.log" && fail "$release: the packages cannot be installed"; }
  chroot "$root" env HOME=/tmp sh -c "$use"
  chroot "$root" sh -c 'apt-get purge -y -qq $(dpkg-query --show --showformat "\${Package} " "*flashjit*")' \
    >"$work/$release.log" 2>&1 || { tail -20 "$work/$release.log" && fail "$release: the packages cannot be removed"; }
  left=$(find "$root/usr" "$root/etc" -name '*flashjit*')
  [ -z "$left" ] || fail "$release: removal left $left"
  echo "$release: installed, used, removed"
done

echo '== sources'
cpack --config "$build/CPackSourceConfig.cmake" -B "$work/sources" >"$work/cpack.log" 2>&1 ||
  { cat "$work/cpack.log" && exit 1; }
tar -xzf "$work"/sources/flashjit-*.tar.gz -C "$work"
cd "$work"/flashjit-*/
[ ! -e .git ] && [ ! -e build ] || fail "the archive has .git or build"
# Every file of the repository is in it, and without git it configures; the command and the oracle can be left out.
if git -C "$OLDPWD" ls-files >"$work/files" 2>/dev/null; then
  while read -r file; do [ -e "$file" ] || fail "the archive lacks $file"; done <"$work/files"
fi
cmake -S . -B "$work/embedded" -G Ninja -DFLASHJIT_COMMAND=OFF -DFLASHJIT_TESTS=OFF >"$work/cmake.log" 2>&1 ||
  { tail -20 "$work/cmake.log" && exit 1; }
if grep -E 'tools/(command|verify|manifest)/' "$work/embedded/build.ninja" | head -3 | grep .; then
  fail "^ is built with -DFLASHJIT_COMMAND=OFF"
fi
if cmake -S . -B "$work/refused" -G Ninja -DFLASHJIT_COMMAND=OFF -DFLASHJIT_TESTS=ON >"$work/cmake.log" 2>&1; then
  fail "tests without the command are not refused"
fi
grep -q 'need the command' "$work/cmake.log"
