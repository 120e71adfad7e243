"""DeepSpeed's engine with transformers' models on one rank, for tests of universal checkpoints. Run by `run_ranks`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megads.ops.compiler import quote_library_path

STATES = {"weight": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def build(config_folder: Path, universal: bool) -> Any:
    """Returns an engine with BF16_Optimizer over AdamW with two parameter groups."""
    import deepspeed
    import transformers

    # On a CPU DeepSpeed compiles its own collective.
    quote_library_path()
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(config_folder)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True, "checkpoint": {"load_universal": universal},
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=settings)[0]


def train(engine: Any, steps: int) -> None:
    """Trains on random tokens."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        ids = torch.randint(0, engine.module.config.vocab_size, (2, 16), generator=generator)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def states(engine: Any) -> dict[str, np.ndarray]:
    """Returns weights (fp32, working) and moments by `<kind>/<name>`, numbers of steps, and weight decays."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, np.ndarray] = {}
    for name, parameter in engine.module.named_parameters():
        found[f"weight/{name}"] = safe_get_full_fp32_param(parameter).numpy().copy()
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind}/{name}"] = safe_get_full_optimizer_state(parameter, kind).numpy().copy()
        found[f"working/{name}"] = parameter.detach().float().numpy().copy()
    taken = {float(state["step"]) for state in engine.optimizer.state.values()}
    found["steps"], found["global_steps"] = np.array(sorted(taken)), np.array(engine.global_steps)
    found["decays"] = np.array([group["weight_decay"] for group in engine.optimizer.param_groups])
    return found


def load_universal(folder: str, config_folder: str) -> dict[str, np.ndarray]:
    """Loads a universal checkpoint into DeepSpeed and returns its states; DeepSpeed must then be able to train."""
    engine = build(Path(config_folder), universal=True)
    engine.load_checkpoint(folder)
    found = states(engine)
    train(engine, 1)
    return found


def save(folder: str, config_folder: str) -> dict[str, np.ndarray]:
    """Trains, saves, and converts with DeepSpeed's own ds_to_universal; returns the states."""
    from deepspeed.checkpoint import ds_to_universal

    engine = build(Path(config_folder), universal=False)
    train(engine, 3)
    engine.save_checkpoint(folder, client_state={"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}})
    convert(Path(folder) / "global_step3", ds_to_universal)
    return states(engine)


def convert(step_folder: Path, ds_to_universal: Any) -> None:
    """Creates `<step folder>_universal` with DeepSpeed's own code."""
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(step_folder), output_folder=f"{step_folder}_universal", num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip
