"""Every attention kernel on a GPU against fp64, forward and backward; skipped without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.errors import ConfigError
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig, Position
from megads.ops.attention_kinds import AttentionKind, unsupported_reason
from megads.ops.config import FUSED, Implementation, OpsConfig
from megads.ops.resolve import load
from megads.tools.autotune.attention_trials import plain_attention
from tests.ops.accuracy import check_error
from tests.ops.test_attention import both

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")]

KINDS = [kind for kind in AttentionKind if kind not in (AttentionKind.auto, AttentionKind.fused)]
MODEL = ModelConfig(hidden_size=512, num_heads=8)
STARTS = torch.stack([torch.arange(600) // 170 * 170, torch.arange(600) // 256 * 256])
CASES: dict[str, tuple[ModelConfig, Tensor | None]] = {
    "alibi": (MODEL, None),
    "shared keys and a window": (replace(MODEL, num_kv_heads=2, window=100), None),
    "documents": (MODEL, STARTS),
    "documents and a window": (replace(MODEL, window=100), STARTS),
    "rotary": (replace(MODEL, position=Position.rope, num_heads=4, num_kv_heads=2), None),
}
# torch's memory-efficient attention in fp32 with a mask, which sdpa takes in every case but rotary, has 2.7 times the
# error of torch's plain operators on a CPU: 6.18e-07 against 2.28e-07 (NVIDIA H200, torch 2.11.0+cu130). A product
# in TF32 has 3e-04 (tests/ops/test_accuracy.py).
MASKED_FP32 = 4.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_error_is_that_of_the_dtype(kind: AttentionKind, case: str, dtype: torch.dtype) -> None:
    """Catches a kernel that interprets bias, window, documents or shared keys differently from the model, or a core
    that silently uses another kernel."""
    config, starts = CASES[case]
    work = replace(
        config.attention_work(), bf16=dtype is torch.bfloat16, cuda=True, impl=Implementation.fused, seq_len=600,
        documents=starts is not None,
    )  # fmt: skip
    reason = unsupported_reason(kind, work)
    if reason:
        pytest.skip(f"model.attention = {kind} {reason}")
    generator = torch.Generator().manual_seed(4)
    shapes = (config.num_heads, config.kv_heads, config.kv_heads, config.num_heads)
    tensors = [torch.randn(2, 600, n, config.head_dim, generator=generator).transpose(1, 2).to(dtype) for n in shapes]
    core = AttentionCore(replace(config, attention=kind), 0, "core")
    if kind is AttentionKind.fused_softmax:
        try:
            load(OpsConfig(Implementation.fused), print, cuda=True)
        except ConfigError as error:
            pytest.skip(f"no kernels for this GPU: {error}")
        core.kernels = FUSED
    assert core.backend(tensors[0].cuda()) is kind
    window_starts = core.visible_from(BatchInfo(torch.arange(2), document_starts=starts), 600, torch.device("cpu"))
    rest = (core.slopes(torch.device("cpu")), None, window_starts)
    exact = both(plain_attention, [x.double() for x in tensors], *rest)
    theirs = both(plain_attention, tensors, *rest)
    masked_fp32 = kind is AttentionKind.sdpa and dtype is torch.float32 and case != "rotary"
    for ours, their, right in zip(attended(core, tensors, starts), theirs, exact, strict=True):
        check_error(ours, their, right, MASKED_FP32 if masked_fp32 else 2.0)


def attended(core: AttentionCore, tensors: list[Tensor], starts: Tensor | None) -> list[Tensor]:
    """Output and gradients of queries, keys and values, computed on the GPU and copied to the CPU."""
    info = BatchInfo(torch.arange(2), document_starts=None if starts is None else starts.cuda())
    return [x.cpu() for x in both(lambda *inputs: core(*inputs, info), [x.cuda() for x in tensors])]
