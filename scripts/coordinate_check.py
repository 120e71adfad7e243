#!/usr/bin/env python3
"""Coordinate check of model.mup: how much activations change over a few steps, at several widths.

After Yang and Hu et al. 2022 (Tensor Programs V, arXiv 2203.03466, appendix D.1): under maximal update parametrization
the change of every activation since the first step is about the same at all widths; without it some grow with the
width. The real engine trains each model in one process, fp32, on random tokens. The printed exponent is that of the
width in a power law fitted to the change.

Run from the repository: python -m scripts.coordinate_check [--optimizer muon]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np
import torch

from megads.batch import BatchInfo
from megads.model.config import ModelConfig
from megads.model.gpt import GPT
from megads.model.mup import MupConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.tools.verify.layout import build_engine, rank_batches
from megads.tools.verify.run import assemble, pieces
from megads.tools.verify.scenario import Scenario, step_batches
from tests.distributed import run_ranks

LAYERS, HEAD_DIM, BASE_WIDTH, VOCABULARY = 2, 16, 64, 256
WIDTHS = (64, 128, 256, 512)
RATES = {"adamw": 1e-2, "lion": 3e-3, "muon": 1e-2}
WATCHED = ("embedding", "blocks.0", f"blocks.{LAYERS - 1}", "head")

Change = dict[str, float]
"""RMS of the change of a layer's activations, by layer name; those of `head` are the logits."""


def model_of(width: int, *, mup: bool, wider_heads: bool = False) -> ModelConfig:
    """Returns a model of this width.

    Args:
        width: hidden size; a multiple of BASE_WIDTH.
        mup: use muP's parametrization.
        wider_heads: wider heads with the width, instead of more heads.
    """
    of_base = MupConfig(BASE_WIDTH, base_head_size=HEAD_DIM if wider_heads else None)
    return ModelConfig(
        num_layers=LAYERS,
        hidden_size=width,
        num_heads=BASE_WIDTH // HEAD_DIM if wider_heads else width // HEAD_DIM,
        vocab_size=VOCABULARY,
        max_seq_len=32,
        init_std=None if mup else math.sqrt(1 / (3 * width)),
        mup=of_base if mup else MupConfig(),
    )


def change_of_activations(model: ModelConfig, optimizer: str, steps: int) -> Change:
    """Trains in a separate process; returns the change of activations.

    Args:
        model: model to train.
        optimizer: optim.name.
        steps: training steps.
    """
    (change,) = run_ranks(_train, 1, model, optimizer, steps)
    return change


def _train(model: ModelConfig, optimizer: str, steps: int) -> Change:
    scenario = Scenario(
        model=model, steps=steps, hot=False, lr=RATES[optimizer], clip_grad=0.0, seq_len=32, micro_batch_size=4,
        global_batch_size=4, optimizer=OptimConfig(name=optimizer),
    )  # fmt: skip
    engine = build_engine(scenario, ParallelConfig())
    states = [assemble(pieces(engine.named_shards()), "weight")]
    for step in range(steps):
        engine.step(rank_batches(scenario, step, engine.grid), scenario.lr)
    states.append(assemble(pieces(engine.named_shards()), "weight"))
    (batch,) = step_batches(scenario, 0)
    assert batch.tokens_bs is not None
    before, after = (_activations(model, weights, batch.tokens_bs, batch.info) for weights in states)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in WATCHED}


@torch.no_grad()
def _activations(
    model: ModelConfig, weights: dict[str, np.ndarray], tokens_bs: torch.Tensor, info: BatchInfo
) -> dict[str, torch.Tensor]:
    gpt = GPT(model, 0, lambda name, _shape: torch.from_numpy(weights[name]))
    hidden, found = tokens_bs, {}
    for name, layer in zip(gpt.layer_names, gpt.layers, strict=True):
        hidden = found[name] = layer(hidden, info)
    return found


def exponents(changes: dict[int, Change]) -> dict[str, float]:
    """Exponent of the change as a power of the width, by layer name.

    Args:
        changes: changes by width; at least two widths.
    """
    widths = np.log(list(changes))
    return {name: float(np.polyfit(widths, [math.log(c[name]) for c in changes.values()], 1)[0]) for name in WATCHED}


def check(optimizer: str, widths: Sequence[int], steps: int, *, mup: bool, wider_heads: bool) -> dict[int, Change]:
    """Returns the change at every width."""
    return {
        width: change_of_activations(model_of(width, mup=mup, wider_heads=wider_heads), optimizer, steps)
        for width in widths
    }


def main() -> None:
    """Prints a table for each parametrization."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=tuple(RATES), default="adamw")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help=f"multiples of {BASE_WIDTH}")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--wider-heads", action="store_true", help="heads get wider, not more; attention by 1/d")
    asked = parser.parse_args()
    for title, mup in (("with model.mup", True), ("without", False)):
        found = check(asked.optimizer, asked.widths, asked.steps, mup=mup, wider_heads=asked.wider_heads)
        slopes = exponents(found)
        print(f"{asked.optimizer} {title}: RMS of the change of activations after {asked.steps} steps")
        print(f"{'':<12}" + "".join(f"{width:>10}" for width in found) + f"{'exponent':>10}")
        for name in WATCHED:
            cells = "".join(f"{change[name]:>10.4f}" for change in found.values())
            print(f"{name:<12}{cells}{slopes[name]:>+10.2f}", flush=True)


if __name__ == "__main__":
    main()
