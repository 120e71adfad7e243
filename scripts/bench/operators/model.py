"""Benchmark of a whole model with its loss, forward and backward: the combined effect of the operators."""

from __future__ import annotations

import torch

from megads.batch import BatchInfo
from megads.model.config import ModelConfig
from megads.model.gpt import GPT, use_kernels
from megads.model.model_size import model_flops_per_token
from megads.parallel.loss import loss_in_place, vocab_parallel_token_losses
from scripts.bench.operators.case import OURS, Call, Case, Sizes, Target
from scripts.bench.operators.cross_entropy import AXIS

TORCH = "ours, ops.impl=torch"


def model_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """The same model with ops.impl=fused and torch."""
    layers, vocabulary = sizes.layers, sizes.model_vocabulary
    batch, heads, seq_len, dim = sizes.attention
    hidden = heads * dim
    config = ModelConfig(num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=vocabulary)
    tokens, labels = (torch.randint(0, vocabulary, (batch, seq_len)) for _ in range(2))
    info = BatchInfo(torch.arange(batch))

    def step(fused: bool) -> Call:
        model = GPT(config, seed=0).to(dtype)
        if fused:
            use_kernels(model)

        def call() -> None:
            model.zero_grad(set_to_none=True)
            logits = model(tokens, info)
            if fused:
                loss = loss_in_place(logits, labels, torch.full(labels.shape, 1 / labels.numel()), vocabulary, AXIS)
            else:
                loss = vocab_parallel_token_losses(logits, labels, vocabulary, AXIS).mean()
            loss.backward()

        return call

    flops = float(batch * seq_len * model_flops_per_token(config, seq_len))
    sides = {OURS: step(True), TORCH: step(False)}
    name = f"model f+b {layers}x{hidden} V{vocabulary} B{batch} S{seq_len}"
    return Case(name, sides, flops=flops, targets=(Target(TORCH, 1.0),))
