"""The CUDA kernels on a GPU, called through PyTorch on its streams."""

from __future__ import annotations

import pytest
import torch

from megads.ops.activation import gelu
from megads.ops.config import FUSED, TORCH, Implementation, OpsConfig
from megads.ops.resolve import load
from scripts.bench.operators import SMALL, Sizes, errors, operators, quantizations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: lane by lane the kernels run in this folder"),
]


@pytest.fixture(scope="module", autouse=True)
def kernels_for_gpus() -> None:
    """Builds and loads the CUDA kernels."""
    load(OpsConfig(Implementation.fused), print, cuda=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [SMALL, Sizes(rows=300, width=4096, tokens=100, scores=(2, 4, 1025), heads=(2, 65, 3, 64))]
)
def test_every_kernel_on_a_gpu_is_within_twice_torchs_error(sizes: Sizes, dtype: torch.dtype) -> None:
    """Catches differences between the device and the shim: launches, exponentials, autograd."""
    ratios = {operator.name: errors(operator)[1] for operator in operators(sizes, dtype, "cuda")}
    assert {name: ratio for name, ratio in ratios.items() if not ratio <= 2} == {}
    assert [found.name for found in quantizations(sizes, dtype, "cuda") if not found.is_exact()] == []


def test_kernels_run_on_the_current_stream() -> None:
    """Catches a kernel on the default stream, which does not wait for the kernel that computes its input."""
    stream = torch.cuda.Stream()
    x = torch.randn(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        found = gelu(x.mul_(2.0), FUSED)
    stream.synchronize()
    torch.testing.assert_close(found, gelu(x, TORCH))
