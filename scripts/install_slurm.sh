#!/usr/bin/env bash
# Installs SLURM and munge, of which `make test-slurm` and `megads rehearse` start a private cluster on this machine.
# Does nothing where they are found; without root or apt-get it says so and succeeds: those tests then skip themselves
# with the same reason. Nothing is started: the daemons of the packages stay off.
set -euo pipefail

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
missing=()
for name in munged slurmctld slurmd sbatch srun; do
    command -v "$name" >/dev/null || missing+=("$name")
done
if ((${#missing[@]} == 0)); then
    echo "slurm: $(slurmctld -V) is there already"
    exit 0
fi
if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
    echo "slurm: no ${missing[*]}, and no apt-get or no root to install them: the tests on SLURM skip themselves" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# Packages start their daemons on installation; 101 forbids it (policy-rc.d of Debian).
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null
echo "slurm: installed $(slurmctld -V)"
