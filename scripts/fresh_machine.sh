#!/usr/bin/env bash
# `make test-fresh`: runs the README's commands on fresh, minimal Debian systems as an ordinary user, and prints a table
# of times. Needs root (chroot, mounts) and Python >= 3.11; installs debootstrap with apt if it is missing.
#   scripts/fresh_machine.sh --list                     lists the cases; needs no root
#   scripts/fresh_machine.sh --only debian12:demo       runs those that have all of these words (several --only: any)
#   scripts/fresh_machine.sh --help                     lists the options
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    printf 'fresh_machine: %s\n' "$*" >&2
    exit 1
}

python=
for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[[ -n $python ]] || fail "no Python >= 3.11 found: name it with PYTHON=/path/to/python3"

case " $* " in *" --list "* | *" --dry-run "* | *" --help "* | *" -h "*) exec "$python" -m scripts.fresh_machine "$@" ;; esac

((EUID == 0)) || fail "building a system needs root (debootstrap, mount and chroot): run it as root, for example" \
    "'sudo make test-fresh'. The commands under test run as an ordinary user"
if ! command -v debootstrap >/dev/null; then
    command -v apt-get >/dev/null || fail "no debootstrap and no apt-get: install debootstrap"
    echo "fresh_machine: installing debootstrap with apt"
    log=$(mktemp)
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y debootstrap; } >"$log" 2>&1; then
        tail -5 "$log" >&2
        fail "apt-get install debootstrap failed (see above and $log)"
    fi
    rm -f "$log"
fi
for tool in git unshare setpriv chroot taskset mount; do
    command -v "$tool" >/dev/null || fail "no $tool command: install it (Debian: git, util-linux, coreutils)"
done
unshare --mount --pid --fork true || fail "this kernel or container permits no mount and PID namespaces (unshare)"
exec "$python" -m scripts.fresh_machine "$@"
