"""Tests that the checks of this folder find bugs that are planted in the kernels' source."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.ops.cuda import test_float8 as float8
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


def quantization(change: Callable[[str], str] | None) -> None:
    """Runs the checks of quantization on the kernels with a change."""
    x = float8.every_kind(320, torch.float32)
    long = float8.every_kind(9000, torch.float32)[:5]
    rows = torch.randn(8, 320, generator=torch.Generator().manual_seed(0))
    float8.check_magnitudes(float8.magnitudes(x, change, order=1), float8.magnitude_bits(x, (1,)))
    float8.check_magnitudes(float8.magnitudes(long, change, order=1), float8.magnitude_bits(long, (1,)))
    float8.check_magnitudes(float8.column_magnitudes(long.T.contiguous(), change), float8.magnitude_bits(long, (1,)))
    float8.check_magnitudes(float8.column_magnitudes(rows, change), float8.magnitude_bits(rows, (0,)))
    for dtype in float8.FORMATS:
        float8.check_quantize(x, dtype, change)
        float8.check_rows(x, dtype, change, order=1)
        float8.check_rows(long, dtype, change, order=1)
    usual = torch.cat((x[:1], x[8:])).repeat(12, 1)
    float8.check_both(usual, True, change)
    float8.check_both(usual, False, change)


ROUNDED_TWICE = replace(
    "rounded<Format>(values[i] * scale, values[i + 1] * scale)",
    "rounded<Format>(widen(__float2bfloat16_rn(values[i] * scale)), widen(__float2bfloat16_rn(values[i + 1] * scale)))",
)
OTHER_FORMAT = replace("kKind = __NV_E5M2", "kKind = __NV_E4M3")
OTHER_GROUP = replace("scale_of<Format>(bits[group])", "scale_of<Format>(bits[0])")
NO_CARRY = replace("kCarry = 0x1fffffu", "kCarry = 0")
SMALLER_SCALES = replace("kSmallest = 27", "kSmallest = 1")
NAN_LOST = replace("return x > y ? x : y; }", "return __uint_as_float(x) > __uint_as_float(y) ? x : y; }")
INFINITY_KEPT = replace("bits >= kInfinityBits", "bits > kInfinityBits")
SIGN_KEPT = replace("pack.words[i] & kMagnitude", "pack.words[i]")
NOT_TRANSPOSED = replace("(along + i) * kTileStride + down", "down * kTileStride + along + i")
SCALES_OF_ROWS = replace("? column + i : 0]", "? row : 0]")
WARP_LEFT_OUT = replace("other < kWarps", "other < kWarps - 1")
PART_LEFT_OUT = replace("part < parts; part += kThreads", "part < parts - 1; part += kThreads")
NOT_READ_AGAIN = replace("if (end > kChunk) load_packs", "if (end < 0) load_packs")
EARLY_READ = replace("__syncthreads();\n    largest = lane", "largest = lane")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(ROUNDED_TWICE, id="values rounded twice"),
        pytest.param(OTHER_FORMAT, id="the other format"),
        pytest.param(OTHER_GROUP, id="a scale of another group"),
        pytest.param(NO_CARRY, id="a scale with which the largest value saturates"),
        pytest.param(SMALLER_SCALES, id="a scale that overflows"),
        pytest.param(NAN_LOST, id="a maximum that loses a NaN"),
        pytest.param(INFINITY_KEPT, id="an infinity that becomes the largest number"),
        pytest.param(SIGN_KEPT, id="magnitudes with a sign"),
        pytest.param(NOT_TRANSPOSED, id="tiles that are not transposed"),
        pytest.param(SCALES_OF_ROWS, id="scales of rows in the transposed copy"),
        pytest.param(WARP_LEFT_OUT, id="rows left out of the magnitudes of columns"),
        pytest.param(PART_LEFT_OUT, id="a part left out of the magnitude of a group"),
        pytest.param(NOT_READ_AGAIN, id="values of the end of a long row at its start"),
        pytest.param(EARLY_READ, id="a missing barrier"),
    ],
)
def test_bugs_in_quantization_are_found(change: Callable[[str], str]) -> None:
    """Catches a test of quantization that accepts wrong values, scales or copies."""
    with pytest.raises((AssertionError, KernelFault)):
        quantization(change)


def test_unchanged_quantization_passes_its_checks() -> None:
    """Catches a check that rejects correct kernels."""
    quantization(None)
