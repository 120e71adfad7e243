"""The CUDA norm kernels, run lane by lane on the CPU, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.accuracy import check_error
from tests.ops.cuda.lanes import Lanes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS, P = 1e-5, 0.25
SCALE = 1 / (1 - P)


def ours(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grad: Tensor,
    residual: Tensor | None = None,
    kept: Tensor | None = None,
    grad_added: Tensor | None = None,
    centred: bool = True,
    **how: int,
) -> dict[str, Tensor]:
    """Returns all results of a forward and a backward pass."""
    with Lanes("norm", **how) as lanes:
        rows, width = x.shape
        enters = residual is not None or kept is not None
        shape = (x.dtype, rows, width)
        found = {name: lanes.empty(x.shape, x.dtype) for name in ("out", "residual")}
        found |= {"weight": lanes.empty((width,), x.dtype)}
        found |= {"bias": lanes.empty((width,), x.dtype)} if bias is not None else {}
        found |= {"added": lanes.empty(x.shape, x.dtype)} if enters else {}
        found |= {"x": lanes.empty(x.shape, x.dtype)} if kept is not None else {}
        statistics = lanes.empty((rows, 2), torch.float32)
        lanes.call(
            "norm_forward", *shape, EPS, int(centred), x, residual, kept, SCALE, weight, bias, found.get("added"),
            found["out"], statistics,
        )  # fmt: skip
        partial = lanes.empty((lanes.count("norm_partials", rows, width), 2, width), torch.float32)
        lanes.call(
            "norm_backward", *shape, int(centred), grad, grad_added, found.get("added", x), weight, statistics, kept,
            SCALE, found["residual"], found.get("x"), partial, found["weight"], found.get("bias"),
        )  # fmt: skip
        return {name: value.clone() for name, value in found.items()}


def reference(dtype: torch.dtype, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the same results of torch's operators and autograd in `dtype`."""
    given = {
        name: value.detach().to(dtype, copy=True).requires_grad_()
        for name, value in arguments.items()
        if isinstance(value, Tensor) and name in ("x", "weight", "bias", "residual")
    }
    x, weight = given["x"], given["weight"]
    if arguments.get("kept") is not None:
        x = x * arguments["kept"] * SCALE
    added = x + given["residual"] if "residual" in given else x
    added.retain_grad()
    if arguments.get("centred", True):
        out = F.layer_norm(added, added.shape[-1:], weight, given.get("bias"), EPS)
    else:
        out = F.rms_norm(added, added.shape[-1:], weight, EPS)
    loss = (out * arguments["grad"].to(dtype)).sum()
    if arguments.get("grad_added") is not None:
        loss = loss + (added * arguments["grad_added"].to(dtype)).sum()
    loss.backward()
    assert added.grad is not None
    found = {"out": out.detach(), "added": added.detach(), "residual": added.grad, "x": given["x"].grad}
    return found | {name: given[name].grad for name in ("weight", "bias") if name in given}


def check(arguments: dict[str, Any], **how: int) -> None:
    """Checks the errors of all results against those of torch's operators in the same dtype."""
    eager, exact = (reference(dtype, arguments) for dtype in (arguments["x"].dtype, torch.float64))
    for name, mine in ours(**arguments, **how).items():
        check_error(mine, eager[name], exact[name])


def inputs(rows: int, width: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows + width)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    given = {"x": draw(rows, width) * 2 + 1, "weight": draw(width), "bias": draw(width), "grad": draw(rows, width)}
    for name in ("residual", "grad_added"):
        if more.pop(name, False):
            given[name] = draw(rows, width)
    if more.pop("kept", False):
        given["kept"] = (torch.rand(rows, width, generator=generator) > P).to(torch.uint8)
    return given | more


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(5, 8), (3, 33), (9, 520), (2, 1024), (3, 2049)])
def test_error_is_within_twice_torchs(rows: int, width: int, dtype: torch.dtype) -> None:
    """Catches wrong tails, statistics of another row, sums in bf16, a mean that is not subtracted."""
    check(inputs(rows, width, dtype), order=2, residue=width, at_end=0)
    check(inputs(rows, width, dtype, centred=False, bias=None), order=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", [False, True])
def test_residual_and_dropout_match_the_reference(kept: bool, dtype: torch.dtype) -> None:
    """Catches a mask that is not scaled or is read at another element, and a gradient without the residual path."""
    check(inputs(5, 130, dtype, kept=kept, residual=True, grad_added=True), order=3, residue=1)
    check(inputs(4, 48, dtype, kept=kept, residual=not kept, centred=False, bias=None))
    check(inputs(4, 48, dtype, kept=kept, residual=True, grad_added=True), order=1, residue=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_read_in_chunks_match_the_reference(dtype: torch.dtype) -> None:
    """Catches chunks that are skipped, and weight gradients that omit earlier rows."""
    check(inputs(3, 16400, dtype, residual=True), order=5)


@pytest.mark.slow
def test_more_rows_than_blocks_match_the_reference() -> None:
    """Catches skipped rows beyond the grid of the backward pass, a row that is read before it is loaded or while
    another one overwrites it, and sums whose bits depend on the order of blocks."""
    arguments = inputs(2120, 8, torch.float32)
    found = [ours(**arguments, order=order) for order in (0, 9)]
    eager, exact = (reference(dtype, arguments) for dtype in (torch.float32, torch.float64))
    for name in ("residual", "weight"):
        check_error(found[0][name], eager[name], exact[name])
        assert torch.equal(found[0][name], found[1][name])


def test_large_means_are_exact_and_nan_propagates() -> None:
    """Catches a variance computed as the difference of two large numbers, and NaN that does not propagate."""
    arguments = inputs(2, 64, torch.float32)
    arguments["x"] = arguments["x"] + 1000.0
    check(arguments)
    arguments["x"][1, 5] = float("nan")
    found = ours(**arguments)
    assert found["out"][1].isnan().all() and not found["out"][0].isnan().any()


def test_empty_inputs_zero_the_weight_gradients() -> None:
    """Catches a launch of zero blocks, and weight gradients that are not set to zero."""
    found = ours(**inputs(0, 9, torch.float32))
    assert found["out"].shape == (0, 9) and not found["weight"].any() and not found["bias"].any()
