"""How a trainer executes a step: what overlaps, what is fused, and at which rates."""

from __future__ import annotations

from dataclasses import dataclass

from megads.tools.plan.micro_batch import FP32

LAUNCH_US = 10.0
"""Host time of a kernel launch by PyTorch: an estimate."""


@dataclass(frozen=True)
class Execution:
    """Execution strategy of a trainer. The defaults are megads' on GPUs.

    Attributes:
        scores_in_memory: whether attention materializes its scores; None: only if no flash kernel supports the model.
        fused: whether dropout and residual are one kernel.
        fused_quantization: whether megads' kernels quantize to FP8, in one or two passes over a tensor.
        fused_wgrad_accumulation: whether wgrad GEMMs accumulate into main_grad (gradient accumulation fusion).
        overlap_tp: whether tensor-parallel collectives of the backward pass overlap with GEMMs.
        overlap_grad_reduce: whether gradient reduction overlaps with the last backward pass, bucket by bucket.
        overlap_param_gather: whether the next forward pass hides all of the all-gather of updated weights; for megads
            parallel.overlap_param_gather says whether it hides a part.
        overlap_p2p: whether pipeline p2p communication overlaps with passes.
        overlap_zero: whether ZeRO-2 and ZeRO-3 overlap gradient reduction with the backward pass; megads does not
            (overlap_comm: false).
        scatter_gather_p2p: whether each tensor-parallel rank sends a slice of a pipeline activation, which the
            receivers all-gather (Narayanan et al. 2021, section 4.1).
        gradient_bytes: bytes per element of the gradient reduction.
        whole_recompute: whether full recomputation repeats the block's last GEMM.
        repeatable: whether attention's backward pass is deterministic; the fastest kernels are not.
        cuda_graphs: whether passes are captured in CUDA graphs and replayed, so that the GPU never waits for the host.
        gemm_rate: GEMM rate relative to the device's: older libraries, lower clocks.
        grouped_experts: whether the GEMMs of a rank's experts are one kernel, and its rows are sorted by fused kernels.
        one_row_a_node: whether a token is sent once to every other node with experts of its choice, and copied there
            (DeepEP, HybridEP); else once for every choice.
        overlap_experts: whether all-to-alls overlap with the GEMMs of experts of another micro-batch.
    """

    scores_in_memory: bool | None = None
    fused: bool = True
    fused_quantization: bool = True
    fused_wgrad_accumulation: bool = False
    overlap_tp: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    overlap_p2p: bool = True
    overlap_zero: bool = False
    scatter_gather_p2p: bool = False
    gradient_bytes: int = FP32
    whole_recompute: bool = False
    repeatable: bool = False
    cuda_graphs: bool = False
    gemm_rate: float = 1.0
    grouped_experts: bool = False
    one_row_a_node: bool = False
    overlap_experts: bool = False


MEGADS = Execution()
