"""The CUDA kernels of GELU, SwiGLU, dropout and rotary embedding, lane by lane, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.model.rotary import rotary_tables
from megads.ops.config import TORCH
from megads.ops.dropout import DropoutMask, dropout, site_key, threshold_of
from megads.ops.rotary import rotate
from tests.ops.accuracy import check_error
from tests.ops.cuda.lanes import Lanes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def gelu(x: Tensor, bias: Tensor | None, grad: Tensor, **how: int) -> list[Tensor]:
    """Output, gradient of x, and gradient of the bias if there is one."""
    with Lanes("gelu", **how) as lanes:
        out, grad_x = (lanes.empty(x.shape, x.dtype) for _ in range(2))
        shape = (x.dtype, *x.shape)
        lanes.call("gelu_forward", *shape, x, bias, out)
        if bias is None:
            lanes.call("gelu_backward", *shape, grad, x, None, grad_x, None, None)
            return [out.clone(), grad_x.clone()]
        partial = lanes.empty((lanes.count("gelu_partials", *x.shape), x.shape[1]), torch.float32)
        grad_bias = lanes.empty(bias.shape, x.dtype)
        lanes.call("gelu_backward", *shape, grad, x, bias, grad_x, partial, grad_bias)
        return [out.clone(), grad_x.clone(), grad_bias.clone()]


def gelu_reference(x: Tensor, bias: Tensor | None, grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    leaves = [y.detach().to(dtype, copy=True).requires_grad_() for y in (x, bias) if y is not None]
    out = F.gelu(sum(leaves[1:], leaves[0]), approximate="tanh")
    out.backward(grad.to(dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.always("False-3-337-dtype0")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 337), (70, 64), (301, 9), (4, 1031)])
@pytest.mark.parametrize("biased", [False, True])
def test_gelu_matches_the_reference(rows: int, width: int, biased: bool, dtype: torch.dtype) -> None:
    """Catches wrong tail elements or constants, another column's bias, and rows missing from the bias gradient."""
    x, grad = draw(rows, width, dtype=dtype), draw(width, rows, dtype=dtype).T.contiguous()
    bias = draw(width, dtype=dtype) if biased else None
    found = gelu(x, bias, grad, order=width, residue=rows, at_end=rows % 2)
    references = (gelu_reference(x, bias, grad, of) for of in (dtype, torch.float64))
    for mine, eager, exact in zip(found, *references, strict=True):
        check_error(mine, eager, exact)


def test_gelu_is_right_for_large_values_and_nan() -> None:
    """Catches an exp that overflows to NaN: for large |x| GELU is 0 or x, its derivative 0 or 1; NaN stays NaN."""
    x = torch.tensor([[-1e38, -1e4, -50.0, -0.0, 50.0, 1e4, 1e30, float("inf"), float("nan")]])
    out, slope = gelu(x, None, torch.ones_like(x))
    torch.testing.assert_close(out[0, :8], torch.tensor([0.0, 0.0, 0.0, 0.0, 50.0, 1e4, 1e30, float("inf")]))
    torch.testing.assert_close(slope[0, :8], torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0]))
    assert out[0, 8].isnan() and slope[0, 8].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "residue"), [(61, 5), (333, 5), (4099, 3), (4096, 0), (4096, 3)])
def test_swiglu_matches_the_reference(count: int, residue: int, dtype: torch.dtype) -> None:
    """Catches swapped gate and up, wrong tails, vectors across boundaries, and cancellation in the derivative."""
    gate_up, grad = draw(2 * count, dtype=dtype), draw(count, dtype=dtype)
    with Lanes("swiglu", order=count, residue=residue, at_end=count % 2) as lanes:
        found = [lanes.empty((count,), dtype), lanes.empty((2 * count,), dtype)]
        lanes.call("swiglu_forward", dtype, count, gate_up, found[0])
        lanes.call("swiglu_backward", dtype, count, grad, gate_up, found[1])
        references = []
        for of in (dtype, torch.float64):
            leaf = gate_up.detach().to(of, copy=True).requires_grad_()
            out = F.silu(leaf[::2]) * leaf[1::2]
            out.backward(grad.to(of))
            assert leaf.grad is not None
            references.append([out.detach(), leaf.grad])
        for mine, eager, exact in zip(found, *references, strict=True):
            check_error(mine, eager, exact)


def dropped(x: Tensor, mask: DropoutMask, places: Tensor | None, residual: Tensor | None, **how: int) -> Tensor:
    """The kernel's output for x [batch, tokens, width]."""
    samples, key, threshold, _ = mask.arguments
    with Lanes("dropout", **how) as lanes:
        out = lanes.empty(x.shape, x.dtype)
        lanes.call("dropout", x.dtype, *x.shape, x, residual, places, samples, key, threshold, out)
        return out.clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 1), (3, 2, 61), (2, 3, 8), (3, 1, 2736)])
@pytest.mark.parametrize("added", [False, True])
def test_dropout_matches_plain_torchs_mask(added: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Catches wrong tails, a mask other than plain torch's, vectors across row ends, a scale rounded to the dtype."""
    count = torch.Size(shape).numel()
    x, residual = draw(*shape, dtype=dtype), draw(count, 1, dtype=dtype).view(shape) if added else None
    mask = DropoutMask(site_key(3, "site"), threshold_of(0.3), torch.tensor([5, 2**40 + 1, 2**32 - 1])[: shape[0]])
    places = torch.tensor([9, 2**31, 70_000])[: shape[1]] if added else None
    out = dropped(x, mask, places, residual, order=count, residue=count % 8, at_end=count % 2)
    exact = dropout(x.double(), mask, places, None if residual is None else residual.double())
    check_error(out, dropout(x, mask, places, residual), exact)
    assert torch.equal(out, dropped(x, mask, places, residual, residue=3))
    assert torch.equal(dropped(torch.ones_like(x), mask, places, None) != 0, dropout(x * 0 + 1, mask, places) != 0)


def test_dropout_keeps_nan_visible() -> None:
    """Catches a mask that hides a NaN, so that the culprit of the step is not found."""
    x = torch.tensor([float("nan"), float("inf")]).repeat(1, 1, 50)
    out = dropped(x, DropoutMask(7, threshold_of(0.5), torch.tensor([0])), None, None)[0, 0]
    assert out[::2].isnan().all() and (out[1::2].isnan() | out[1::2].isinf()).all() and out[1::2].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (5, 6), (70, 16)])
def test_rotary_matches_the_reference_on_strided_views(heads: int, dim: int, dtype: torch.dtype) -> None:
    """Catches swapped halves, another token's angle, and a strided slice of the fused projection read as contiguous."""
    batch, seq_len = 2, 5
    qkv = draw(batch, seq_len, heads, 3, dim, dtype=dtype)
    query = qkv[:, :, :, 1]
    tables = rotary_tables(torch.arange(seq_len) + 1000, dim, 1e4, torch.float32)
    exact_tables = tuple(table.double() for table in tables)
    with Lanes("rotary", order=heads, residue=dim % 4, at_end=dim % 8 == 0) as lanes:
        placed = lanes.place(qkv)[:, :, :, 1]
        turned, back = (lanes.empty(query.shape, dtype) for _ in range(2))
        shape = (dtype, batch, seq_len, heads, dim)
        flat = [table.reshape(seq_len, -1).contiguous() for table in tables]
        base = placed.data_ptr()
        lanes.call("rotary", *shape, *query.stride()[:3], seq_len, 0, base, *flat, turned)
        lanes.call("rotary", *shape, *turned.stride()[:3], seq_len, 1, turned, *flat, back)
        check_error(turned, rotate(query, *tables, TORCH), rotate(query.double(), *exact_tables, TORCH))
        eager = rotate(turned.clone(), tables[0], -tables[1], TORCH)
        check_error(back, eager, rotate(turned.double(), exact_tables[0], -exact_tables[1], TORCH))


def test_empty_inputs_launch_no_kernel() -> None:
    """Catches a kernel launch with zero blocks, and a bias gradient of zero rows that is not set to zero."""
    empty = torch.empty(0, 7)
    assert not gelu(empty, torch.ones(7), empty)[2].any()
    with Lanes("swiglu") as lanes:
        lanes.call("swiglu_forward", torch.float32, 0, torch.empty(0), lanes.empty((0,), torch.float32))
    assert dropped(torch.empty(0, 2, 3), DropoutMask(1, 1, torch.empty(0, dtype=torch.int64)), None, None).numel() == 0
    with Lanes("rotary") as lanes:
        row = torch.ones(1, 4)
        lanes.call("rotary", torch.float32, 0, 5, 3, 8, 120, 24, 8, 1, 0, empty, row, row, empty)
