"""Creates in milliseconds what a training leaves: a dataset with its tokenizer, and a run with a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.store import save_checkpoint
from megads.engine.interface import Shard
from megads.model.config import ModelConfig, Position
from megads.model.gpt import GPT
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import train_tokenizer
from tests.model.test_gpt import hot_value

TOKENS = 300
TEXTS = [f"def attention_{i}(query, key): return softmax(query @ key)  # naïve 漢字 🚀\n" for i in range(40)]


def write_dataset(folder: Path, vocab_size: int = TOKENS) -> Path:
    """Returns the prefix of a dataset made from TEXTS by the real tokenizer and preprocessing."""
    folder.mkdir(parents=True, exist_ok=True)
    text, tokenizer = folder / "text.jsonl", folder / "any.json"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    train_tokenizer(TokenizerConfig(input=[str(text)], output=str(tokenizer), vocab_size=vocab_size))
    preprocess(PreprocessConfig(input=[str(text)], tokenizer=str(tokenizer), output=str(folder / "corpus")))
    tokenizer.unlink()
    return folder / "corpus"


def model_config(position: Position = Position.alibi, **changes: Any) -> ModelConfig:
    """Returns a config with two more rows than the tokenizer has tokens, like a rounded-up vocabulary."""
    return ModelConfig(
        num_layers=2, hidden_size=48, num_heads=6, vocab_size=TOKENS + 2, max_seq_len=32, position=position,
        **changes,
    )  # fmt: skip


def hot_model(config: ModelConfig) -> GPT:
    """Returns a model in which every part affects the output."""
    return GPT(config, 0, hot_value).eval()


def write_run(run_dir: Path, prefix: Path, model: GPT, step: int = 3) -> Path:
    """Returns the folder of a run with one checkpoint of a model."""
    shards = [
        Shard(f"weight/{name}", tuple(weight.shape), (0,) * weight.dim(), weight.detach().float().contiguous())
        for name, weight in model.parameters_by_name().items()
    ]
    shards.append(Shard("exp_avg/x", (4,), (0,), torch.zeros(4)))
    state = {"step": step, "samples": 8 * step, "tokens": 100 * step}
    record = RunRecord(state, step, "digest", json.loads(json.dumps(asdict(model.config))), {"tp": 1, "pp": 1, "dp": 1})
    save_checkpoint(run_dir, shards, record)
    (run_dir / "config.yaml").write_text(f"data:\n  train:\n  - path: {prefix}\n")
    return run_dir
