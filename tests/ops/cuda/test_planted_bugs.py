"""Tests that the checks of this folder find bugs that are planted in the kernels' source."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ops.cuda.lanes import KernelFault, Lanes

ROWS = 5


def replace(old: str, new: str) -> Callable[[str], str]:
    """Returns a text mutation of the kernels, for fp32 alone, which compiles faster."""

    def change(text: str) -> str:
        other_types = [
            line for line in text.splitlines() if line.lstrip().startswith(("case MEGADS_BF", "case MEGADS_FP1"))
        ]
        for line in other_types:
            text = text.replace(line, "")
        return text.replace(old, new)

    return change


def softmax(change: Callable[[str], str] | None, keys: int, **how: int) -> bool:
    """Whether the forward kernel's results are correct."""
    scores = torch.randn(1, 1, ROWS, keys, generator=torch.Generator().manual_seed(0))
    places = torch.full((ROWS,), keys - 1)
    with Lanes("softmax", change=change, **how) as lanes:
        out = lanes.empty(scores.shape, torch.float32)
        lanes.call("softmax_forward", torch.float32, *scores.shape, 1.0, None, places, None, None, scores, out,
                   None, 0, 0, 0, None)  # fmt: skip
        return torch.allclose(out, scores.softmax(-1), rtol=1e-5, atol=1e-7)


PACKS_PAST_THE_END = replace("first <= count - kCount &&", "first < count &&")
ALIGNMENT_IGNORED = replace("% alignof(Pack<T, kCount>) == 0", "% sizeof(T) == 0")
ROW_TOO_MANY = replace("row >= shape.rows) return;", "row > shape.rows) return;")
EARLY_RETURN = replace("if (lane == 0) {", "if (lane == 31) return;\n      if (lane == 0) {")
CHUNK_TOO_FEW = replace("(shape.keys + shift + RowPart", "(shape.keys + RowPart")
NO_BARRIER = replace("__syncthreads();\n      const bool used", "const bool used")
WARP_TOO_MANY = replace("lane < kThreads / kWarp;", "lane < kThreads / kWarp + 1;")
OTHER_LANE = replace("distance > 0;", "distance > 1;")
ONE_PLACE = replace("turn_ ^= 1;", "")


def test_unchanged_kernels_pass_the_shims_checks() -> None:
    """Catches a check that rejects correct kernels, with which every test below would pass."""
    assert softmax(None, 100, order=3) and softmax(None, 1500, order=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "keys", "how", "found"),
    [
        pytest.param(PACKS_PAST_THE_END, 97, {}, "outside its buffers|memory beside", id="packs past the end of a row"),
        pytest.param(ALIGNMENT_IGNORED, 99, {"residue": 1}, "misaligned", id="misaligned accesses"),
        pytest.param(
            EARLY_RETURN,
            1500,
            {},
            "divergence: thread 0 .* the barrier .* while thread 31 waits",
            id="lanes that leave",
        ),
        pytest.param(ROW_TOO_MANY, 100, {}, "outside its buffers", id="a row too many"),
    ],
)
def test_planted_faults_are_named(change: Callable[[str], str], keys: int, how: dict[str, int], found: str) -> None:
    """Catches a shim that continues after a fault that a GPU would report."""
    with pytest.raises(KernelFault, match=found):
        softmax(change, keys, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "keys"),
    [
        pytest.param(CHUNK_TOO_FEW, 1023, id="the end of a row that starts behind a border is left out"),
        pytest.param(NO_BARRIER, 1500, id="a missing barrier"),
        pytest.param(WARP_TOO_MANY, 1500, id="shared memory that nobody wrote"),
        pytest.param(OTHER_LANE, 100, id="lanes left out of a sum"),
        pytest.param(ONE_PLACE, 1500, id="shared memory used again before all have read it"),
    ],
)
def test_planted_races_give_wrong_results(change: Callable[[str], str], keys: int) -> None:
    """Catches a shim that runs threads in so regular an order that a race has no effect."""
    assert not softmax(change, keys, order=1)
