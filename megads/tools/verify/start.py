"""Runs a layout on ranks of its own and the reference in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megads.errors import ConfigError
from megads.launch.launcher import LaunchSpec, launch
from megads.model.gpt import GPT, TIED_PARAMETER, token_losses
from megads.monitor.console import Console
from megads.optim.groups import parameter_groups
from megads.runtime.machine_memory import PROCESS_BYTES, available_memory
from megads.tools.verify.run import Run, join, read_runs
from megads.tools.verify.scenario import (
    VALIDATION_SAMPLES,
    Job,
    Scenario,
    initial_weights,
    micro_batch,
    result_path,
    step_batches,
)
from megads.tools.verify.stream import read_stream


def train_reference(scenario: Scenario) -> Run:
    """Autograd, fp32 gradient sums over micro-batches, clip, AdamW on fp32 masters."""
    model = GPT(scenario.model, scenario.seed, initial_weights(scenario)).to(scenario.dtype)
    working = model.parameters_by_name()
    masters = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in working.items()}
    tied = TIED_PARAMETER if scenario.model.tie_embeddings else None
    groups = parameter_groups(masters.items(), tied_name=tied, weight_decay=scenario.optim.weight_decay)
    beta1, beta2 = scenario.optim.betas
    adamw = torch.optim.AdamW(groups, lr=scenario.lr, betas=(beta1, beta2), eps=scenario.optim.eps)
    run = Run(validation=_validate(model, scenario), model=scenario.model)
    run.initial = {name: m.detach().numpy().copy() for name, m in masters.items()}
    for step in range(scenario.steps):
        loss, tokens, gradients = _gradients(model, scenario, step)
        for name, master in masters.items():
            master.grad = gradients[name]
        if step == 0:
            run.gradients = {name: g.numpy().copy() for name, g in gradients.items()}
        limit = scenario.clip_grad or float("inf")
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit, foreach=False)))
        run.losses.append(loss)
        run.tokens.append(tokens)
        adamw.step()
        with torch.no_grad():
            for name, p in working.items():
                p.copy_(masters[name])
    run.weights = {name: m.detach().numpy() for name, m in masters.items()}
    return run


def _gradients(model: GPT, scenario: Scenario, step: int) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, unmasked tokens and fp32 gradients of one step: the mean over all the tokens of its global batch."""
    batches = step_batches(scenario, step)
    working = model.parameters_by_name()
    gradients = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in working.items()}
    total = sum(float(b.loss_mask_bs.sum()) for b in batches if b.loss_mask_bs is not None)
    loss_sum = 0.0
    for batch in batches:
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        logits = model(batch.tokens_bs, batch.info)
        loss = (token_losses(logits, batch.labels_bs) * batch.loss_mask_bs).sum() / total
        model.zero_grad(set_to_none=True)
        loss.backward()
        loss_sum += loss.item()
        for name, p in working.items():
            assert p.grad is not None
            gradients[name] += p.grad.float()
    return loss_sum, int(total), gradients


@torch.no_grad()
def _validate(model: GPT, scenario: Scenario) -> tuple[float, int]:
    loss_sum, tokens = 0.0, 0
    model.eval()
    for sample_id in range(VALIDATION_SAMPLES):
        batch = micro_batch(scenario, [sample_id])
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        losses = token_losses(model(batch.tokens_bs, batch.info), batch.labels_bs)
        loss_sum += float((losses * batch.loss_mask_bs).sum())
        tokens += int(batch.loss_mask_bs.sum())
    model.train()
    return loss_sum, tokens


def run_reference(scenario: Scenario, corpus: Path) -> Run:
    """One process of plain torch, on one thread, as every rank has."""
    with _one_thread():
        run = train_reference(scenario)
        run.stream = read_stream(corpus, scenario)
    return run


def run_layout(folder: Path, job: Job, console: Console) -> tuple[int, list[Run]]:
    """Starts the ranks and waits for them.

    Args:
        folder: of the job, the ranks' logs and their results; the caller holds it (lease.claimed).
        job: what they do.
        console: says what the launcher has to say.

    Returns:
        The launcher's exit code, and where it is 0 one run a scenario.

    Raises:
        ConfigError: this machine has no memory for that many processes.
    """
    ranks = job.parallel.world_size
    needed, available = ranks * PROCESS_BYTES, available_memory()
    if needed > available:
        raise ConfigError(
            f"{ranks} processes need {needed / 2**30:.1f} GiB, this machine has {available / 2**30:.1f} GiB available: "
            "lower verify.max_ranks, or verify the layout in parts"
        )
    for old in folder.glob("rank_*.pt"):
        old.unlink()
    job.write(folder)
    command = ("-m", "megads.tools.verify.rank", str(folder))
    code = launch(LaunchSpec(folder, ranks, command, threads_per_rank=1, cpu=True, saves=False), console).exit_code
    if code:
        return code, []
    by_rank = [read_runs(result_path(folder, rank)) for rank in range(ranks)]
    of_scenarios = zip(job.scenarios, zip(*by_rank, strict=True), strict=True)
    return code, [join(runs, scenario.model) for scenario, runs in of_scenarios]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
