"""Control plane: admission of ranks, values and errors."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megads.errors import ConfigError, Fenced, MegadsError, UnhealthyNode
from megads.runtime.distributed import (
    ALONE,
    ControlPlane,
    authenticate,
    decode,
    decode_error,
    encode,
    encode_error,
    open_control_plane,
)
from megads.runtime.ports import Secret
from megads.tools.autotune.benchmark import DeviceBroken
from tests.distributed import run_ranks

OURS, THEIRS = bytes(range(32)), bytes(32)


def _admitted(keys: Sequence[bytes | None]) -> str:
    control = open_control_plane()
    key = keys[control.rank]
    try:
        authenticate(control, Secret(key) if key is not None else None)
    except UnhealthyNode as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        pytest.param([OURS, OURS, OURS], "", id="one start"),
        pytest.param([None, None, None], "", id="started by hand"),
        pytest.param([OURS, None, OURS], "rank 1 of 3 joined without the secret that the others have", id="none"),
        pytest.param([OURS, OURS, THEIRS], "rank 2 of 3 joined with another secret than this start's", id="another"),
        pytest.param([THEIRS, OURS, OURS], "rank 0 of 3 joined with another secret than this start's", id="rank 0"),
    ],
)
def test_every_rank_proves_that_it_knows_the_secret(keys: list[bytes | None], said: str) -> None:
    """Catches a process without the secret that is admitted, a legitimate rank that is blamed, ranks that continue
    without the one that refused, and worlds without a launcher that are refused."""
    for found in run_ranks(_admitted, 3, keys):
        assert found.startswith(said) and bool(found) == bool(said)


class Kind(StrEnum):
    """Enum in a message."""

    plain = "plain"


class Pair(NamedTuple):
    """Named tuple in a message."""

    number: int
    text: str | None = None


@dataclass(frozen=True)
class Record:
    """Has a field of every type that callers send."""

    where: Path
    kinds: frozenset[Kind]
    shape: tuple[int, ...]
    times: dict[str, float]
    pair: Pair


RECORD = Record(Path("/a/b"), frozenset({Kind.plain}), (2, 3), {"a": math.inf, "b": -0.0, "c": 5e-324}, Pair(1))


def _exchanged(control: ControlPlane) -> list[Any]:
    """Returns what a rank gets from every operation of a control plane."""
    rank = control.rank
    found: list[Any] = [control.gather(rank * 10, int), control.gather_to_first(rank, int)]
    found += [control.gather("x" * rank, str), control.broadcast(str(rank), str)]
    found += [control.broadcast(str(rank), str, source=control.world_size - 1), control.broadcast_number(rank + 7)]
    found += [[control.any(rank in flagged) for flagged in ((), (0,), (0, 2))]]
    found += [control.broadcast(RECORD if rank == 0 else None, Record) == RECORD]
    control.barrier()
    for values in (["same"] * 3, ["old", "new", "old"]):
        try:
            control.require_equal("the frozen config", values[rank])
            found.append("")
        except ConfigError as error:
            found.append(str(error))

    def decide() -> str:
        if control.rank:
            raise AssertionError("only rank 0 decides")
        raise DeviceBroken("no kernel", "ours")

    with pytest.raises(ConfigError, match="no kernel") as raised:
        control.first_decides(decide, str)
    assert raised.value.exit_code == ConfigError.exit_code
    assert control.first_decides(lambda: None, str | None) is None
    return found


def _on_ranks(backend: str) -> list[Any]:
    """Checks that, if the default group claims to be NCCL, all collectives use another group."""
    dist.get_backend = lambda: backend
    control = open_control_plane()
    assert (control.group is dist.group.WORLD) == (backend == "gloo")
    used = []
    for name in ("allgather", "broadcast", "allreduce", "gather", "barrier"):
        original = getattr(dist.ProcessGroup, name)

        def recorded(group: dist.ProcessGroup, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            used.append(group)
            return original(group, *args, **kwargs)

        setattr(dist.ProcessGroup, name, recorded)
    found = _exchanged(control)
    assert len(used) > 10 and all(group is control.group for group in used)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_agree_through_one_group(backend: str) -> None:
    """Catches a value of the wrong rank, a flag that only its own rank sees, an error on the differing rank alone, so
    that the others hang, a message without the ranks, and a collective on the default group, NCCL on GPUs."""
    found = run_ranks(_on_ranks, 3, backend)
    differs = "the frozen config differs between ranks: {"
    for rank, of_rank in enumerate(found):
        *values, equal, different = of_rank
        gathered = [[0, 10, 20], [0, 1, 2] if rank == 0 else None, ["", "x", "xx"]]
        assert values == [*gathered, "0", "2", 7, [False, True, True], True]
        assert equal == ""
        assert different.startswith(differs) and "'old': [0, 2]" in different and "'new': [1]" in different


def _hears_a_stranger(message: bytes, length: int) -> str:
    """Returns the error of rank 0 when rank 1 sends these bytes where a string is expected."""
    control = open_control_plane()
    if control.rank == 0:
        with pytest.raises(UnhealthyNode) as raised:
            control.gather("fine", str)
        return str(raised.value)
    own = torch.tensor([length]).view(torch.uint8)
    lengths = control.gather_bytes(own).view(torch.int64)
    if 0 < length < 2**20:
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        control.gather_bytes(padded)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("message", "length", "said"),
    [
        (b"cos\nsystem\n(S'touch owned'\ntR.", 31, 'rank 1 sent b"cos\\nsystem'),
        (b"7", 1, "rank 1 sent b'7' where str was expected"),
        (b"", -1, "rank 1 announces a message of -1 bytes"),
        (b"", 2**60, "rank 1 announces a message of 1152921504606846976 bytes"),
    ],
)
def test_an_invalid_message_is_refused_by_name(message: bytes, length: int, said: str) -> None:
    """Catches a pickle that is loaded, a wrong type that is accepted, and memory allocated for any announced length."""
    assert said in run_ranks(_hears_a_stranger, 2, message, length)[0]


@given(st.floats())
def test_floats_keep_their_bits(value: float) -> None:
    """Catches a clock offset or a time that is rounded in transit, and NaN that becomes null."""
    found = decode(encode(value, float), float, 0)
    assert math.isnan(found) if math.isnan(value) else struct.pack("d", found) == struct.pack("d", value)


def test_values_come_back_as_they_are() -> None:
    """Catches a tuple decoded as a list, a path as a string, and a name that is not UTF-8 and fails to encode."""
    for value, kind in ((RECORD, Record), (None, NoneType), ([Path("/a")], list[Path]), (("a", "b"), tuple[str, ...])):
        found = decode(encode(value, kind), kind, 0)
        assert found == value and type(found) is type(value)
    assert decode(encode("a\udc80", str), str, 0) == "a?"
    with pytest.raises(Exception, match="Expected `int`"):
        encode("1", int)
    with pytest.raises(UnhealthyNode, match=r"rank 4 .* where Record was expected \(where: Field required\)"):
        decode(b'{"kinds": []}', Record, 4)


def test_errors_are_those_of_megads() -> None:
    """Catches an exit code that differs on other ranks, and a class that a peer names and this rank instantiates."""
    for error, known in ((Fenced("gone"), Fenced), (DeviceBroken("broken", "ours"), ConfigError)):
        found = decode_error(*encode_error(error))
        assert type(found) is known and str(found) == str(error) and found.exit_code == error.exit_code
    for name in ("SystemExit", "errno", "EXIT_BUG", "__loader__", ""):
        assert type(decode_error(name, "x")) is MegadsError


def _alone_in_company() -> str:
    try:
        ALONE.gather(1, int)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_single_process_needs_no_process_groups() -> None:
    """Catches a single-process tool that needs process groups, and its control plane in a world of several ranks."""
    assert ALONE.gather(3, int) == ALONE.gather_to_first(3, int) == [3]
    assert ALONE.broadcast(3, int) == ALONE.broadcast_number(3) == 3
    assert ALONE.any(True) and not ALONE.any(False)
    assert run_ranks(_alone_in_company, 2) == ["a control plane of 1 ranks is used in a world of 2"] * 2
