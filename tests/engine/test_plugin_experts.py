"""A plugin's block with experts of its own, of plain PyTorch modules, trains in every layout as on one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import megads
from megads.model.config import BlockConfig
from megads.parallel.config import ParallelConfig, Recompute, ScheduleName
from megads.runtime.registry import BLOCKS
from tests import parity
from tests.parity import MODEL, Run, Scenario, scenario_with, train_layout, train_reference

pytestmark = pytest.mark.distributed

DENSE, ROWS = "test_experts_of_all_tokens", "test_experts_of_their_rows"


@dataclass
class ExpertOptions:
    experts: int = 5
    top_k: int = 2
    width: int = 24


class Expert(nn.Module):
    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x_nh: Tensor) -> Tensor:
        out_nh: Tensor = self.down(self.up(x_nh).relu())
        return out_nh


ATTENTION = {"attention.qkv": megads.ParallelStyle.column, "attention.dense": megads.ParallelStyle.row}


class ExpertBlock(nn.Module):
    """A router chooses experts, which compute all tokens, with a weight of 0 for those of other experts."""

    sharding = megads.ShardingTable(
        parameters={
            **ATTENTION,
            "experts.*.up": megads.ParallelStyle.column,
            "experts.*.down": megads.ParallelStyle.row,
        },
        attention_cores=("attention.core",),
    )

    def __init__(self, options: ExpertOptions, model: megads.ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.top_k = options.top_k
        self.attention_norm, self.mlp_norm = megads.Norm(model), megads.Norm(model)
        self.attention = megads.Attention(model, seed, f"{site}.attention")
        self.router = nn.Linear(model.hidden_size, options.experts, bias=False)
        self.experts = nn.ModuleList(Expert(model.hidden_size, options.width) for _ in range(options.experts))

    def forward(self, hidden_bsh: Tensor, info: megads.BatchInfo) -> Tensor:
        hidden_bsh = hidden_bsh + self.attention(self.attention_norm(hidden_bsh), info)
        normed_bsh = self.mlp_norm(hidden_bsh)
        weights_bsk, chosen_bsk = self.router(normed_bsh).softmax(-1).topk(self.top_k, -1)
        return hidden_bsh + self.mix(normed_bsh, weights_bsk, chosen_bsk)

    def mix(self, normed_bsh: Tensor, weights_bsk: Tensor, chosen_bsk: Tensor) -> Tensor:
        out_bsh = torch.zeros_like(normed_bsh)
        for number, expert in enumerate(self.experts):
            weight_bs = (weights_bsk * (chosen_bsk == number)).sum(-1)
            out_bsh = out_bsh + weight_bs[..., None] * expert(normed_bsh)
        return out_bsh


class RowsBlock(ExpertBlock):
    """Experts compute the rows of the tokens that chose them; whole experts, on every tensor-parallel rank."""

    sharding = megads.ShardingTable(parameters=ATTENTION, attention_cores=("attention.core",))

    def mix(self, normed_bsh: Tensor, weights_bsk: Tensor, chosen_bsk: Tensor) -> Tensor:
        normed_th, weights_tk, chosen_tk = (x.flatten(0, 1) for x in (normed_bsh, weights_bsk, chosen_bsk))
        out_th = torch.zeros_like(normed_th)
        for number, expert in enumerate(self.experts):
            token, choice = (chosen_tk == number).nonzero(as_tuple=True)
            out_th = out_th.index_add(0, token, weights_tk[token, choice, None] * expert(normed_th[token]))
        return out_th.view(normed_bsh.shape)


def register() -> None:
    """Registers the blocks, as `plugins` does on every rank."""
    for name, block in ((DENSE, ExpertBlock), (ROWS, RowsBlock)):
        if name not in BLOCKS._parts:
            megads.register_model(name, ExpertOptions)(block)


register()
OPTIONS = {"experts": 5, "top_k": 2, "width": 24}
LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "tp2dp2sp": ParallelConfig(tp=2, dp=2, sequence_parallel=True),
    "cp2": ParallelConfig(cp=2),
    "pp2 zb_v": ParallelConfig(pp=2, schedule=ScheduleName.zb_v),
    "dp2 recompute": ParallelConfig(dp=2, recompute=Recompute.full),
    "zero3dp2": ParallelConfig(dp=2, zero_stage=3),
}
CHECKS = (parity.check_initial_weights, parity.check_first_step, parity.check_curve, parity.check_replicas)


def scenario(block: str) -> Scenario:
    return scenario_with(masked=True, steps=5, model=replace(MODEL, block=BlockConfig(block, OPTIONS)))


@functools.cache
def reference(block: str) -> Run:
    return train_reference(scenario(block))


@pytest.mark.quick(f"tp2dp2sp-{DENSE}", f"tp2dp2sp-{ROWS}")
@pytest.mark.parametrize("block", [DENSE, ROWS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_a_plugin_train_in_every_layout(block: str, layout: str) -> None:
    """Catches a plugin's router whose gradient covers a part of the sequence or of the features, experts that are
    sharded over tensor-parallel ranks in another way than its table says, and a rank that waits for the gradient of an
    expert that none of its tokens chose."""
    run = train_layout(scenario(block), LAYOUTS[layout], register)
    assert [fault for check in CHECKS for fault in check(run, reference(block))] == []
