"""Fits help to the width of the terminal: keeps columns, wraps explanations, continues commands with a backslash."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

_WIDEST, _NARROWEST, _NO_TERMINAL = 114, 40, 80
_LARGEST_INDENT = 30
_COMMANDS = ("megads ", "srun ", "sbatch ", "zcat ")
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")


def help_width() -> int:
    """Returns the width of help in characters: the terminal's, within limits, and 80 without a terminal."""
    return max(_NARROWEST, min(shutil.get_terminal_size((_NO_TERMINAL, 24)).columns, _WIDEST))


def two_columns(rows: Sequence[tuple[str, str]], indent: int = 0) -> str:
    """Returns lines of names and explanations; a long name has its explanation below it.

    Args:
        rows: names and explanations.
        indent: spaces before every line.
    """
    width = help_width()
    column = min(max((len(name) for name, _ in rows), default=0), _LARGEST_INDENT) + 2
    lines: list[str] = []
    for name, explanation in rows:
        follows = textwrap.wrap(explanation, width - indent - column, break_on_hyphens=False) or [""]
        if len(name) + 2 > column:
            names = textwrap.wrap(name, width - indent, subsequent_indent="    ", break_on_hyphens=False)
            lines += [*names, *(" " * column + part for part in follows if part)]
        else:
            lines.append(f"{name:<{column}}{follows[0]}".rstrip())
            lines += [" " * column + part for part in follows[1:]]
    return textwrap.indent("\n".join(lines), " " * indent)


def fit_width(text: str) -> str:
    """Returns help text with no line longer than `help_width`."""
    width = help_width()
    return "\n".join(made for block in _blocks(text.splitlines(), width) for made in _fit(block, width))


def _blocks(lines: Sequence[str], width: int) -> Iterator[list[str]]:
    """Yields single lines, and paragraphs of prose of which a line is too long."""
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if _is_prose(line) and (not paragraph or _indent(line) == _indent(paragraph[0])):
            paragraph.append(line)
            continue
        yield from [paragraph] if any(len(one) > width for one in paragraph) else ([one] for one in paragraph)
        paragraph = [line] if _is_prose(line) else []
        if not paragraph:
            yield [line]


def _is_prose(line: str) -> bool:
    text = line.strip()
    return bool(text) and not _GAP.search(text) and not _is_command(line) and not text.startswith("==")


def _is_command(line: str) -> bool:
    """Whether a line is an example: these are indented."""
    return line.startswith("  ") and line.lstrip().startswith(_COMMANDS)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _fit(block: Sequence[str], width: int) -> list[str]:
    if len(block) == 1 and len(block[0]) <= width:
        return list(block)
    space = " " * _indent(block[0])
    if len(block) > 1 or _is_prose(block[0]):
        prose = " ".join(line.strip() for line in block)
        return textwrap.wrap(prose, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)
    line = block[0]
    if _is_command(line):
        return _command(line, width)
    return _columns(line, width)


def _command(line: str, width: int) -> list[str]:
    """Breaks a command between arguments, with a backslash; what explains it follows below."""
    space = " " * _indent(line)
    command, *notes = _GAP.split(line.strip(), maxsplit=1)
    words = re.findall(r"(?:'[^']*'|\S)+", command)
    lines = [space + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) + 2 > width:
            lines[-1] += " \\"
            lines.append(f"{space}  {word}")
        else:
            lines[-1] += f" {word}"
    return lines + [made for note in notes for made in textwrap.wrap(
        note, width, initial_indent=f"{space}    ", subsequent_indent=f"{space}    "
    )]  # fmt: skip


def _columns(line: str, width: int) -> list[str]:
    """Breaks a line of columns: explanations are wrapped below their start, further keys begin lines of their own."""
    gap = _GAP.search(line, _indent(line))
    assert gap is not None, line
    column = gap.end() if gap.end() <= _LARGEST_INDENT + 10 else _indent(line) + 4
    more = re.search(r"(?<=\S) {2,}(?=[\w.*']+[=.]\S)", line[gap.end() :])
    end = len(line) if more is None else gap.end() + more.start()
    first = line[:end]
    name, explanation = line[: gap.start()], line[gap.end() : end]
    lines = [first]
    if len(first) > width:
        parts = textwrap.wrap(explanation, width - column, break_on_hyphens=False)
        joined = f"{name:<{column}}{parts[0]}"
        lines = [joined] if gap.end() == column else [name, " " * column + parts[0]]
        lines += [" " * column + part for part in parts[1:]]
    if more is not None:
        lines += _fit([" " * _indent(line) + line[gap.end() + more.end() :]], width)
    return lines
