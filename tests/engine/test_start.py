"""Modules that a rank loads before its first step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

STEP = """
import json, sys
import torch
from megads.batch import BatchInfo, MicroBatch
from megads.engine import build_train_engine
from megads.engine.interface import EngineSpec
from megads.model.config import ModelConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from megads.runtime.distributed import world

model = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, max_seq_len=8)
cpu = torch.device("cpu")
with world(cpu, 60):
    spec = EngineSpec(
        model, ParallelConfig(), OptimConfig(), build_grid(ParallelConfig(), 0, 1),
        precision=torch.float32, micro_batch_size=1, seed=0, device=cpu,
    )
    engine = build_train_engine(spec)
    tokens_bs = torch.arange(8)[None]
    batch = MicroBatch(BatchInfo(torch.tensor([0])), tokens_bs, tokens_bs, torch.ones(1, 8))
    result = engine.step([batch], 1e-3)
    heavy = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
    print(json.dumps([result.loss, heavy]))
"""


def test_a_start_does_not_load_torchs_compiler() -> None:
    """Catches a call that loads torch.compile's modules and sympy: 800 modules and 0.8 s of every rank's start."""
    port = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", STEP],
        env=os.environ | port | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    loss, heavy = json.loads(ended.stdout.splitlines()[-1])
    assert 0 < loss < 10 and heavy == []
