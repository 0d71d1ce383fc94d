#!/bin/sh
# shared_library.sh LIBRARY: checks that libflashjit.so needs only the C and C++ run-time libraries, exports only the
# public interface, and has FLASHJIT_ABI_VERSION in its soname.
set -eu
needed=$(readelf --dynamic --wide "$1" | sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p')
for name in $needed; do
  case "$name" in
    libc.so.* | libm.so.* | libstdc++.so.* | libgcc_s.so.* | ld-linux-*) ;;
    *)
      echo "$1 depends on $name" >&2
      exit 1
      ;;
  esac
done
if nm --dynamic --defined-only --demangle "$1" | cut -d' ' -f3- |
  grep -vE '^(flashjit_|flashjit::|(typeinfo|typeinfo name|vtable) for flashjit::)'; then
  echo "^ exported by $1, but not part of its interface" >&2
  exit 1
fi
nm --dynamic --defined-only --demangle "$1" | grep -q 'flashjit::version()'
abi=$(sed -n 's/^#define FLASHJIT_ABI_VERSION //p' "$(dirname "$0")/../../runtime/flashjit.h")
soname=$(readelf --dynamic --wide "$1" | sed -nE 's/.*\(SONAME\).*\[(.*)\]/\1/p')
[ "$soname" = "libflashjit.so.$abi" ] ||
  { echo "$1 has the soname $soname, and FLASHJIT_ABI_VERSION is $abi" >&2 && exit 1; }
