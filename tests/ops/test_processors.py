"""Which implementation multiplies matrices on which CPU, and that no bf16 product reaches PyTorch's plain loops."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megads.errors import ConfigError
from megads.model.config import MLPKind, NormKind, Position
from megads.model.gpt import GPT
from megads.model.kv_cache import with_cache
from megads.ops import processor
from megads.ops.attention_kinds import AttentionKind
from megads.ops.build import build
from megads.ops.config import Implementation, OpsConfig
from megads.ops.processor import GemmBackend
from megads.ops.resolve import load_library
from megads.optim.config import OptimConfig, OptimizerName
from megads.parallel.config import ParallelConfig
from megads.runtime.environment import cpu_isa_limit
from tests import parity
from tests.distributed import run_ranks
from tests.parity import MODEL, Scenario, scenario_with

_AVX2 = "fma avx2 bmi2 f16c"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512dq avx512cd avx512vl"
FAMILIES = {
    "Zen 2 and 3": ("x86_64", f"AuthenticAMD {_AVX2}"),
    "Zen 4": ("x86_64", f"AuthenticAMD {_AVX512} avx512_vnni avx512_bf16"),
    "Zen 5": ("x86_64", f"AuthenticAMD {_AVX512} avx512_vnni avx512_bf16 avx_vnni"),
    "Haswell": ("x86_64", f"GenuineIntel {_AVX2}"),
    "Skylake-X": ("x86_64", f"GenuineIntel {_AVX512}"),
    "Ice Lake": ("x86_64", f"GenuineIntel {_AVX512} avx512_vnni"),
    "Sapphire Rapids": ("x86_64", f"GenuineIntel {_AVX512} avx512_vnni avx512_bf16 amx_tile amx_bf16"),
    "Alder Lake": ("x86_64", f"GenuineIntel {_AVX2} avx_vnni"),
    "Graviton 2, Neoverse N1": ("aarch64", "fp asimd fphp asimdhp asimddp"),
    "Graviton 3, Neoverse V1": ("aarch64", "fp asimd fphp asimdhp asimddp sve svebf16 i8mm bf16"),
    "Grace, Neoverse V2": ("aarch64", "fp asimd fphp asimdhp asimddp sve sve2 svebf16 i8mm bf16"),
    "POWER9": ("ppc64le", ""),
}
"""Machine and words of /proc/cpuinfo of families of CPUs."""
CHOSEN = {
    "Zen 2 and 3": (GemmBackend.torch, GemmBackend.megads, GemmBackend.widened),
    "Zen 4": (GemmBackend.megads, GemmBackend.megads, GemmBackend.torch),
    "Zen 5": (GemmBackend.megads, GemmBackend.megads, GemmBackend.torch),
    "Haswell": (GemmBackend.torch, GemmBackend.megads, GemmBackend.widened),
    "Skylake-X": (GemmBackend.torch, GemmBackend.torch, GemmBackend.torch),
    "Ice Lake": (GemmBackend.torch, GemmBackend.torch, GemmBackend.torch),
    "Sapphire Rapids": (GemmBackend.torch, GemmBackend.torch, GemmBackend.torch),
    "Alder Lake": (GemmBackend.torch, GemmBackend.megads, GemmBackend.widened),
    "Graviton 2, Neoverse N1": (GemmBackend.torch, GemmBackend.megads, GemmBackend.widened),
    "Graviton 3, Neoverse V1": (GemmBackend.torch, GemmBackend.torch, GemmBackend.torch),
    "Grace, Neoverse V2": (GemmBackend.torch, GemmBackend.torch, GemmBackend.torch),
    "POWER9": (GemmBackend.torch, GemmBackend.megads, GemmBackend.widened),
}
"""The choice in fp32, in bf16, and in bf16 without megads' kernels."""


def on(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Makes decisions those of a family of CPUs."""
    machine, words = FAMILIES[family]
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    monkeypatch.setattr(processor, "_words", lambda: frozenset(words.split()))
    monkeypatch.setattr(processor, "onednn_below_avx512", lambda: False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gemm_of_each_processor_is_chosen_by_comparison(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Catches a megads kernel on a CPU on which it was never compared, PyTorch's fp32 GEMM where it is slow, and bf16
    left to PyTorch's plain loops where oneDNN has no GEMM for it."""
    on(monkeypatch, family)
    found = (
        processor.gemm(bf16=False, kernels=True),
        processor.gemm(bf16=True, kernels=True),
        processor.gemm(bf16=True, kernels=False),
    )
    assert found == CHOSEN[family]
    assert processor.gemm(bf16=False, kernels=False) is GemmBackend.torch
    assert processor.torch_loops_over_bf16() is (GemmBackend.torch not in found[1:])


def test_torch_sees_the_same_instructions() -> None:
    """Catches instruction sets that PyTorch also needs, or no longer: bf16 left to it would run in plain loops."""
    assert processor.torch_loops_over_bf16() is not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_kernels_obey_a_limited_instruction_set() -> None:
    """Catches an emulated AVX2 machine whose kernels use AVX-512, or which leaves bf16 to PyTorch's plain loops."""
    code = (
        "from megads.ops import build, processor; import torch; print(build.target(), processor.has_avx512(), "
        "processor.torch_loops_over_bf16(), torch.ops.mkldnn._is_mkldnn_bf16_supported(), sep=';')"
    )
    limits = {"MEGADS_CPU_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env=os.environ | limits, capture_output=True, text=True, check=True).stdout
    target = "-mcpu=native" if processor.platform.machine() == "aarch64" else "-march=x86-64-v3"
    assert out.strip() == f"{target};False;True;False"


def test_an_unknown_instruction_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a misspelt limit that is ignored."""
    monkeypatch.setenv("MEGADS_CPU_ISA", "sse2")
    with pytest.raises(ConfigError, match="MEGADS_CPU_ISA = sse2: use avx2"):
        cpu_isa_limit()


GEMMS = {
    *("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "dot", "linear", "_linear_pointwise"),
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
"""PyTorch's operators that multiply matrices on a CPU. Attention's forward pass alone is as fast in bf16 as in fp32."""


class Bf16Gemms(TorchDispatchMode):
    """Records PyTorch's GEMMs of bf16 operands, with their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        operands = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        low = [x for x in operands if x.dtype is torch.bfloat16]
        if namespace in ("aten", "mkldnn") and name in GEMMS and low:
            self.found.append(f"{name} {[list(x.shape) for x in low]}")
        return func(*args, **(kwargs or {}))


def loop_over_bf16() -> None:
    """Makes this rank's decisions those of a CPU on which PyTorch has no bf16 GEMM."""
    processor.has_avx512 = lambda: False
    processor.torch_loops_over_bf16 = lambda: True
    if (load := build(print)).exists():
        load_library(load)


def gemms_of_a_step(scenario: Scenario, parallel: ParallelConfig) -> list[str]:
    """Returns PyTorch's bf16 GEMMs of a training step and of validation."""
    loop_over_bf16()
    engine = parity.build_engine(scenario, parallel)
    dp = engine.grid.dp
    with Bf16Gemms() as seen:
        engine.step(parity.step_batches(scenario, 0, dp.rank, dp.size), scenario.lr)
        engine.evaluate(parity.step_batches(scenario, 1, dp.rank, dp.size))
    return seen.found


FUSED, TORCH = OpsConfig(Implementation.fused), OpsConfig(Implementation.torch)
MUON = OptimConfig(name=OptimizerName.muon)
LLAMA = replace(MODEL, position=Position.rope, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, num_kv_heads=2, bias=False)
DROPOUT = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)
CASES = {
    "kernels, Muon": (ParallelConfig(), {"ops": FUSED, "optimizer": MUON}),
    "torch, Muon": (ParallelConfig(), {"ops": TORCH, "optimizer": MUON}),
    "torch, Llama, LAMB": (
        ParallelConfig(), {"ops": TORCH, "model": LLAMA, "optimizer": OptimConfig(name=OptimizerName.lamb)}
    ),
    "kernels, Llama, dropout": (
        ParallelConfig(), {"ops": FUSED, "model": replace(LLAMA, attention_dropout=0.1), "documents": True}
    ),
    "torch, dropout": (ParallelConfig(), {"ops": TORCH, "model": DROPOUT}),
    "explicit scores": (
        ParallelConfig(), {"ops": FUSED, "model": replace(DROPOUT, attention=AttentionKind.fused_softmax)}
    ),
    "loss in chunks": (ParallelConfig(), {"ops": replace(TORCH, loss_chunk=9)}),
    "tp2 in chunks": (ParallelConfig(tp=2, tp_chunks=2), {"ops": TORCH}),
    "tp2 in chunks, kernels": (ParallelConfig(tp=2, tp_chunks=2), {"ops": FUSED}),
    "pp2 zb_v": (ParallelConfig(pp=2, schedule=parity.LAYOUTS["pp2 zb_v"].schedule), {"ops": FUSED}),
    "cp2": (ParallelConfig(cp=2), {"ops": TORCH}),
    "zero3dp2": (ParallelConfig(dp=2, zero_stage=3), {"ops": TORCH}),
}  # fmt: skip


@pytest.mark.quick("kernels, Muon", "torch, Muon", "explicit scores", "tp2 in chunks")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES)
def test_no_bf16_gemm_of_a_step_reaches_torch(case: str) -> None:
    """Catches bf16 left to PyTorch's plain loops by any caller: layers, attention, the loss, Muon, validation."""
    parallel, changes = CASES[case]
    scenario = scenario_with(precision="bfloat16", **changes)
    for found in run_ranks(gemms_of_a_step, parallel.world_size, parity.fitted(scenario, parallel), parallel):
        assert found == []


def gemms_of_generation() -> list[str]:
    """Returns PyTorch's bf16 GEMMs while the unsharded model reads three prompts and three tokens of each."""
    loop_over_bf16()
    model = with_cache(GPT(MODEL, seed=1).to(torch.bfloat16))
    model.start(4)
    with Bf16Gemms() as seen:
        model.append([[1, 2, 3, 4]] * 4)
        model.append([[5]] * 4)
    return seen.found


def test_no_bf16_gemm_of_generation_reaches_torch() -> None:
    """Catches generation and evaluation, which run the unsharded model, in plain loops."""
    assert run_ranks(gemms_of_generation, 1) == [[]]
