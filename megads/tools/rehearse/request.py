"""What a user's `sbatch ...` asks for, and the same scaled down to this machine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megads.errors import ConfigError
from megads.tools.rehearse.sbatch_options import Option, read_script, read_words

# What the rehearsal passes on as it is. Everything else is about the site (its features, reservations, accounts, other
# jobs), about sizes, or about who is told.
_KEPT = [
    "comment",
    "cpus-per-task",
    "export-file",
    "get-user-env",
    "job-name",
    "no-requeue",
    "ntasks-per-node",
    "open-mode",
    "partition",
    "requeue",
    "signal",
    "time",
]
# What the private SLURM would refuse though the site may know it.
_OF_THE_SITE = [
    "batch",
    "bb",
    "bbf",
    "cluster-constraint",
    "clusters",
    "constraint",
    "container",
    "core-spec",
    "dependency",
    "exclude",
    "gid",
    "licenses",
    "mcs-label",
    "nodefile",
    "nodelist",
    "prefer",
    "reservation",
    "test-only",
    "thread-spec",
    "uid",
    "wait",
]
_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "gpu-bind", "gpu-freq")
_UNSUPPORTED = {
    "wrap": "write the command into a script: rehearse reads the #SBATCH lines of a file",
    "gpus-per-socket": "ask with --gpus-per-node: what a node has of sockets is not known here",
}


@dataclass(frozen=True)
class AskedSignal:
    """What --signal asks for.

    Attributes:
        name: USR1, or a number.
        to_script: sent to the batch script itself (B:); else to the steps that srun started.
        seconds: before the time limit.
    """

    name: str
    to_script: bool
    seconds: int


@dataclass(frozen=True)
class Request:
    """A user's command: sbatch [options] script [arguments].

    Attributes:
        options: the script's, then the command line's; the last of a name wins, as in sbatch.
        script: the file.
        arguments: of the script.
    """

    options: tuple[Option, ...]
    script: Path
    arguments: tuple[str, ...]

    def value(self, name: str) -> str | None:
        """Returns the value of an option, None where it is not given."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def last_of(self, *names: str) -> str | None:
        """Returns which of several options is given last, None for none."""
        return next((option.name for option in reversed(self.options) if option.name in names), None)

    @property
    def nodes(self) -> int:
        """Nodes asked for; the smaller number of a range."""
        given = self.value("nodes")
        if given is not None:
            return max(1, _number("nodes", given.partition("-")[0]))
        tasks, per_node = self.value("ntasks"), self.value("ntasks-per-node")
        if tasks and per_node:
            return -(-_number("ntasks", tasks) // max(1, _number("ntasks-per-node", per_node)))
        return 1

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node, 0 where none is asked for."""
        if given := self.value("gpus-per-node"):
            return _gpus("gpus-per-node", given)
        if found := re.search(r"(?:^|,)gpu((?::[^,:]+)*)(?:,|$)", self.value("gres") or ""):
            return _gpus("gres", found.group(1) or "1")
        if given := self.value("gpus"):
            return _gpus("gpus", given) // self.nodes
        if given := self.value("gpus-per-task"):
            return _gpus("gpus-per-task", given) * self._tasks_per_node
        return 0

    @property
    def _tasks_per_node(self) -> int:
        if given := self.value("ntasks-per-node"):
            return _number("ntasks-per-node", given)
        return max(1, _number("ntasks", self.value("ntasks") or "1") // self.nodes)

    @property
    def partitions(self) -> tuple[str, ...]:
        """Names of the partitions asked for."""
        return tuple(filter(None, (self.value("partition") or "debug").split(",")))

    @property
    def signal(self) -> AskedSignal | None:
        """The signal asked for before the time limit."""
        given = self.value("signal")
        found = re.fullmatch(r"(?:([RB]+):)?(?:SIG)?(\w+?)(?:@(\d+))?", given or "", re.IGNORECASE)
        if given is None or found is None:
            return None
        return AskedSignal(found.group(2).upper(), "B" in (found.group(1) or "").upper(), int(found.group(3) or 60))

    def checked_words(self) -> list[str]:
        """Returns the options as they are, less what only the site can judge and the names of its GPUs, for sbatch."""
        words = [o.word for o in self.options if o.name not in (*_OF_THE_SITE, *_GPU_OPTIONS)]
        return [*words, *_gpu_words(self.gpus_per_node)]

    def scaled_words(self, nodes: int, gpus_per_node: int, output: Path, variables: dict[str, str]) -> list[str]:
        """Returns the options with which the script is rehearsed.

        Args:
            nodes: of the scaled job.
            gpus_per_node: of the scaled job.
            output: file of what the script prints.
            variables: that the script must see, whatever --export says.
        """
        words = [option.word for option in self.options if option.name in _KEPT]
        words += [f"--nodes={nodes}", *_gpu_words(gpus_per_node), f"--output={output}", "--open-mode=append"]
        if chdir := self.value("chdir"):
            words.append(f"--chdir={chdir}")
        if array := self.value("array"):
            first = re.split(r"[-,:%]", array)[0]
            # Two jobs of a chain; one of other arrays, whose tasks are alike.
            words.append(f"--array={first}-{int(first) + 1}%1" if array.endswith("%1") else f"--array={first}")
        return [*words, f"--export={_exported(self.value('export'), variables)}"]

    def write_script(self, path: Path) -> None:
        """Writes the script with its #SBATCH lines switched off, every line in its place: options go by the words."""
        text = self.script.read_text()
        path.write_text("".join(f"#{line}" if _is_option(line) else line for line in text.splitlines(keepends=True)))
        shutil.copymode(self.script, path)


def read_request(command: Sequence[str]) -> Request:
    """Reads a user's command.

    Args:
        command: as in ["sbatch", "--nodes=2", "train.sbatch", "model=tiny"].

    Raises:
        ConfigError: it is no sbatch command, or names no script that can be read.
        UnknownOptionError: sbatch has no such option.
    """
    if not command or Path(command[0]).name != "sbatch":
        raise ConfigError(
            f"{' '.join(command) or 'an empty command'}: cannot be rehearsed: write your own after two dashes, "
            "megads rehearse -- sbatch [options] script.sbatch [overrides]"
        )
    given, rest = read_words(command[1:])
    for option in given:
        if option.name in _UNSUPPORTED:
            raise ConfigError(f"--{option.name} cannot be rehearsed: {_UNSUPPORTED[option.name]}")
    if not rest:
        raise ConfigError("sbatch without a script: name the file of your batch script")
    script = Path(rest[0])
    try:
        text = script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{script}: the batch script cannot be read: {error}") from error
    if ":" in rest or "#SBATCH hetjob" in text:
        raise ConfigError("a heterogeneous job cannot be rehearsed: rehearse its parts one by one")
    return Request((*read_script(text), *given), script, tuple(rest[1:]))


def _is_option(line: str) -> bool:
    return line.startswith("#SBATCH")


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"--{name}={text}: is no number")
    return int(text)


def _gpus(name: str, text: str) -> int:
    """Reads 8, a100:8 and :a100:8."""
    number = text.rpartition(":")[2]
    return 1 if number and not number[0].isdigit() else _number(name, number)


def _gpu_words(gpus: int) -> list[str]:
    return [f"--gpus-per-node={gpus}"] if gpus else []


def _exported(asked: str | None, variables: dict[str, str]) -> str:
    """Returns the value of --export that adds variables to what the user exports."""
    added = ",".join(f"{name}={value}" for name, value in variables.items())
    return added if asked == "NONE" else f"{asked or 'ALL'},{added}"
