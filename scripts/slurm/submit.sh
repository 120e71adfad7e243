#!/usr/bin/env bash
# Submits scripts/slurm/train.sbatch, alone or as a chain of jobs that continue one run.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/slurm/submit.sh [--dry-run] [--chain=K] [--<option of sbatch>=<value> ...] <overrides of megads train ...>

  --dry-run   submit nothing: show the sbatch command line, SLURM's answer to it, and the dry run of megads train
  --chain=K   submit a chain of K jobs, for a run longer than the time limit of a job; each continues the run of the job
              before; the remaining jobs are cancelled when the run is finished, stopped or refused
  Arguments that begin with -- are options of sbatch, as in --nodes=4 or --nodes 4; all others are overrides. Without
  --nodes, their number follows from the layout and --gpus-per-node (or cluster.ranks_per_node).

  scripts/slurm/submit.sh --dry-run --nodes=2 --gpus-per-node=4 experiment=demo parallel.tp=2 parallel.pp=2
  scripts/slurm/submit.sh --chain=5 --nodes=48 --gpus-per-node=8 experiment=bloom_176b
TEXT
}

script="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/train.sbatch"
dry_run=false
chain=0
options=()
overrides=()
words=()
# --nodes 4 is --nodes=4; an override has a =, and another option begins with -.
while (($# > 0)); do
    if [[ "$1" =~ ^--[a-z-]+$ && "$1" != --dry-run && "${2:-}" =~ ^[^-=][^=]*$ ]]; then
        words+=("$1=$2")
        shift
    else
        words+=("$1")
    fi
    shift
done
for word in "${words[@]}"; do
    case "$word" in
        -h | --help) usage && exit 0 ;;
        --dry-run) dry_run=true ;;
        --chain=*) chain="${word#--chain=}" ;;
        --*) options+=("$word") ;;
        -*)
            echo "submit.sh: $word: write options of sbatch in their long form, as in --nodes=4" >&2
            exit 2
            ;;
        *) overrides+=("$word") ;;
    esac
    # The failure of a node must not end a job that has a spare node.
    if [[ "$word" =~ ^cluster\.spare_nodes=[1-9] ]]; then
        options+=("--no-kill")
    fi
done
if ((${#overrides[@]} == 0)); then
    usage >&2
    exit 2
fi
if ! [[ "$chain" =~ ^[0-9]+$ ]]; then
    echo "submit.sh: --chain=$chain: want a number of jobs" >&2
    exit 2
fi
if ((chain > 0)); then
    options+=("--array=0-$((chain - 1))%1")
    overrides+=("cluster.chain=true")
fi

# Value that sbatch uses for an option: the last one on the command line, else the one in the script.
option() {
    local found
    found="$(printf '%s\n' "${options[@]}" | sed -n "s/^--$1=//p" | tail -n 1)"
    if [[ -z "$found" ]]; then
        found="$(sed -n "s/^#SBATCH --$1=//p" "$script" | tail -n 1)"
    fi
    printf '%s' "$found"
}

gpus="$(option gpus-per-node)"
gpus="${gpus##*:}" # as in a100:8
# What the options do not say; a time limit that the partition does not allow would wait for ever.
# On a login node without megads neither is known.
derived=""
if command -v megads >/dev/null; then
    # Not from its first line, which names a shell if the environment is in a folder with a space.
    python="$(dirname "$(readlink -f "$(command -v megads)")")/python"
    [[ -x "$python" ]] || python=python3
    derived="$("$python" -m megads.cli.submission --nodes="$(option nodes)" --gpus-per-node="$gpus" \
        --time="$(option time)" --partition="$(option partition)" -- "${options[@]}" -- "${overrides[@]}")"
fi
if [[ -n "$derived" ]]; then
    options+=("$derived")
fi

line=(sbatch "${options[@]}" "$script" "${overrides[@]}")
if ! $dry_run; then
    exec "${line[@]}"
fi

printf 'would run:'
printf ' %q' "${line[@]}"
printf '\n'
expected=("cluster.nodes=$(option nodes)")
if [[ -n "$gpus" && "$gpus" != 0 ]]; then
    expected+=("cluster.ranks_per_node=$gpus")
fi
code=0
if command -v sbatch >/dev/null; then
    sbatch --test-only "${options[@]}" "$script" "${overrides[@]}" || code=2
else
    echo "no sbatch on this machine: what SLURM would say is not known"
fi
# The user's overrides come last and take precedence.
megads train cluster=slurm run.dry_run=true "${expected[@]}" "${overrides[@]}" || code=$?
exit "$code"
