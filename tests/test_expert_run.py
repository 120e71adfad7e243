"""A mixture of experts through the commands: trained with expert parallelism, generated from, explained, exported,
imported and fine-tuned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megads import load_model
from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.model.moe import Router
from tests.command import StartCommand
from tests.config.test_identity import QUICK, WORDS, write_text

pytestmark = pytest.mark.distributed

EXPERTS = (
    "model=tiny_llama", "model.qk_norm=true", "model.vocab_size=null", "model.moe.num_experts=4",
    "model.moe.expert_ffn_size=24", "model.moe.global_loss=0.1", "parallel.dp=2", "parallel.ep=2",
    "train.micro_batch_size=1",
)  # fmt: skip


def losses_in(found: Any) -> list[float]:
    """Every loss of a token in the JSON of `megads why`."""
    if isinstance(found, list):
        return [loss for one in found for loss in losses_in(one)]
    if not isinstance(found, dict):
        return []
    own = [loss for loss in found.get("losses") or [] if loss is not None]
    return own + [loss for one in found.values() for loss in losses_in(one)]


@pytest.mark.slow
def test_experts_through_every_command(megads: StartCommand) -> None:
    """Catches a command that builds the model of a checkpoint without its router's state or its experts, and losses
    that include the balance loss in one place only."""
    write_text(megads.folder / "notes", WORDS["notes"])

    def run(*arguments: str) -> str:
        ended = megads(*arguments).end()
        assert ended.code == 0, ended.err
        return ended.out

    shape = ("train.precision=fp32", "checkpoint.every_steps=2", "run.id=experts")
    run("train", "data.raw=notes", "train.steps=4", *QUICK, *EXPERTS, *shape)
    why = json.loads(run("why", "run=runs/experts", "step=3", "json=true"))
    losses = losses_in(why["shown"])
    assert sum(losses) / len(losses) == pytest.approx(why["metrics_loss"], rel=1e-5)

    model = load_model(megads.folder / "runs/experts", dtype=torch.bfloat16)
    text = model.generate("alpha beta", max_new_tokens=6, temperature=0.0)
    asked = ("generate", "prompt=alpha beta", "max_new_tokens=6", "temperature=0", "precision=bf16")
    assert text.strip() in run(*asked, "run=runs/experts")
    run("export", "run=runs/experts", "output=exported", "precision=fp32")
    assert json.loads((megads.folder / "exported/config.json").read_text())["router_aux_loss_coef"] == 0.1
    run("import", "input=exported", "output=runs/imported")
    assert text.strip() in run(*asked, "run=runs/imported")

    talk = [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta gamma"}]
    (megads.folder / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 40)
    tuned = ("experiment=sft", "--config-dir=runs/imported", "model=imported", "checkpoint.init_from=runs/imported")
    settings = ("train.epochs=null", "train.steps=2", "train.micro_batch_size=1", "parallel.dp=2", "parallel.ep=2")
    run("train", *tuned, *settings, *QUICK[:4], "data.raw=talks.jsonl", "run.id=chat")
    assert run("generate", "run=runs/chat", "chat=true", "prompt=alpha", "max_new_tokens=4", "temperature=0")
    assert routers_of(megads.folder / "runs/chat") != routers_of(megads.folder / "runs/imported")


def routers_of(run: Path) -> list[list[float]]:
    """Counts of the previous step of every router; an imported model starts with even ones."""
    model = load_unsharded(open_checkpoint(run), torch.device("cpu"), torch.float32)
    return [router.expert_load.tolist() for router in model.modules() if isinstance(router, Router)]
