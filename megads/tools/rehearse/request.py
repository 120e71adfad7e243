"""Parses a user's `sbatch ...` command as sbatch does, and builds the scaled-down command.

Options come from the command line and the script's #SBATCH lines. Which options take a value follows sbatch 22.05's
--help. Values are not checked here; the real sbatch does that.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megads.api import ConfigError

_FLAGS = (
    "contiguous", "help", "hold", "ignore-pbs", "no-requeue", "overcommit", "oversubscribe", "parsable", "quiet",
    "reboot", "requeue", "spread-job", "test-only", "usage", "use-min-nodes", "verbose", "version", "wait",
)  # fmt: skip
# The value must be in the same word: --exclusive=user, -k=off.
_OPTIONAL = ("exclusive", "get-user-env", "nice", "no-kill", "propagate")
_VALUED = (
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters",
    "comment", "constraint", "container", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task",
    "deadline", "delay-boot", "dependency", "distribution", "error", "exclude", "export", "export-file",
    "extra-node-info", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task",
    "gres", "gres-flags", "hint", "input", "job-name", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user",
    "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nodefile", "nodelist", "nodes",
    "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "output",
    "partition", "power", "prefer", "priority", "profile", "qos", "reservation", "signal", "sockets-per-node",
    "switches", "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-per-task", "uid", "wckey", "wrap",
)  # fmt: skip
_KNOWN = dict.fromkeys(_VALUED, True) | dict.fromkeys((*_FLAGS, *_OPTIONAL), False)
_SHORT = {
    "a": "array", "A": "account", "b": "begin", "B": "extra-node-info", "c": "cpus-per-task", "C": "constraint",
    "d": "dependency", "D": "chdir", "e": "error", "F": "nodefile", "G": "gpus", "h": "help", "H": "hold", "i": "input",
    "J": "job-name", "k": "no-kill", "L": "licenses", "m": "distribution", "M": "clusters", "n": "ntasks", "N": "nodes",
    "o": "output", "O": "overcommit", "p": "partition", "q": "qos", "Q": "quiet", "s": "oversubscribe",
    "S": "core-spec", "t": "time", "v": "verbose", "V": "version", "w": "nodelist", "W": "wait", "x": "exclude",
}  # fmt: skip


class UnknownOptionError(ConfigError):
    """An option that sbatch does not have, or an option without its value."""


@dataclass(frozen=True)
class Option:
    """One option by its full name; value is None if none is given."""

    name: str
    value: str | None = None

    @property
    def word(self) -> str:
        """The option as one word of a command line."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


def read_words(words: Sequence[str]) -> tuple[list[Option], list[str]]:
    """Returns the options at the beginning of a command line, and the remaining words.

    Args:
        words: arguments of `sbatch`.

    Raises:
        UnknownOptionError: sbatch has no such option, or its value is missing.
    """
    found: list[Option] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            full = _full_name(name)
            found.append(Option(full, value if given else _next_value(full, word, rest)))
        else:
            found += _short(word, rest)
    return found, rest


def _read_script(text: str) -> list[Option]:
    """Returns the options of a script's #SBATCH lines before its first command.

    Args:
        text: text of the script.

    Raises:
        UnknownOptionError: as in `read_words`; the message names the line.
    """
    found: list[Option] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            try:
                options, rest = read_words(shlex.split(line.removeprefix("#SBATCH"), comments=True))
            except (UnknownOptionError, ValueError) as error:
                raise UnknownOptionError(f"line {number}, {line}: {error}") from error
            if rest:
                raise UnknownOptionError(f"line {number}, {line}: {rest[0]!r} is not an option")
            found += options
    return found


def _full_name(name: str) -> str:
    """Completes an abbreviated name, as getopt_long does."""
    if name in _KNOWN:
        return name
    matches = [known for known in _KNOWN if known.startswith(name)]
    if len(matches) != 1:
        also = f": it may be --{' or --'.join(matches[:3])}" if matches else ""
        raise UnknownOptionError(f"sbatch has no option --{name}{also}")
    return matches[0]


def _next_value(name: str, word: str, rest: list[str]) -> str | None:
    if not _KNOWN[name]:
        return None
    if not rest:
        raise UnknownOptionError(f"{word} needs a value")
    return rest.pop(0)


def _short(word: str, rest: list[str]) -> list[Option]:
    """Parses short options: -N4, -N 4 and -HQ."""
    found: list[Option] = []
    letters = word[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        if letter not in _SHORT:
            raise UnknownOptionError(f"sbatch has no option -{letter}")
        name = _SHORT[letter]
        if _KNOWN[name]:
            found.append(Option(name, letters or _next_value(name, f"-{letter}", rest)))
            break
        found.append(Option(name))
    return found


# Options that the rehearsal passes on unchanged. The others concern the site (features, reservations, accounts, other
# jobs), sizes or notifications.
_KEPT = (
    "comment", "cpus-per-task", "export-file", "get-user-env", "job-name", "no-requeue", "ntasks-per-node", "open-mode",
    "partition", "requeue", "signal", "time",
)  # fmt: skip
# Options that the private SLURM would reject although the site may accept them.
_OF_THE_SITE = (
    "batch", "bb", "bbf", "cluster-constraint", "clusters", "constraint", "container", "core-spec", "dependency",
    "exclude", "gid", "licenses", "mcs-label", "nodefile", "nodelist", "prefer", "reservation", "test-only",
    "thread-spec", "uid", "wait",
)  # fmt: skip
_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "gpu-bind", "gpu-freq")
_UNSUPPORTED = {
    "wrap": "write the command to a script: rehearse reads the #SBATCH lines of a file",
    "gpus-per-socket": "use --gpus-per-node: the number of sockets per node is unknown here",
}


@dataclass(frozen=True)
class AskedSignal:
    """Value of --signal.

    Attributes:
        name: name without SIG, such as USR1, or a number.
        to_script: whether it is sent to the batch script (B:) or to the steps that srun started.
        seconds: time before the time limit.
    """

    name: str
    to_script: bool
    seconds: int


@dataclass(frozen=True)
class Request:
    """A user's command: sbatch [options] script [arguments].

    Attributes:
        options: options of the script, then of the command line; the last one of a name counts, as in sbatch.
        script: path of the script.
        arguments: arguments of the script.
    """

    options: tuple[Option, ...]
    script: Path
    arguments: tuple[str, ...]

    def value(self, name: str) -> str | None:
        """Returns the value of an option, or None if it is not given."""
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def last_of(self, *names: str) -> str | None:
        """Returns which of several options is given last, or None if none is given."""
        return next((option.name for option in reversed(self.options) if option.name in names), None)

    @property
    def nodes(self) -> int:
        """Number of nodes requested; the smaller number of a range."""
        given = self.value("nodes")
        if given is not None:
            return max(1, _number("nodes", given.partition("-")[0]))
        tasks, per_node = self.value("ntasks"), self.value("ntasks-per-node")
        if tasks and per_node:
            return -(-_number("ntasks", tasks) // max(1, _number("ntasks-per-node", per_node)))
        return 1

    @property
    def gpus_per_node(self) -> int:
        """GPUs requested per node; 0 if none."""
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
        """Names of the requested partitions."""
        return tuple(filter(None, (self.value("partition") or "debug").split(",")))

    @property
    def signal(self) -> AskedSignal | None:
        """The signal requested before the time limit, or None."""
        given = self.value("signal")
        found = re.fullmatch(r"(?:([RB]+):)?(?:SIG)?(\w+?)(?:@(\d+))?", given or "", re.IGNORECASE)
        if given is None or found is None:
            return None
        return AskedSignal(found.group(2).upper(), "B" in (found.group(1) or "").upper(), int(found.group(3) or 60))

    def checked_words(self) -> list[str]:
        """Returns the options that the private sbatch can check: without site-specific options and GPU types."""
        words = [o.word for o in self.options if o.name not in (*_OF_THE_SITE, *_GPU_OPTIONS)]
        return [*words, *_gpu_words(self.gpus_per_node)]

    def scaled_words(self, nodes: int, gpus_per_node: int, output: Path, variables: dict[str, str]) -> list[str]:
        """Returns the options of the rehearsed job.

        Args:
            nodes: number of nodes of the scaled job.
            gpus_per_node: GPUs per node of the scaled job.
            output: file of the script's output.
            variables: environment variables that the script gets regardless of --export.
        """
        words = [option.word for option in self.options if option.name in _KEPT]
        words += [f"--nodes={nodes}", *_gpu_words(gpus_per_node), f"--output={output}", "--open-mode=append"]
        if chdir := self.value("chdir"):
            words.append(f"--chdir={chdir}")
        if array := self.value("array"):
            first = re.split(r"[-,:%]", array)[0]
            # Two jobs of a chain; one of any other array, whose tasks are the same.
            words.append(f"--array={first}-{int(first) + 1}%1" if array.endswith("%1") else f"--array={first}")
        return [*words, f"--export={_exported(self.value('export'), variables)}"]

    def write_script(self, path: Path) -> None:
        """Writes the script with its #SBATCH lines disabled and line numbers unchanged."""
        text = self.script.read_text()
        path.write_text("".join(f"#{line}" if _is_option(line) else line for line in text.splitlines(keepends=True)))
        shutil.copymode(self.script, path)


def read_request(command: Sequence[str]) -> Request:
    """Parses a user's command.

    Args:
        command: words of the command, such as ["sbatch", "--nodes=2", "train.sbatch", "model=tiny"].

    Raises:
        ConfigError: it is not an sbatch command, cannot be rehearsed, or names no readable script.
        UnknownOptionError: sbatch has no such option.
    """
    if not command or Path(command[0]).name != "sbatch":
        raise ConfigError(
            f"{' '.join(command) or 'an empty command'}: cannot be rehearsed: write the command after --, as in "
            "megads rehearse -- sbatch [options] script.sbatch [overrides]"
        )
    given, rest = read_words(command[1:])
    for option in given:
        if option.name in _UNSUPPORTED:
            raise ConfigError(f"--{option.name} cannot be rehearsed: {_UNSUPPORTED[option.name]}")
    if not rest:
        raise ConfigError("sbatch without a script: add the file of your batch script")
    script = Path(rest[0])
    try:
        text = script.read_text()
    except FileNotFoundError:
        raise ConfigError(
            f"{script}: there is no such file; name the batch script of your site (docs/slurm.md)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{script}: the batch script cannot be read: {error}") from error
    if ":" in rest or "#SBATCH hetjob" in text:
        raise ConfigError("a heterogeneous job cannot be rehearsed: rehearse its components one by one")
    return Request((*_read_script(text), *given), script, tuple(rest[1:]))


def _is_option(line: str) -> bool:
    return line.startswith("#SBATCH")


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"--{name}={text}: is not a number")
    return int(text)


def _gpus(name: str, text: str) -> int:
    """Parses a number of GPUs: 8, a100:8 or :a100:8."""
    number = text.rpartition(":")[2]
    return 1 if number and not number[0].isdigit() else _number(name, number)


def _gpu_words(gpus: int) -> list[str]:
    return [f"--gpus-per-node={gpus}"] if gpus else []


def _exported(asked: str | None, variables: dict[str, str]) -> str:
    """Returns the user's --export value with variables added."""
    added = ",".join(f"{name}={value}" for name, value in variables.items())
    return added if asked == "NONE" else f"{asked or 'ALL'},{added}"
