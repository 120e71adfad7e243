"""The CUDA kernels on more than 2^31 elements, in sparse memory, which is allocated where it is touched.

Only the last blocks run, lane by lane, since a 32-bit index is wrong there. Sizes in bytes are those on a GPU, so that
the shim's trap for overflows finds the others.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.model.rotary import rotary_tables
from megads.ops.config import TORCH
from megads.ops.dropout import DropoutMask, threshold_of
from megads.ops.float8 import E4M3, inverse_scale, magnitude_bits, quantize
from megads.ops.rotary import rotate
from tests.ops.cuda.lanes import KernelFault, Lanes

BF16, FP32 = torch.bfloat16, torch.float32
TAIL = 1000
COUNT = 2**31 + 5000
WIDTH = 2**16
ROWS = 820 * 40  # GELU with a bias: the last block computes the last 8 of every 40
TOO_LARGE = "error -1"


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def filled(lanes: Lanes, tail: Tensor, count: int = COUNT) -> Tensor:
    """Returns zeros that end with the given tail, [count, *(shape of tail but its first)]."""
    x = lanes.sparse((count, *tail.shape[1:]), tail.dtype)
    x[-len(tail) :] = tail
    return x


def close(found: Tensor, exact: Tensor) -> None:
    """Requires equality within rounding error, so that elements left at zero are detected."""
    torch.testing.assert_close(found.double(), exact.double(), rtol=1e-2, atol=1e-2)


def test_flat_kernels_index_beyond_32_bits() -> None:
    """Catches a launcher that refuses a size its kernel supports, and a 32-bit index of a block's start."""
    x, grad = draw(TAIL), draw(TAIL)
    leaf = x.double().requires_grad_()
    (grad_x,) = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, grad.double())
    with Lanes("gelu", last_blocks=3) as lanes:
        large, out = filled(lanes, x), lanes.sparse((COUNT,), BF16)
        lanes.call("gelu_forward", BF16, 1, COUNT, large, None, out)
        close(out[-TAIL:], F.gelu(x.double(), approximate="tanh"))
        lanes.call("gelu_backward", BF16, 1, COUNT, filled(lanes, grad), large, None, out, None, None)
        close(out[-TAIL:], grad_x)
    with Lanes("swiglu", last_blocks=3) as lanes:
        gate_up, out = filled(lanes, draw(2 * TAIL), 2 * COUNT), lanes.sparse((COUNT,), BF16)
        leaf = gate_up[-2 * TAIL :].double().requires_grad_()
        right = F.silu(leaf[::2]) * leaf[1::2]
        lanes.call("swiglu_forward", BF16, COUNT, gate_up, out)
        close(out[-TAIL:], right.detach())
        grad_gate_up = lanes.sparse((2 * COUNT,), BF16)
        lanes.call("swiglu_backward", BF16, COUNT, filled(lanes, grad), gate_up, grad_gate_up)
        close(grad_gate_up[-2 * TAIL :], torch.autograd.grad(right, leaf, grad.double())[0])
    with Lanes("dropout", last_blocks=3) as lanes:
        mask, tokens = DropoutMask(7, threshold_of(0.5), torch.tensor([3])), COUNT // 8
        out = lanes.sparse((COUNT,), BF16)
        drawn = (mask.samples_b, mask.key, mask.threshold)
        lanes.call("dropout", BF16, 1, tokens, 8, filled(lanes, x), None, None, *drawn, out)
        keep = mask.keep(1, torch.arange(tokens - TAIL // 8, tokens), 8).flatten()
        close(out[-TAIL // 8 * 8 :], 2 * x.double()[-TAIL // 8 * 8 :] * keep)


def test_the_optimizer_indexes_beyond_32_bits() -> None:
    """Catches 32-bit indices of elements or of the bounds of a piece, and more pieces than a grid has rows."""
    with Lanes("optimizer", last_blocks=3) as lanes:
        grad, state = filled(lanes, draw(TAIL, dtype=FP32)), [lanes.sparse((COUNT,), FP32) for _ in range(3)]
        weights = lanes.sparse((COUNT,), BF16)
        lanes.call("adamw", BF16, COUNT, grad, *state, weights, torch.ones(1), 0.1, 0.0, 0.9, 0.95, 1e-8, 1)
        close(weights[-TAIL:], -0.1 * grad[-TAIL:].sign())
    with Lanes("optimizer") as lanes:
        flat = filled(lanes, draw(TAIL, dtype=FP32))
        partial, sums = lanes.empty((1, 64), torch.float64), lanes.empty((1,), torch.float64)
        lanes.call("square_sums", 1, flat, torch.tensor([[COUNT - TAIL, COUNT]]), partial, sums)
        torch.testing.assert_close(sums[0], flat[-TAIL:].double().square().sum(), rtol=1e-12, atol=0.0)
    with Lanes("optimizer", last_blocks=1) as lanes:
        pieces = 70_000
        partial, sums = lanes.sparse((pieces, 64), torch.float64), lanes.sparse((pieces,), torch.float64)
        partial[-1] = 1.0
        bounds = lanes.sparse((pieces, 2), torch.int64)
        bounds[-1] = torch.tensor([3, 3])
        lanes.call("square_sums", pieces, torch.ones(8), bounds, partial, sums)
        assert sums[-1] == 63.0


def test_norms_index_beyond_32_bits() -> None:
    """Catches a 32-bit index of the start of a row."""
    rows, width = 16 * 132, 2**20
    x, grad, weight, bias = draw(1, width), draw(1, width), draw(width), draw(width)
    leaf = x.double().requires_grad_()
    right = F.layer_norm(leaf, (width,), weight.double(), bias.double(), 1e-5)
    with Lanes("norm", last_blocks=1) as lanes:
        large, out, statistics = (
            filled(lanes, x, rows),
            lanes.sparse((rows, width), BF16),
            lanes.sparse((rows, 2), FP32),
        )
        shape = (BF16, rows, width)
        lanes.call("norm_forward", *shape, 1e-5, 1, large, None, None, 1.0, weight, bias, None, out, statistics)
        close(out[-1], right[0].detach())
        partial = lanes.sparse((lanes.count("norm_partials", rows, width), 2, width), FP32)
        assert rows % len(partial) == 0, "the last block does not compute the last row"
        sums = [lanes.empty((width,), BF16) for _ in range(2)]
        gradients = (None, 1.0, out, None, partial, *sums)
        lanes.call("norm_backward", *shape, 1, filled(lanes, grad, rows), None, large, weight, statistics, *gradients)
        close(out[-1], torch.autograd.grad(right, leaf, grad.double())[0][0])


def test_row_kernels_index_beyond_32_bits() -> None:
    """Catches a 32-bit index of the start of a row."""
    x, bias = draw(1, WIDTH), draw(WIDTH)
    with Lanes("softmax", last_blocks=1) as lanes:
        large, out = filled(lanes, x, ROWS), lanes.sparse((ROWS, WIDTH), BF16)
        places = torch.full((ROWS,), WIDTH - 1)
        lanes.call("softmax_forward", BF16, 1, 1, ROWS, WIDTH, 1.0, None, places, None, None, large, out, *[None] * 5)
        close(WIDTH * out[-1].double(), WIDTH * x[0].double().softmax(-1))
    with Lanes("gelu", last_blocks=1) as lanes:
        large, out = filled(lanes, x, ROWS), lanes.sparse((ROWS, WIDTH), BF16)
        lanes.call("gelu_forward", BF16, ROWS, WIDTH, large, bias, out)
        strip = slice(WIDTH - 256, WIDTH)
        close(out[-1, strip], F.gelu((x[0] + bias).double(), approximate="tanh")[strip])


def test_quantization_indexes_beyond_32_bits() -> None:
    """Catches a 32-bit index of a group, a chunk, a row of a matrix or of its transpose."""
    x = draw(1, WIDTH)
    bits = magnitude_bits(x, (1,)).flatten()
    expected = quantize(x, bits.view(1, 1), E4M3).values[0].view(torch.uint8)
    with Lanes("float8", last_blocks=1) as lanes:
        large, values = filled(lanes, x, ROWS), lanes.sparse((ROWS, WIDTH), torch.uint8)
        found, inverse = lanes.sparse((ROWS,), torch.int32), lanes.sparse((ROWS,), FP32)
        lanes.call("float8_magnitudes", BF16, ROWS, WIDTH, large, None, found)
        assert found[-1] == bits[0]
        lanes.call("float8_quantize", BF16, 0, ROWS, WIDTH, large, filled(lanes, bits, ROWS), values, inverse)
        assert torch.equal(values[-1, -4096:], expected[-4096:])
        values[-1] = 0
        lanes.call("float8_quantize_rows", BF16, 0, ROWS, WIDTH, large, values, inverse)
        assert torch.equal(values[-1], expected) and inverse[-1] == inverse_scale(bits, E4M3)
        values[-1] = 0
        transposed = lanes.sparse((WIDTH, ROWS), torch.uint8)
        inverses = [lanes.empty((1,), FP32) for _ in range(2)]
        lanes.call("float8_quantize_both", BF16, ROWS, WIDTH, 1, 1, large, bits, bits, values, transposed, *inverses)
        assert torch.equal(values[-1, -64:], expected[-64:]) and torch.equal(transposed[-64:, -1], expected[-64:])
    with Lanes("float8", last_blocks=1) as lanes:
        group = filled(lanes, x[0])
        values, inverse = lanes.sparse((COUNT,), torch.uint8), lanes.empty((1,), FP32)
        lanes.call("float8_quantize", BF16, 0, 1, COUNT, group, bits, values, inverse)
        left = COUNT % 4096
        assert torch.equal(values[-left:], expected[-left:])
        found, rows = lanes.sparse((WIDTH,), torch.int32), 65 * 512  # the last block reads the last 8 of every 512
        partial = lanes.sparse((lanes.count("float8_column_parts", rows), WIDTH), torch.int32)
        lanes.call("float8_column_magnitudes", BF16, rows, WIDTH, filled(lanes, x, rows), partial, found)
        assert torch.equal(partial[-1, -256:], magnitude_bits(x[:, -256:], (0,))[0])


def test_logits_and_positions_index_beyond_32_bits() -> None:
    """Catches a 32-bit index of a row of logits, or of a token of a head."""
    width = WIDTH + 2 * TAIL  # so that the last blocks have work
    x, labels = draw(1, width), torch.full((ROWS,), 17)
    with Lanes("cross_entropy", last_blocks=1) as lanes:
        large, statistics = filled(lanes, x, ROWS), lanes.sparse((ROWS, 3), FP32)
        lanes.call("cross_entropy_forward", BF16, ROWS, width, width, 0, large, labels, statistics)
        close(statistics[-1, 0] + statistics[-1, 1].log(), x[0].double().logsumexp(0))
        assert statistics[-1, 2] == x[0, 17]
        largest, total = (filled(lanes, statistics[-1:, i].contiguous(), ROWS) for i in range(2))
        ones = filled(lanes, torch.ones(1), ROWS)
        lanes.call("cross_entropy_backward", BF16, ROWS, width, width, 0, large, labels, largest, total, ones, large)
        close(width * large[-1, -TAIL:].double(), width * x[0].double().softmax(0)[-TAIL:])
    heads, dim = 8, 64
    tokens = COUNT // (heads * dim) + 1
    query = draw(1, heads, dim)
    tables = rotary_tables(torch.arange(1, 2), dim, 1e4, FP32)
    with Lanes("rotary", last_blocks=1) as lanes:
        large, out = filled(lanes, query, tokens), lanes.sparse((tokens, heads, dim), BF16)
        flat = [table.reshape(1, -1).contiguous() for table in tables]
        lanes.call("rotary", BF16, 1, tokens, heads, dim, 0, heads * dim, dim, 1, 0, large, *flat, out)
        close(out[-1], rotate(query[None], *tables, TORCH)[0, 0])


@pytest.mark.parametrize(
    ("kernel", "launcher", "shape", "pointers"),
    [
        pytest.param("softmax", "softmax_forward", (2**10, 2**10, 2**11, 8, 1.0), 11, id="rows of scores"),
        pytest.param("softmax", "softmax_backward", (1, 1, 1, 2**31, 1.0), 10, id="keys"),
        pytest.param("norm", "norm_forward", (2**31 - 1, 8, 1e-5, 1, None, None, None, 1.0), 5, id="rows to norm"),
        pytest.param("norm", "norm_backward", (8, 2**31, 1, *[None] * 6, 1.0), 5, id="columns to norm"),
        pytest.param("cross_entropy", "cross_entropy_forward", (2**31, 8, 8, 0), 3, id="rows of logits"),
        pytest.param("cross_entropy", "cross_entropy_backward", (8, 2**27, 8, 0), 6, id="vocabulary"),
        pytest.param("rotary", "rotary", (2**20, 2**11, 8, 64, 1, 1, 1, 1, 0), 4, id="tokens"),
        pytest.param("rotary", "rotary", (1, 1, 2**20, 64, 1, 1, 1, 1, 0), 4, id="features of all heads"),
        pytest.param("float8", "float8_magnitudes", (2**31, 8), 3, id="groups"),
        pytest.param("float8", "float8_column_magnitudes", (8, 2**31), 3, id="columns"),
        pytest.param("float8", "float8_quantize", (0, 2**20, 2**24), 4, id="chunks"),
        pytest.param("float8", "float8_quantize_rows", (0, 8, 2**31), 3, id="values of a row"),
        pytest.param("float8", "float8_quantize_both", (2**23, 8, 1, 1), 7, id="rows of a matrix"),
        pytest.param("optimizer", "square_sums", (2**31,), 4, id="pieces"),
    ],
)
def test_sizes_beyond_the_limit_are_refused(
    kernel: str, launcher: str, shape: tuple[object, ...], pointers: int
) -> None:
    """Catches a limit that is not checked: the index would overflow to a negative number."""
    dtype = () if launcher == "square_sums" else (BF16,)
    with Lanes(kernel, last_blocks=1) as lanes, pytest.raises(KernelFault, match=TOO_LARGE):
        lanes.call(launcher, *dtype, *shape, *[None] * pointers)


def test_a_bias_limits_rows_and_columns() -> None:
    """Catches a launch with a bias that checks the limit of the kernel without one."""
    with Lanes("gelu", last_blocks=1) as lanes:
        for shape in ((2**30 + 1, 8), (8, 2**30 + 1)):
            with pytest.raises(KernelFault, match=TOO_LARGE):
                lanes.call("gelu_forward", BF16, *shape, None, torch.ones(8), None)
