"""Reads dumps of torch's flight recorder, pickled or JSON, without running anything that is in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megads.diagnosis.flight_recorder import FlightTrace, parse_trace
from megads.errors import DataError
from megads.runtime.files import parse_json, read_regular

_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")
_PICKLE = b"\x80"


def read_dumps(names: Sequence[str]) -> list[FlightTrace]:
    """Returns the traces of all ranks whose dumps are named or lie in folders that are.

    Raises:
        DataError: one is not there, is no dump, or two are of the same rank.
    """
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            files += sorted(
                file for file in path.iterdir() if file.is_file() and _RANK.search(file.name) and _looks_like_dump(file)
            )
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"flight_recorder: there is no file {path}")
    if not files:
        raise DataError(f"flight_recorder: no dumps in {', '.join(names)}: want files whose names end in their rank")
    traces: dict[int, FlightTrace] = {}
    for path in files:
        found = _RANK.search(path.name)
        if found is None:
            raise DataError(
                f"flight_recorder: {path}: the name of a dump must end in its rank, as in nccl_trace_rank_3"
            )
        rank = int(found[1])
        if rank in traces:
            raise DataError(
                f"flight_recorder: {path} is a second dump of rank {rank}: give the dumps of one failure only"
            )
        traces[rank] = _read(path, rank)
    return [traces[rank] for rank in sorted(traces)]


def _looks_like_dump(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) in (_PICKLE, b"{")


def _read(path: Path, rank: int) -> FlightTrace:
    # It pulls in torch.
    from megads.tools.exchange.inert_pickle import read_inert

    try:
        content = read_regular(path)
        dump = read_inert(content) if content.startswith(_PICKLE) else parse_json(content)
        if not isinstance(dump, dict):
            raise ValueError("holds no entries of a flight recorder")
        return parse_trace(rank, dump)
    except (OSError, ValueError) as error:
        raise DataError(f"flight_recorder: {path} {error}") from error
