"""The bound on a kernel's error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.test_attention_gpu import MASKED_FP32
from tests.ops.accuracy import check_error


def in_tf32(x: Tensor) -> Tensor:
    """Rounds to the 10 bits of mantissa with which tensor cores multiply in TF32."""
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


def test_the_wider_bound_of_attention_in_fp32_excludes_tf32() -> None:
    """Catches a bound for torch's attention in fp32 that also admits matrix products in TF32."""
    a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))
    exact, eager = a.double() @ b.double(), a @ b
    check_error(eager, eager, exact, MASKED_FP32)
    with pytest.raises(AssertionError, match="torch's operators"):
        check_error(in_tf32(a) @ in_tf32(b), eager, exact, MASKED_FP32)
