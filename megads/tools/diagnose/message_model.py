"""Classifies log lines that no signature decides: naive Bayes over the word stems of messages with a known cause.

The model is trained on first use, in milliseconds, on known_messages.yaml and on the words in the patterns and examples
of the signatures. It therefore also recognizes messages that word a signature differently. `template` replaces the
variable parts of a line, so that a million lines become a few hundred templates.

References:
    Manning, Raghavan, Schuetze, Introduction to Information Retrieval (2008), 13.2: multinomial naive Bayes.
    Guo et al., On Calibration of Modern Neural Networks (2017): temperature scaling.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from megads.tools.diagnose.causes import FACTS, Cause
from megads.tools.diagnose.signature import Signature, SignatureTable, signature_table

_VARYING = (
    (re.compile(r"\x1b\[[0-9;]*[A-Za-z]"), ""),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"), "<time>"),
    (re.compile(r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) +\d{1,2} \d\d:\d\d:\d\d\b"), "<time>"),
    (re.compile(r"\b[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d+"), "<time>"),
    (re.compile(r"\b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?\b"), "<time>"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}(?:[:<]\d+>?)?"), "<address>"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE), "<id>"),
    (
        re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/][\w.+@=~-]+){2,}/?|(?<![\w.])(?:\.{1,2}/|[\w.-]+/){2,}[\w.-]+"),
        "<path>",
    ),
    (re.compile(r"\b0x[0-9a-f]+\b|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", re.IGNORECASE), "<number>"),
    (re.compile(r"[ \t]+"), " "),
)
_LONGEST = 400


def template(line: str) -> str:
    """Returns a line with times, addresses, ids, paths, hexadecimal and other numbers replaced by placeholders.

    Exit codes, error numbers and Xids are replaced too: templates serve to count lines and compare incidents, not to
    find the cause.
    """
    text = line[:_LONGEST]
    for pattern, name in _VARYING:
        text = pattern.sub(name, text)
    return text.strip()


_FILE = "known_messages.yaml"
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_FRAME = re.compile(r'File "([^"]+)", line \d+, in (\w+)')
_ENDINGS = re.compile(r"(?:ations?|ions?|ings?|ible|able|ed|es|s|e)$")
_NO_TEXT = re.compile(r"\(\?<?[!=][^)]*\)|\(\?P<\w+>|\(\?:|\\[a-zA-Z]|[\\\[\](){}?*+.|^$]|\d+,?\d*")
_SHORTEST_STEM = 3
_SMOOTHING = 0.2
_TEMPERATURE = 0.8
_FRAME_WEIGHT = 0.5
_FRAMES_READ = 3
_STOP = frozenset(
    re.findall(
        r"\w+",
        "the a an of to in is was are were be been at on by for from with and or not it this that as has have had you "
        "your if can could may might will would should which please see more most rank torch python lib site packages "
        "file line error errors exception runtime traceback recent call last number time path address hex id",
    )
)


@dataclass(frozen=True)
class KnownMessage:
    """A message with a known cause.

    Attributes:
        text: the message.
        cause: cause that the message indicates; None for a message of a healthy run.
        restartable: whether a restart is enough.
    """

    text: str
    cause: Cause | None
    restartable: bool


@dataclass(frozen=True)
class Verdict:
    """Classification of a line.

    Attributes:
        cause: most likely cause.
        restartable: whether a restart is likely to be enough.
        probability: probability of the cause, calibrated by cross-validation.
    """

    cause: Cause
    restartable: bool
    probability: float


def stems(text: str, frames: str = "") -> dict[str, float]:
    """Returns the word stems of a line with their weights; identifiers are split at capitals and underscores.

    Args:
        text: the line; numbers, times and paths in it are ignored.
        frames: frames of the traceback before the line, one per line; the names of the innermost files and functions
            have a lower weight.
    """
    found = dict.fromkeys(_stems_of(template(text)), 1.0)
    for path, function in _FRAME.findall(frames)[-_FRAMES_READ:]:
        names = " ".join(re.split(r"[\\/]", path)[-2:])
        for stem in set(_stems_of(f"{names} {function}")) - found.keys():
            found[stem] = _FRAME_WEIGHT
    return found


def _stems_of(text: str) -> list[str]:
    words = (word.lower() for word in _WORD.findall(re.sub(r"<\w+>", " ", text)))
    found = [_stem(word) for word in words if len(word) > 1 and word not in _STOP]
    return found + [f"{first} {second}" for first, second in pairwise(found)]


@functools.lru_cache(maxsize=1 << 14)
def _stem(word: str) -> str:
    shorter = _ENDINGS.sub("", word)
    return shorter if len(shorter) >= _SHORTEST_STEM else word


class MessageModel:
    """Multinomial naive Bayes classifier of log lines over word stems.

    Args:
        messages: training set.
    """

    def __init__(self, messages: Sequence[KnownMessage]):
        counts: dict[tuple[Cause | None, bool], Counter[str]] = defaultdict(Counter)
        for message in messages:
            counts[message.cause, message.restartable].update(stems(message.text).keys())
        self._num_messages = len(messages)
        self._frequency = sum(counts.values(), Counter[str]())
        self._vocabulary = {stem for counter in counts.values() for stem in counter}
        size = len(self._vocabulary)
        self._logs = {
            kind: (
                math.log(counter.total() + _SMOOTHING * size),
                {stem: math.log(n + _SMOOTHING) for stem, n in counter.items()},
            )
            for kind, counter in counts.items()
        }
        self._unseen = math.log(_SMOOTHING)

    def rarity(self, stem: str) -> float:
        """Returns the inverse document frequency of a stem, log(1 + messages / (1 + occurrences))."""
        return math.log(1 + self._num_messages / (1 + self._frequency[stem]))

    def judge(self, text: str, frames: str = "") -> Verdict | None:
        """Classifies a line.

        Args:
            text: the line.
            frames: frames of the traceback before the line, one per line.

        Returns:
            None if the line shares no word with a known message, or most resembles messages of healthy runs.
        """
        known = {stem: weight for stem, weight in stems(text, frames).items() if stem in self._vocabulary}
        if not known:
            return None
        scale = _TEMPERATURE * math.sqrt(len(known))
        scores = {
            kind: sum(weight * (logs.get(stem, self._unseen) - total) for stem, weight in known.items()) / scale
            for kind, (total, logs) in self._logs.items()
        }
        highest = max(scores.values())
        shares: dict[Cause | None, dict[bool, float]] = defaultdict(lambda: {False: 0.0, True: 0.0})
        for (cause, restartable), score in scores.items():
            shares[cause][restartable] += math.exp(score - highest)
        total = sum(sum(share.values()) for share in shares.values())
        best = max(shares, key=lambda cause: sum(shares[cause].values()))
        if best is None:
            return None
        share = shares[best]
        return Verdict(best, share[True] > share[False], sum(share.values()) / total)


def known_messages() -> list[KnownMessage]:
    """Returns the messages of known_messages.yaml."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    rows = yaml.load(Path(__file__).with_name(_FILE).read_bytes(), loader)
    found: list[KnownMessage] = []
    for row in rows:
        cause = Cause(row["cause"]) if row["cause"] else None
        restartable = row.get("restartable", cause is not None and FACTS[cause].restartable)
        found += [KnownMessage(text, cause, restartable) for text in row["messages"]]
    return found


def signature_messages(signatures: Iterable[Signature]) -> list[KnownMessage]:
    """Returns the examples of signatures, and their patterns without regular expression syntax."""
    found: list[KnownMessage] = []
    for signature in signatures:
        default = FACTS[signature.cause].restartable
        restartable = default if signature.restartable is None else signature.restartable
        patterns = () if signature.frames else signature.patterns
        texts = (signature.example, *(_NO_TEXT.sub(" ", pattern) for pattern in patterns))
        found += [KnownMessage(text, signature.cause, restartable) for text in texts]
    return found


@functools.cache
def message_model() -> MessageModel:
    """Returns the bundled model."""
    return MessageModel([*known_messages(), *signature_messages(signature_table().signatures)])


@dataclass(frozen=True)
class Knowledge:
    """Signatures and message model that a diagnosis uses.

    Attributes:
        table: signatures.
        model: classifier of lines that no signature decides.
    """

    table: SignatureTable
    model: MessageModel


def knowledge() -> Knowledge:
    """Returns the bundled signatures and model."""
    return Knowledge(signature_table(), message_model())
