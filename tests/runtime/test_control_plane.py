"""Agreement between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megads.errors import ConfigError
from megads.runtime.control_plane import ALONE, ControlPlane, open_control_plane
from tests.distributed import run_ranks


def _exchanged(control: ControlPlane) -> list[Any]:
    """What a rank gets from everything that a control plane does."""
    rank = control.rank
    found: list[Any] = [control.gather(rank * 10), control.gather_to_first(rank), control.broadcast(str(rank))]
    found += [control.broadcast(str(rank), source=control.world_size - 1), control.broadcast_number(rank + 7)]
    found += [[control.any(rank in flagged) for flagged in ((), (0,), (0, 2))]]
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
        raise ConfigError("no kernel")

    with pytest.raises(ConfigError, match="no kernel"):
        control.first_decides(decide)
    return found


def _on_ranks(backend: str) -> list[Any]:
    """Beside a default group that says it is NCCL there is another, and nothing may go through the default one."""
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
    """Catches a value of another rank than the one asked, a flag that only its own rank sees, an error on the odd rank
    alone, which leaves the others waiting, a message without the ranks, and a collective on the training's group, which
    is NCCL on GPUs."""
    found = run_ranks(_on_ranks, 3, backend)
    differs = "the frozen config differs between ranks: {"
    for rank, of_rank in enumerate(found):
        *values, equal, different = of_rank
        assert values == [[0, 10, 20], [0, 1, 2] if rank == 0 else None, "0", "2", 7, [False, True, True]]
        assert equal == ""
        assert different.startswith(differs) and "'old': [0, 2]" in different and "'new': [1]" in different


def _alone_in_company() -> str:
    try:
        ALONE.gather(1)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_alone() -> None:
    """Catches a tool of one process that needs process groups, and a rank of several that nobody gave the others."""
    assert ALONE.gather(3) == ALONE.gather_to_first(3) == [3] and ALONE.broadcast(3) == ALONE.broadcast_number(3) == 3
    assert ALONE.any(True) and not ALONE.any(False)
    assert run_ranks(_alone_in_company, 2) == ["a control plane of 1 ranks is used in a world of 2"] * 2
