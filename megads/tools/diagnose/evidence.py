"""Scans logs of any length in one pass and keeps what a diagnosis needs: kinds of lines, and lines about failures.

Lines that differ only in their digits are one kind, and only the first line of a kind is matched against the
signatures: hundreds of megabytes take seconds. If it matches, every line of that kind is examined, because exit codes,
error numbers and ranks are digits.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from megads.tools.diagnose.causes import Cause
from megads.tools.diagnose.line_marks import (
    EVALUATION,
    EXCEPTION,
    FINISHED,
    IGNORED_COMMAND,
    PASSING,
    PROGRESS,
    RETRIED,
    SERIOUS,
    SETTING,
    STEP,
    WRAPPER,
    is_harmless,
    is_warning,
    mentions_failure,
)
from megads.tools.diagnose.message_model import Knowledge, MessageModel, knowledge, template
from megads.tools.diagnose.pace import Pace, time_of
from megads.tools.diagnose.signature import Signature, Strength

_SURE_WORDING = 0.5
"""Lowest probability at which a line without a signature is a finding by its wording."""
_MOST_WORDED = 1000
_ENDING_KINDS = 20
"""Number of kinds at the end of a log that are always classified by wording; earlier ones only if suspicious."""
_DIGITS = b"0123456789"
_LONGEST_LINE = 4000
_MOST_KINDS = 30_000
_MOST_LINES_A_KIND = 64
_CONTEXT = 4
_TIME_REACH = 200
"""A line without a timestamp takes the one of the nearest line at most this many lines before it."""

_SUSPICIOUS = tuple(
    b"error|exception|fail|fatal|abort|kill|signal|timeout|timed out|memory|space|xid|nan|refused|reset|corrupt|"
    b"terminat|cancel|closed|oom-".split(b"|")
)
"""If a log has more than _MOST_KINDS kinds of lines, further kinds are examined only if they contain such a word."""
_ROOT_CAUSE = re.compile(
    rb"Root Cause \(first observed failure\):(?:\n[^\n]*){0,4}?\n[^\n]*\brank\s*: (\d+) \(local_rank"
)
_SPECULATION = re.compile(
    r"\b(?:(?:some|there are some|possible|potential|common|likely)(?: \w+)? (?:causes?|reasons?)\b|look for oom|"
    r"(?:may|might|could) (?:potentially|also|possibly)\b|it is possible that|"
    r"this (?:is (?:usually|typically|most likely|often)|may|might|could|typically|usually)\b)",
    re.IGNORECASE,
)
"""Introduces a list of possible reasons for a failure; text after it is ignored."""
_ENDS_TRACEBACK = re.compile(r"[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout|Empty)\b")
_CONTINUED = re.compile(r"\s+\S")
_MOST_CONTINUED = 3
_RANKS = (
    re.compile(r"\[(?:default|rank|RANK ?)(\d+)\]:"),
    re.compile(r"\[(?:PG[^\]]* )?Rank (\d+)\]"),
    re.compile(r"srun: error: [\w.-]+: task (\d+):"),
    re.compile(r"\b(?:global[_ ])?rank[ :=#]+(\d+)\b", re.IGNORECASE),
    re.compile(r"\blocal_rank[ :=]+(\d+)\b"),
)
_FRAME = re.compile(r'File "[^"]+", line \d+, in ')
_OTHER_FRAME = re.compile(
    r"(?:^|[\s│|])(?:File )?(?P<path>[\w~.<>/\\-]+\.py)(?::(?P<line>\d+))?,?\s+in\s+"
    r"<?(?:\w+\.)*(?P<function>\w+)(?:>|\(|\s*│|\s*$)"
)
"""A traceback frame as IPython and rich print it."""
_QUOTED_SOURCE = re.compile(r"^(?:-+> ?|\s+|\s*[│|]\s+(?:[❱>]\s*)?)\d+(?:\s{2}|\s+[│|]|$)")
"""A line of source code after its line number, as IPython and rich quote it."""
_NATIVE_FRAME = re.compile(r"^\s*(?:\[\w+\]:\s*)?(?:frame )?#\d+:? ")
_RAISED = re.compile(
    r"^(?:\[\w+\]:)?[\s\d│|❱>-]*(?:raise (?:\w+\.)*(?P<kind>\w+)|"
    r"assert\b.*(?:,|%|\.(?:shape|size|dtype|ndim)\b|\b(?:args|cfg|config|hparams|options|settings)\b))"
)
"""Source code that raises an error, or an assertion with a message or about a setting, a division or a shape."""
_HOST_PREFIX = re.compile(
    r"^\W{0,2}(?!(?:rank|default|step|epoch|iter|loss|gpu|cuda|attempt|trial|py|line)\W?\d)"
    r"([a-z][\w.-]*\d)\)?:(?:\s|\d+:\d+ \[)"
)
"""The host that wrote a line, as pdsh, mpirun and NCCL put it first."""
_HOST_NAME = re.compile(r"\b((?:[a-z]+-)*(?:worker|node|host|gpu|dgx|hgx|compute|nid|pod)(?:-\d+)+)\b")
_OF_A_HOST = frozenset(
    {
        Cause.cuda_ecc_or_xid,
        Cause.nvlink_error,
        Cause.host_oom_kill,
        Cause.cuda_oom,
        Cause.driver_mismatch_or_no_gpu,
        Cause.disk_full,
        Cause.filesystem_io,
        Cause.process_killed_unknown,
    }
)
"""Causes for which the host that reports the failure is the one at fault; of a connection the other end may be."""
_TABLE_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_NODES = (re.compile(r"(?:^|\s)([\w.-]+) kernel:"), re.compile(r"srun: error: ([\w.-]+): tasks?\b"))


@dataclass(frozen=True)
class LogFinding:
    """A log line about a failure.

    Attributes:
        file: name of the log.
        line: line number, from 1.
        text: text of the line.
        signature: matching signature.
        strength: strength of the signature, reduced if the line or its context shows that the failure is harmless.
        rank: rank that wrote the line or the log; None if unknown.
        node: node that the line names; empty if none.
        named: culprit that the message itself names; empty if none.
        time_s: seconds since the start of the year, by the timestamp of the line or the nearest one before it; None if
            there is none.
        progress_after: whether the log shows training progress long after the line.
        probability: probability of the cause if the line was classified by its wording, else None.
        excused: whether the line is marked as a warning or as retried, or is from a part that does not end the program.
        of_pace: whether the steps themselves show the failure, so that later ones do not disprove it.
    """

    file: str
    line: int
    text: str
    signature: Signature
    strength: Strength
    rank: int | None = None
    node: str = ""
    named: str = ""
    time_s: float | None = None
    progress_after: bool = False
    probability: float | None = None
    excused: bool = False
    of_pace: bool = False


@dataclass
class LineKind:
    """Lines that differ only in their digits.

    Attributes:
        text: text of the first line.
        line: number of the first line.
        count: number of lines.
        last: number of the last line.
    """

    text: str
    line: int
    count: int = 0
    last: int = 0


@dataclass
class Survey:
    """Result of scanning one log.

    Attributes:
        file: name of the log.
        rank: rank that wrote the log; None if unknown, or if several ranks wrote it.
        lines: number of lines.
        num_bytes: size in bytes.
        kinds: kinds of lines by their text without digits.
        findings: lines about failures, in order.
        last_progress: number of the last line that shows training progress; 0 if none.
        finished: number of the last line that says that the training ended as planned; 0 if none, or if steps follow.
        end: number and text of the last line that is not empty.
        root_cause: rank that torchrun's table names as the root cause; empty if there is none.
        notes: problems with the file.
    """

    file: str
    rank: int | None = None
    lines: int = 0
    num_bytes: int = 0
    kinds: dict[bytes, LineKind] = field(default_factory=dict)
    findings: list[LogFinding] = field(default_factory=list)
    last_progress: int = 0
    finished: int = 0
    end: tuple[int, str] = (0, "")
    root_cause: str = ""
    notes: list[str] = field(default_factory=list)

    def templates(self) -> Counter[str]:
        """Returns the templates of the log, each with its number of lines."""
        found: Counter[str] = Counter()
        for kind in self.kinds.values():
            found[template(kind.text)] += kind.count
        return found


def survey_log(file: str, blocks: Iterable[bytes], rank: int | None = None, known: Knowledge | None = None) -> Survey:
    """Scans a log for findings.

    Args:
        file: name of the log in the findings.
        blocks: content of the log in pieces of any size.
        rank: rank that wrote the log; None if unknown.
        known: signatures and model; None uses the bundled ones.
    """
    return _Surveyor(Survey(file, rank), known or knowledge()).read(blocks)


class _Surveyor:
    """Scans one log, block by block."""

    def __init__(self, survey: Survey, known: Knowledge):
        self._survey = survey
        self._model = known.model
        self._matching: dict[bytes, Counter[str]] = {}
        self._progressing: set[bytes] = set()
        self._stepping: set[bytes] = set()
        self._last_step = 0
        self._finishing: set[bytes] = set()
        self._pace = Pace()
        self._table = known.table
        self._before: list[bytes] = []
        self._in_table_rank: int | None = None

    def read(self, blocks: Iterable[bytes]) -> Survey:
        for lines in _whole_lines(blocks):
            self._take(lines)
        survey = self._survey
        if survey.finished < self._last_step:
            survey.finished = 0
        survey.findings += [
            LogFinding(
                survey.file,
                one.line,
                one.text,
                Signature(one.cause, one.strength, (), one.text),
                one.strength,
                of_pace=True,
            )
            for one in self._pace.troubles()
        ]
        survey.findings.sort(key=lambda finding: finding.line)
        return survey

    def _take(self, block: bytes) -> None:
        survey, start = self._survey, self._survey.lines
        lines = block.split(b"\n")
        keys = block.translate(None, _DIGITS).split(b"\n")
        survey.num_bytes += len(block) + 1
        first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        last = dict(zip(keys, range(len(keys)), strict=True))
        suspicious = _suspicious_lines(block, lines) if len(survey.kinds) >= _MOST_KINDS else None
        for key, count in Counter(keys).items():
            kind = survey.kinds.get(key)
            if kind is None and (suspicious is None or first[key] in suspicious):
                kind = self._new_kind(key, lines, first[key])
            if kind is not None:
                kind.count += count
                kind.last = start + last[key] + 1
        for key in self._progressing & last.keys():
            survey.last_progress = max(survey.last_progress, start + last[key] + 1)
        for key in self._stepping & last.keys():
            self._last_step = max(self._last_step, start + last[key] + 1)
        for key in self._finishing & last.keys():
            survey.finished = max(survey.finished, start + last[key] + 1)
        if b"Root Cause" in block and (found := _ROOT_CAUSE.search(block)) is not None:
            survey.root_cause = f"rank {int(found[1])}"
        self._pace.read(lines, keys, start, self._stepping)
        ending = next((index for index in range(len(lines) - 1, -1, -1) if lines[index].strip()), None)
        if ending is not None:
            survey.end = (start + ending + 1, decode_log_line(lines[ending]).strip())
        matching = self._matching.keys() & first.keys()
        if matching:
            for index in [index for index, key in enumerate(keys) if key in matching]:
                self._note(lines, index, keys[index])
        survey.lines += len(lines)
        self._before = (self._before + lines if len(lines) < _TIME_REACH else lines)[-_TIME_REACH:]

    def _new_kind(self, key: bytes, lines: list[bytes], index: int) -> LineKind | None:
        """Examines the first line of a kind; returns None if the kind is ignored."""
        survey, raw = self._survey, lines[index]
        crowded = len(survey.kinds) >= _MOST_KINDS
        if crowded and not _is_suspicious(raw):
            return None
        text = decode_log_line(raw)
        if text and self._table.match(_SPECULATION.split(text, 1)[0] or text) is not None:
            self._matching[key] = Counter()
        elif FINISHED.search(text):
            self._finishing.add(key)
        elif PROGRESS.search(text):
            self._progressing.add(key)
            if STEP.search(text) and not EVALUATION.search(text):
                self._stepping.add(key)
        kind = LineKind(text[:_LONGEST_LINE], survey.lines + index + 1)
        if not crowded or key in self._matching:
            survey.kinds[key] = kind
        return kind

    def _note(self, lines: list[bytes], index: int, key: bytes) -> None:
        """Adds a finding if a line of a matching kind is about a failure."""
        seen, text = self._matching[key], decode_log_line(lines[index])
        seen[text] += 1
        if seen[text] > 1 or len(seen) > _MOST_LINES_A_KIND:
            return
        near = self._near(lines, index)
        before = [decode_log_line(line) for line in near[-_CONTEXT:]]
        frames = self._frames(text, near) if _ENDS_TRACEBACK.search(text) else ""
        matched = self._table.match(_SPECULATION.split(text, 1)[0] or text, frames)
        if matched is None or _is_source_line(text, before):
            return
        whole = text
        if matched.signature.fallback and (rest := _continuation(lines, index)):
            whole = f"{text} {rest}"
            matched = self._table.match(whole, frames) or matched
        signature, groups, probability = matched.signature, matched.found.groupdict(), None
        if signature.fallback:
            signature, probability = refine_by_wording(self._model, signature, whole, frames)
        survey = self._survey
        strength, excused = _strength(signature, text, before)
        rank = _rank_of(text, before)
        named = f"rank {groups['rank']}" if groups.get("rank") else groups.get("node") or ""
        survey.findings.append(
            LogFinding(
                survey.file,
                survey.lines + index + 1,
                text.strip(),
                signature,
                strength,
                survey.rank if rank is None else rank,
                _node_of(signature.cause, text),
                named,
                self._time(text, near),
                probability=probability,
                excused=excused,
            )
        )

    def _near(self, lines: list[bytes], index: int) -> list[bytes]:
        """Returns up to _TIME_REACH lines before a line, the nearest last."""
        if index >= _TIME_REACH:
            return lines[index - _TIME_REACH : index]
        return (self._before + lines[:index])[-_TIME_REACH:]

    def _frames(self, text: str, near: list[bytes]) -> str:
        """Returns the frames of the traceback before an error line, one per line.

        The first line is "raised" if the program itself raises the error or asserts with a message: an explicit check,
        in contrast to an error that Python raises.

        Args:
            text: error line.
            near: lines before it, the nearest last.
        """
        found: list[str] = []
        raised = False
        for raw in reversed(near):
            if b"Traceback (most recent" in raw:
                break
            if (frame := _frame_of(raw)) is not None:
                found.append(frame)
            elif not found and (source := _RAISED.search(decode_log_line(raw))) is not None:
                raised = (source["kind"] or "AssertionError") in text
        return "\n".join([*(["raised"] if raised else []), *reversed(found)])

    def _time(self, text: str, near: list[bytes]) -> float | None:
        times = (time_of(line) for line in (text, *map(decode_log_line, reversed(near))))
        return next((found for found in times if found is not None), None)


def lines_marked_as_errors(survey: Survey) -> list[LineKind]:
    """Returns the last kinds of lines that are marked as errors and that no training progress follows.

    Args:
        survey: survey of the log.
    """
    kinds = sorted(survey.kinds.values(), key=lambda kind: kind.last)[-_ENDING_KINDS:]
    late = [kind for kind in kinds if kind.last > max(survey.last_progress, survey.finished)]
    return [
        kind
        for kind in late
        if EXCEPTION.search(kind.text) and not PASSING.search(kind.text) and not RETRIED.search(kind.text)
    ]


def refine_by_wording(
    model: MessageModel, general: Signature, text: str, frames: str = ""
) -> tuple[Signature, float | None]:
    """Refines a fallback signature by the wording of its line.

    Args:
        model: classifies the line.
        general: fallback signature that matches the line.
        text: the line.
        frames: frames of the traceback before the line, one per line.

    Returns:
        A signature with the model's cause and its probability if the model agrees or is sure enough; else the fallback
        signature and None.
    """
    verdict = model.judge(text, frames)
    if verdict is None or (verdict.cause != general.cause and verdict.probability < general.overruled_at):
        return general, None
    if verdict.cause == general.cause:
        return general, verdict.probability
    return Signature(verdict.cause, general.strength, (), text, verdict.restartable), verdict.probability


def findings_by_wording(survey: Survey, model: MessageModel, warnings: bool = True) -> list[LogFinding]:
    """Returns findings by wording, for lines that match no signature.

    Args:
        survey: survey of the log.
        model: classifies the lines.
        warnings: whether lines that are marked as warnings count.
    """
    found = []
    kinds = sorted(survey.kinds.values(), key=lambda kind: kind.last)
    suspicious = [kind for kind in kinds[:-_ENDING_KINDS] if _is_suspicious(kind.text.encode())]
    signed = {finding.line for finding in survey.findings}
    for kind in suspicious[-_MOST_WORDED:] + kinds[-_ENDING_KINDS:]:
        if kind.line in signed:
            continue
        harmless = is_harmless(kind.text) or (not warnings and is_warning(kind.text))
        verdict = None if harmless else model.judge(kind.text)
        if verdict is None or verdict.probability < _SURE_WORDING:
            continue
        signature = Signature(verdict.cause, Strength.failure, (), kind.text, verdict.restartable)
        rank = _rank_of(kind.text, [])
        node = _node_of(verdict.cause, kind.text)
        found.append(
            LogFinding(
                survey.file,
                kind.line,
                kind.text.strip(),
                signature,
                signature.strength,
                survey.rank if rank is None else rank,
                node,
                probability=verdict.probability,
            )
        )
    return found


def _whole_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields blocks of whole lines, without the last line break of each block."""
    rest = b""
    for block in blocks:
        head, found, tail = block.rpartition(b"\n")
        if found:
            yield rest + head
            rest = tail
        else:
            rest += block
    if rest:
        yield rest


def _is_suspicious(raw: bytes) -> bool:
    lowered = raw.lower()
    return any(word in lowered for word in _SUSPICIOUS)


def _suspicious_lines(block: bytes, lines: list[bytes]) -> set[int]:
    """Returns the indices of suspicious lines; searching the whole block is ten times faster than line by line."""
    ends = list(accumulate(len(line) + 1 for line in lines))
    lowered, found = block.lower(), set()
    for word in _SUSPICIOUS:
        at = lowered.find(word)
        while at >= 0:
            index = bisect_right(ends, at)
            found.add(index)
            at = lowered.find(word, ends[index])
    return found


def decode_log_line(raw: bytes) -> str:
    """Decodes a line; a very long one is reduced to its suspicious progress bar segment, or to both of its ends."""
    raw = raw.rstrip(b"\r\n")
    if len(raw) > _LONGEST_LINE:
        pieces = [piece for piece in raw.split(b"\r") if _is_suspicious(piece)] or [raw[:1000] + b" ... " + raw[-1000:]]
        raw = pieces[0] if len(pieces[0]) <= _LONGEST_LINE else pieces[0][:1000] + b" ... " + pieces[0][-1000:]
    return raw.decode("utf-8", errors="replace").replace("\r", " ")


def _strength(signature: Signature, text: str, before: list[str]) -> tuple[Strength, bool]:
    """Returns the strength of a finding, and whether the line or its context shows that the failure is harmless.

    It is lower than the signature's if so, or if the line is not marked as an error where the signature wants that.
    """
    strength = int(signature.strength)
    if signature.within_error and not EXCEPTION.search(text):
        strength -= 2
    strength -= bool(WRAPPER.search(text))
    excused = 2 * bool(IGNORED_COMMAND.match(text))
    # What only may follow from a failure must sound like one: healthy programs name their parts, too.
    vague = signature.strength <= Strength.cascade
    excused += 2 * bool(SETTING.match(text) or (vague and not mentions_failure(text)))
    if not SERIOUS.search(text):
        # A trainer logs that it is asked to stop as a warning, and a traceback at any level.
        logged = any(_FRAME.search(line) for line in before[-2:]) or (
            signature.cause is Cause.preempted_or_time_limit and signature.strength >= Strength.failure
        )
        excused += 2 * bool(PASSING.search(text) and not logged) + 2 * bool(RETRIED.search(text))
    if any("Exception ignored in" in line or "atexit" in line for line in before):
        excused += 3
    return Strength(max(strength - excused, Strength.noise)), excused > 0


def _continuation(lines: list[bytes], index: int) -> str:
    """Returns the continuation of a multi-line message: the following lines that are indented."""
    found = []
    first = _unprefixed(decode_log_line(lines[index]))
    for raw in lines[index + 1 : index + 1 + _MOST_CONTINUED]:
        text = _unprefixed(decode_log_line(raw))
        if first[:1].isspace() or not _CONTINUED.match(text) or _FRAME.search(text):
            break
        found.append(text.strip())
    return " ".join(found)


def _unprefixed(text: str) -> str:
    """Removes the rank prefix that torchrun adds to a line."""
    return re.sub(r"^(?:\[\w+\]:)+ ?", "", text)


def _frame_of(raw: bytes) -> str | None:
    """Returns a traceback frame in Python's own format; None if the line is not a frame."""
    if b'File "' in raw:
        return decode_log_line(raw)
    if b".py" in raw and (found := _OTHER_FRAME.search(decode_log_line(raw))) is not None:
        return f'  File "{found["path"]}", line {found["line"] or 0}, in {found["function"]}'
    return None


def _is_source_line(text: str, before: list[str]) -> bool:
    """Whether a line is part of a traceback, not a message.

    Source code is indented more than the line that names its file, or follows its line number; C++ frames are numbered.
    """
    if _QUOTED_SOURCE.match(text) or _NATIVE_FRAME.match(text):
        return True
    found = _FRAME.search(before[-1]) if before else None
    return found is not None and text[found.start() : found.start() + 2].isspace()


def _node_of(cause: Cause, text: str) -> str:
    """Returns the node that a line names as the one at fault; empty if it names none."""
    patterns = (*_NODES, _HOST_PREFIX, _HOST_NAME) if cause in _OF_A_HOST else _NODES
    return next((found[1] for pattern in patterns if (found := pattern.search(text))), "")


def _rank_of(text: str, before: list[str]) -> int | None:
    """Returns the rank that a line is about: from the line itself, or from torchrun's table of failures."""
    if re.match(r"\s*(?:exitcode|error_file|traceback|time)\s*:", text):
        for line in reversed(before):
            if found := _TABLE_RANK.match(line):
                return int(found[1])
    for pattern in _RANKS:
        if found := pattern.search(text):
            return int(found[1])
    return None
