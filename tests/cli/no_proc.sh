#!/bin/sh
# no_proc.sh FLASHJIT: without /proc, as in a chroot or a hardened container, the command finds the plugin beside its
# library, or says why not.
set -eu
flashjit=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mount_namespace='unshare --mount'
[ "$(id -u)" = 0 ] || mount_namespace='unshare --map-root-user --mount'
if ! $mount_namespace mount -t tmpfs tmpfs /proc 2>/dev/null; then
  echo "no mount namespaces here"
  exit 77
fi

spec='{"op": "forward", "dtype": "fp32", "head_dim": 16}'
# without_proc COMMAND...: compiles a kernel
without_proc() {
  $mount_namespace sh -c 'mount -t tmpfs tmpfs /proc && exec "$@"' sh \
    "$@" compile "$spec" --target x86-64-v3 --cache-dir '' >"$work/out" 2>&1
}
fail() {
  cat "$work/out"
  echo "$*" >&2
  exit 1
}

without_proc "$flashjit" || fail "an absolute path fails"
cd "$(dirname "$flashjit")"
without_proc "./$(basename "$flashjit")" || fail "a relative path fails"
ln -s "$flashjit" "$work/link"
without_proc "$work/link" || fail "a symbolic link fails"

# A set-user-id program does not believe its caller where it lies.
[ "$(id -u)" = 0 ] || exit 0
cp "$flashjit" "$work/secure"
chmod 0755 "$work"
chown 65534 "$work/secure"
chmod 4755 "$work/secure"
if without_proc "$work/secure"; then fail "a set-user-id program finds a plugin beside itself"; fi
grep -q 'whose folder is unknown: there is no /proc' "$work/out" || fail "the message does not say why"
