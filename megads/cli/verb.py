"""What a verb is. Imports nothing heavy: shell completion reads the verbs' schemas while the user waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Invocation:
    """What a verb knows of its command line beside the config.

    Attributes:
        choices: option taken in each config group, None for none.
        claimed_dirs: output places that earlier points of the same sweep named; shared by all its points.
    """

    choices: Mapping[str, str | None]
    claimed_dirs: set[str]


@dataclass(frozen=True)
class Verb:
    """One command: `megads <name>`, composed from conf/<name>.yaml.

    Attributes:
        name: the verb.
        schema: dataclass of its config.
        run: does the work and returns the exit code; gets an instance of `schema`.
        flags: the override that each flag of the verb's own stands for, as in --json for json=true, or each
            word alone, as in merge for action=merge.
        text_keys: keys whose values are taken as they stand, commas and brackets included.
        sweep: what -m does instead of running every point in this process; gets the arguments without -m and returns
            the exit code.
    """

    name: str
    schema: type
    run: Callable[[Any, Invocation], int]
    flags: Mapping[str, str] = field(default_factory=dict)
    text_keys: tuple[str, ...] = ()
    sweep: Callable[[Sequence[str]], int] | None = None
