"""Mixtures of experts train as transformers' models with torch's AdamW do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from megads.batch import BatchInfo, MicroBatch
from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.engine import build_train_engine
from megads.engine.interface import EngineSpec
from megads.model.config import ModelConfig
from megads.model.moe_config import MoEConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from megads.tools.convert import load
from megads.tools.convert.import_config import ImportConfig
from tests.distributed import run_ranks
from tests.tools.convert.families import CASES, VOCABULARY, their_model, write_folder

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

STEPS, BATCH, SEQ_LEN, LR = 20, 4, 24, 1e-3
TOLERANCE = 1e-5
"""Relative, of losses and gradient norms."""


BALANCED = "qwen3_moe, balanced"
SEEDS = {"mixtral": 11, "olmoe": 8, "qwen2_moe": 14, "qwen3_moe": 6, BALANCED: 6}
"""Models, and seeds of batches in which no token is undecided between two experts."""
MARGIN = 1e-5
"""Least difference of the scores of the last expert that a token chooses and of the next one: rounding errors of fp32
are a tenth of it, so that both programs choose the same experts."""


def batches(seed: int) -> list[torch.Tensor]:
    """Token ids of every step, int64 [BATCH, SEQ_LEN]: few batches, so that the loss falls."""
    generator = torch.Generator().manual_seed(seed)
    few = [torch.randint(0, VOCABULARY, (BATCH, SEQ_LEN), generator=generator) for _ in range(4)]
    return few * (STEPS // 4)


def balance_losses(logits_te: torch.Tensor, load_e: torch.Tensor, moe: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Balance losses of a layer as documented in MoEConfig, from the logits of transformers' router; and the number of
    tokens of every expert, divided by the mean."""
    scores_te = logits_te.softmax(-1)
    chosen_te = torch.zeros_like(scores_te).scatter(1, scores_te.topk(moe.top_k, -1).indices, 1.0)
    share_be = chosen_te.unflatten(0, (BATCH, -1)).mean(1) / moe.top_k
    mean_be = scores_te.unflatten(0, (BATCH, -1)).mean(1)
    of_batch = moe.global_loss * (load_e * scores_te.mean(0)).sum()
    of_samples = moe.sequence_loss * moe.num_experts * (share_be * mean_be).sum(-1).mean()
    z_loss = moe.z_loss * logits_te.logsumexp(-1).square().mean()
    return of_batch + of_samples + z_loss, chosen_te.mean(0) / moe.top_k * moe.num_experts


def losses_of_transformers(model: Any, seed: int, moe: MoEConfig) -> tuple[list[tuple[float, float]], float]:
    """Loss and gradient norm of every step, with decay of matrices only and gradients clipped to a norm of 1; and the
    least margin of any choice of experts."""
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    found, margin, top_k = [], 1.0, model.config.num_experts_per_tok
    loads = [torch.ones(moe.num_experts)] * model.config.num_hidden_layers
    for tokens_bs in batches(seed):
        out = model(tokens_bs, labels=tokens_bs, output_router_logits=True)
        for logits_te in out.router_logits:
            scores_te = logits_te.softmax(-1).sort(-1, descending=True).values
            margin = min(margin, (scores_te[:, top_k - 1] - scores_te[:, top_k]).min().item())
        balance = [balance_losses(logits, load, moe) for logits, load in zip(out.router_logits, loads, strict=True)]
        loads = [load.detach() for _, load in balance]
        (out.loss + sum(loss for loss, _ in balance)).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((out.loss.item(), norm.item()))
    return found, margin


def losses_of_megads(config: ModelConfig, file: str, seed: int, layout: ParallelConfig) -> list[tuple[float, float]]:
    """The same of a rank of megads' engine, with the weights of a file; it computes one sample at a time."""
    weights = torch.load(file)
    grid = build_grid(layout, dist.get_rank(), dist.get_world_size())
    spec = EngineSpec(
        config, layout, OptimConfig(lr=LR, clip_grad=1.0), grid, precision=torch.float32, micro_batch_size=1,
        seed=1, device=torch.device("cpu"), value=lambda name, _shape: weights[name],
    )  # fmt: skip
    engine = build_train_engine(spec)
    found = []
    for tokens_bs in batches(seed):
        own = range(dist.get_rank(), BATCH, layout.dp)
        result = engine.step([micro_batch(tokens_bs, sample) for sample in own], LR)
        found.append((result.loss, result.grad_norm))
    return found


def micro_batch(tokens_bs: torch.Tensor, sample: int) -> MicroBatch:
    """One sample, without the loss of its last token, whose next one is unknown."""
    own_bs = tokens_bs[sample : sample + 1]
    mask_bs = torch.ones(own_bs.shape)
    mask_bs[:, -1] = 0.0
    return MicroBatch(BatchInfo(torch.tensor([sample]), seq_len=SEQ_LEN), own_bs, own_bs.roll(-1, 1), mask_bs)


@pytest.mark.parametrize("layout", [ParallelConfig(), ParallelConfig(dp=2, ep=2)], ids=["single", "ep2"])
@pytest.mark.parametrize("case", SEEDS)
def test_twenty_steps_of_adamw_are_those_of_transformers(case: str, layout: ParallelConfig, tmp_path: Path) -> None:
    """Catches the same mistake in the reference and in every layout: a gradient of the router, of the chosen experts'
    weights or of a shared expert's gate that differs from that of another program."""
    name, balanced = case.partition(",")[0], case == BALANCED
    theirs = their_model(name, CASES[name][0] | {"router_aux_loss_coef": 0.5 if balanced else 0.0}).train()
    run = load.import_folder(ImportConfig(str(write_folder(theirs, tmp_path / "theirs")), str(tmp_path / "in"))).folder
    ours = load_unsharded(open_checkpoint(run), torch.device("cpu"), torch.float32)
    torch.save(ours.parameters_by_name(), tmp_path / "weights.pt")
    config = ours.config
    if balanced:
        config = replace(config, moe=replace(config.moe, sequence_loss=0.3, z_loss=0.01))
    # transformers' own balance loss is another one: over all layers, without the counts of the step before.
    theirs.router_aux_loss_coef = 0.0
    wanted, margin = losses_of_transformers(theirs, SEEDS[case], config.moe)
    assert margin > MARGIN
    found, *others = run_ranks(losses_of_megads, layout.dp, config, str(tmp_path / "weights.pt"), SEEDS[case], layout)
    assert all(other == found for other in others)
    assert wanted[-1][0] < wanted[0][0] - 0.5 and max(norm for _, norm in wanted) > 1.0
    for step, (of_megads, of_theirs) in enumerate(zip(found, wanted, strict=True)):
        assert of_megads == pytest.approx(of_theirs, rel=TOLERANCE), step
