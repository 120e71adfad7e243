"""`megads rehearse -- sbatch ...`: the user's own batch script on a private SLURM, scaled down, and a verdict."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megads.data.indexed.writer import IndexedDatasetWriter
from megads.errors import EXIT_OK, ConfigError, MegadsError
from megads.launch.launcher import EXIT_KILLED
from megads.runtime.environment import REHEARSAL_VARIABLE, exported, without_commands
from megads.tools.doctor.finding import Finding, Status, show
from megads.tools.rehearse.life import Life
from megads.tools.rehearse.notes import OUTPUT_FILE, Orders, write_orders
from megads.tools.rehearse.paper import (
    check_options,
    check_output,
    check_requeue,
    check_signal,
    check_site,
    of_this_machine,
    refused_options,
)
from megads.tools.rehearse.private_slurm import PrivateSlurm, SlurmUnavailableError, unavailable_reason
from megads.tools.rehearse.request import Request, read_request
from megads.tools.rehearse.sbatch_options import UnknownOptionError
from megads.tools.rehearse.scale import VOCAB_SIZE
from megads.tools.rehearse.slurm_conf import ClusterSize

_SEPARATOR = "--"
# Of a node of the private cluster: no job is to wait for room here, since its processes share what there is.
_CPUS, _MEMORY_MIB = 1024, 4_000_000
# More than any rehearsal trains before its signal.
_NO_LAST_STEP = 1_000_000
_DOCUMENTS, _DOCUMENT_TOKENS = 64, 400
_DESCRIPTION = """\
Runs your own batch script, scaled down, on a private SLURM of this machine, before it waits for days in a real queue.

It reads the #SBATCH lines and the options of your command, checks the layout that you ask for on paper (sizes, ranks
against nodes x GPUs, memory, data, folders), then really submits the script: at most two nodes and a few processes
train a tiny model with the same kind of layout, get the signal that the script asks for, must save, exit 6, come back
and go on where they were. A table says what was found and what to do."""
_EPILOG = """\
examples:
  megads rehearse -- sbatch scripts/slurm/train.sbatch experiment=bloom_176b parallel.tp=4
  megads rehearse --gpu-memory-gib 80 -- sbatch --nodes=8 --gpus-per-node=8 my.sbatch model=bloom_7b1
  megads rehearse --elsewhere --without module -- sbatch my.sbatch          (on a laptop)

It needs SLURM's programs (as root: scripts/install_slurm.sh), and touches neither your cluster's queue nor your runs.
Exit codes: 0 nothing stands in the way; 2 a problem was found, or there is nothing to rehearse; 1 a bug;
130 interrupted."""


def run(arguments: Sequence[str]) -> int:
    """Rehearses and returns the exit code.

    Args:
        arguments: options, two dashes, the user's command.
    """
    options, command = _split(list(arguments))
    try:
        asked = _parser().parse_args(options)
    except SystemExit as stop:
        # argparse has printed the help, or what it cannot read.
        return EXIT_OK if stop.code == 0 else ConfigError.exit_code
    start = time.monotonic()
    # As Ctrl-C: what is open is closed.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        findings = rehearse(command, asked)
    except MegadsError as error:
        print(f"megads rehearse: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("megads rehearse: interrupted; nothing is left behind", file=sys.stderr)
        return EXIT_KILLED
    finally:
        signal.signal(signal.SIGTERM, before)
    print()
    show(findings)
    print(_summary(findings, time.monotonic() - start))
    return ConfigError.exit_code if _problems(findings) else EXIT_OK


def rehearse(command: Sequence[str], asked: argparse.Namespace) -> list[Finding]:
    """Rehearses a command.

    Args:
        command: the user's, beginning with sbatch.
        asked: the options of megads rehearse.

    Returns:
        What was found, in the order in which it was looked at.

    Raises:
        ConfigError: there is no command to rehearse, or no SLURM on this machine.
    """
    try:
        request = read_request(command)
    except UnknownOptionError as error:
        return [refused_options(error)]
    if reason := unavailable_reason():
        raise SlurmUnavailableError(reason)
    nodes = min(2, request.nodes)
    gpus = max(1, asked.ranks // nodes) if request.gpus_per_node else 0
    size = ClusterSize(nodes, _CPUS, _MEMORY_MIB, max(gpus, request.gpus_per_node), request.partitions)
    say = _Progress()
    with _folder(asked.keep) as folder, PrivateSlurm(size) as cluster:
        say(f"a private SLURM of {nodes} node{'s' * (nodes > 1)} runs")
        script = folder / "script" / request.script.name
        script.parent.mkdir()
        request.write_script(script)
        findings = _on_paper(request, cluster, script, command)
        if asked.elsewhere:
            findings = of_this_machine(findings)
        if findings[0].status is Status.problem:
            return findings
        orders = Orders(
            nodes=request.nodes,
            gpus_per_node=request.gpus_per_node,
            gpu_memory_gib=asked.gpu_memory_gib,
            scaled_nodes=nodes,
            max_ranks=asked.ranks,
            data=str(_write_data(folder / "data")),
            last_step=_NO_LAST_STEP,
            elsewhere=asked.elsewhere,
            refused=_problems(findings) > 0,
        )
        write_orders(folder, orders)
        words = request.scaled_words(nodes, gpus, folder / OUTPUT_FILE, {REHEARSAL_VARIABLE: str(folder)})
        life = Life(cluster, request, folder, say)
        with exported(without_commands(asked.without)):
            life.submit([*words, str(script), *request.arguments])
        return findings + life.rehearse()


def _on_paper(request: Request, cluster: PrivateSlurm, script: Path, command: Sequence[str]) -> list[Finding]:
    """What the options show before anything runs; whether sbatch takes them comes first."""
    return [
        check_options(request, cluster, script),
        *check_site(request, list(command[1:])),
        check_signal(request),
        check_requeue(request),
        check_output(request, Path.cwd()),
    ]


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the options of megads rehearse and the user's command; the dashes between them may be missing."""
    for place, word in enumerate(words):
        if word == _SEPARATOR:
            return words[:place], words[place + 1 :]
        if Path(word).name == "sbatch":
            return words[:place], words[place:]
    return words, []


class _Progress:
    """Prints lines with the time since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self._start:6.1f} s  {text}", flush=True)


@contextmanager
def _folder(kept: str | None) -> Iterator[Path]:
    """Yields the folder of the rehearsal; it is removed at the end unless the user named it."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="megads-rehearsal-") as name:
            yield Path(name)
        return
    folder = Path(kept).absolute()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--keep {kept}: cannot be made ({error.strerror}): name a new folder") from error
    yield folder


def _write_data(prefix: Path) -> Path:
    """Writes a dataset of random tokens and returns its prefix."""
    draws = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(_DOCUMENTS):
            writer.append(draws.integers(0, VOCAB_SIZE, _DOCUMENT_TOKENS, dtype=np.uint16))
    return prefix


def _problems(findings: Sequence[Finding]) -> int:
    return sum(finding.status is Status.problem for finding in findings)


def _summary(findings: Sequence[Finding], seconds: float) -> str:
    problems, last = _problems(findings), findings[-1].check
    if not problems:
        return f"Nothing stands in the way of this job ({seconds:.0f} s)."
    what = "1 problem" if problems == 1 else f"{problems} problems"
    then = "" if last == "resumed" else "; what comes after them was not rehearsed"
    return f"{what} would cost this job its turn{then} ({seconds:.0f} s)."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megads rehearse",
        usage="megads rehearse [options] -- sbatch [options of sbatch] script.sbatch [overrides]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=_ranks, default=4, help="most processes of the scaled layout: 2, 4 or 8 (4)")
    parser.add_argument("--gpu-memory-gib", type=float, help="of one GPU of your cluster; else cluster.gpu_memory_gib")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="COMMAND",
        help="a command of the cluster that this machine lacks, such as module: it does nothing here; may be repeated",
    )
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="this machine is not the cluster: data and folders that are missing here are noted, and no problem",
    )
    parser.add_argument("--keep", metavar="FOLDER", help="a new folder, kept, for the job's output and its run")
    return parser


def _ranks(text: str) -> int:
    if text not in ("2", "4", "8"):
        raise argparse.ArgumentTypeError(f"{text}: want 2, 4 or 8")
    return int(text)
