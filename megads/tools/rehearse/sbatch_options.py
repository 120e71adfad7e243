"""Reads the options of sbatch, from a command line and from the #SBATCH lines of a script, as sbatch reads them.

Which options take a value is taken from sbatch 22.05's --help; values are not judged here: the real sbatch does that.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megads.errors import ConfigError

_FLAGS = [
    "contiguous",
    "help",
    "hold",
    "ignore-pbs",
    "no-requeue",
    "overcommit",
    "oversubscribe",
    "parsable",
    "quiet",
    "reboot",
    "requeue",
    "spread-job",
    "test-only",
    "usage",
    "use-min-nodes",
    "verbose",
    "version",
    "wait",
]
# A value only in the same word: --exclusive=user, -k=off.
_OPTIONAL = ("exclusive", "get-user-env", "nice", "no-kill", "propagate")
_VALUED = [
    "account",
    "acctg-freq",
    "array",
    "batch",
    "bb",
    "bbf",
    "begin",
    "chdir",
    "cluster-constraint",
    "clusters",
    "comment",
    "constraint",
    "container",
    "core-spec",
    "cores-per-socket",
    "cpu-freq",
    "cpus-per-gpu",
    "cpus-per-task",
    "deadline",
    "delay-boot",
    "dependency",
    "distribution",
    "error",
    "exclude",
    "export",
    "export-file",
    "extra-node-info",
    "gid",
    "gpu-bind",
    "gpu-freq",
    "gpus",
    "gpus-per-node",
    "gpus-per-socket",
    "gpus-per-task",
    "gres",
    "gres-flags",
    "hint",
    "input",
    "job-name",
    "kill-on-invalid-dep",
    "licenses",
    "mail-type",
    "mail-user",
    "mcs-label",
    "mem",
    "mem-bind",
    "mem-per-cpu",
    "mem-per-gpu",
    "mincpus",
    "network",
    "nodefile",
    "nodelist",
    "nodes",
    "ntasks",
    "ntasks-per-core",
    "ntasks-per-gpu",
    "ntasks-per-node",
    "ntasks-per-socket",
    "open-mode",
    "output",
    "partition",
    "power",
    "prefer",
    "priority",
    "profile",
    "qos",
    "reservation",
    "signal",
    "sockets-per-node",
    "switches",
    "thread-spec",
    "threads-per-core",
    "time",
    "time-min",
    "tmp",
    "tres-per-task",
    "uid",
    "wckey",
    "wrap",
]
_KNOWN = dict.fromkeys(_VALUED, True) | dict.fromkeys((*_FLAGS, *_OPTIONAL), False)
_SHORT = {
    "a": "array",
    "A": "account",
    "b": "begin",
    "B": "extra-node-info",
    "c": "cpus-per-task",
    "C": "constraint",
    "d": "dependency",
    "D": "chdir",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "h": "help",
    "H": "hold",
    "i": "input",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "m": "distribution",
    "M": "clusters",
    "n": "ntasks",
    "N": "nodes",
    "o": "output",
    "O": "overcommit",
    "p": "partition",
    "q": "qos",
    "Q": "quiet",
    "s": "oversubscribe",
    "S": "core-spec",
    "t": "time",
    "v": "verbose",
    "V": "version",
    "w": "nodelist",
    "W": "wait",
    "x": "exclude",
}


class UnknownOptionError(ConfigError):
    """An option that sbatch does not have, or one without its value."""


@dataclass(frozen=True)
class Option:
    """One option by its full name; value None where none is given."""

    name: str
    value: str | None = None

    @property
    def word(self) -> str:
        """As one word of a command line."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


def read_words(words: Sequence[str]) -> tuple[list[Option], list[str]]:
    """Returns the options at the beginning of a command line and the words from the first that is none on.

    Args:
        words: what follows `sbatch`.

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


def read_script(text: str) -> list[Option]:
    """Returns the options of a script's #SBATCH lines, which end at its first command.

    Args:
        text: of the script.

    Raises:
        UnknownOptionError: as `read_words`, with the number of the line.
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
                raise UnknownOptionError(f"line {number}, {line}: {rest[0]!r} is no option")
            found += options
    return found


def _full_name(name: str) -> str:
    """Completes an abbreviation, as getopt_long does."""
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
    """Reads -N4, -N 4 and -HQ."""
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
