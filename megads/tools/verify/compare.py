"""Runs a verification: the reference in this process, the layout on its own ranks, and a table of the comparison."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from megads.api import (
    AXES,
    EXIT_OK,
    GPT,
    PROCESS_BYTES,
    TIED_PARAMETER,
    ConfigError,
    Console,
    EngineKind,
    Implementation,
    LaunchSpec,
    MoEConfig,
    OptimizerName,
    ParallelConfig,
    Precision,
    RootConfig,
    VisibleConsole,
    available_memory,
    claimed,
    launch,
    phase_config,
    resolve_engine,
    run_planner,
    token_losses,
)
from megads.engine.deepspeed_options import build_adam, uses_deepspeed
from megads.model.moe import EXPERT_BIAS, EXPERT_LOAD, SUMMARY, Router
from megads.optim.groups import parameter_groups
from megads.tools.verify.checks import BF16, FP32, Row, legend, likely_cause, rows
from megads.tools.verify.reference_float8 import use_reference_float8
from megads.tools.verify.reference_optimizers import ReferenceOptimizer, reference_optimizer
from megads.tools.verify.run import Run, join, read_runs, read_stream, write_corpus
from megads.tools.verify.scenario import (
    VALIDATION_SAMPLES,
    Job,
    RequestedSettings,
    Scaled,
    Scenario,
    initial_weights,
    micro_batch,
    result_path,
    scale,
    step_batches,
)

if TYPE_CHECKING:
    from megads.tools.verify.config import VerifyLayoutConfig


_SIGN_BOUND = 1e-3
"""Bound for Lion's weights: if a direction is zero up to rounding, its sign is arbitrary and weights differ by 2 lr."""


class _Masters:
    """Master weights of the reference run and their optimizer: PyTorch's AdamW, or `reference_optimizers` in fp64."""

    def __init__(self, working: Mapping[str, Tensor], scenario: Scenario) -> None:
        trained = {name: p for name, p in working.items() if p.requires_grad}
        self.of = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in trained.items()}
        self._ema_decay = scenario.optim.ema_decay
        self.averages = {} if self._ema_decay is None else {name: m.detach().double() for name, m in self.of.items()}
        self._exact: ReferenceOptimizer | None = None
        optim, model = scenario.optim, scenario.model
        if not optim.is_adamw or optim.groups or model.mup.base_width is not None:
            self._exact = reference_optimizer({name: m.detach().numpy() for name, m in self.of.items()}, optim, model)
            return
        tied = TIED_PARAMETER if model.tie_embeddings else None
        groups = parameter_groups(self.of.items(), tied_name=tied, optim=optim)
        beta1, beta2 = optim.betas
        self._adamw = torch.optim.AdamW(groups, lr=scenario.lr, betas=(beta1, beta2), eps=optim.eps)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Updates the masters from their clipped gradients, and the running averages from the masters, in fp64."""
        if self._exact is None:
            self._adamw.step()
        else:
            self._step_exactly(self._exact, lr)
        for name, average in self.averages.items():
            assert self._ema_decay is not None
            average.copy_(self._ema_decay * average + (1.0 - self._ema_decay) * self.of[name].double())

    def _step_exactly(self, exact: ReferenceOptimizer, lr: float) -> None:
        exact.step({name: m.grad.numpy() for name, m in self.of.items() if m.grad is not None}, lr)
        for name, weight in exact.weights.items():
            self.of[name].copy_(torch.from_numpy(weight))


class _Routers:
    """Routers of the reference, whose balance state is updated from the counts of each step in numpy."""

    def __init__(self, model: GPT) -> None:
        working = model.parameters_by_name()
        self._routers = {
            name.removesuffix(".weight"): module
            for name, p in working.items()
            for module in model.modules()
            if isinstance(module, Router) and module.weight is p
        }
        self.state = {name: p for name, p in working.items() if not p.requires_grad}
        self._reset()

    def _reset(self) -> None:
        for router in self._routers.values():
            router.statistics = torch.zeros(router.moe.num_experts + SUMMARY, dtype=torch.float64)

    def update(self, moe: MoEConfig) -> None:
        """Updates loads and biases from the statistics of the last step, and resets these."""
        for name, router in self._routers.items():
            assert router.statistics is not None
            counts = router.statistics[: moe.num_experts].numpy()
            load, bias = self.state.get(f"{name}.{EXPERT_LOAD}"), self.state.get(f"{name}.{EXPERT_BIAS}")
            if load is not None:
                load.data = torch.from_numpy(counts * moe.num_experts / counts.sum()).float()
            if bias is not None:
                few, many = counts < counts.mean(), counts > counts.mean()
                bias.data = bias.data + moe.bias_rate * torch.from_numpy(few.astype("f4") - many.astype("f4"))
        self._reset()


def train_reference(scenario: Scenario) -> Run:
    """Trains with autograd, fp32 gradient accumulation over micro-batches, clipping, and an optimizer on masters."""
    model = GPT(scenario.model, scenario.seed, initial_weights(scenario)).to(scenario.dtype)
    use_reference_float8(model, scenario.float8)
    working = model.parameters_by_name()
    optimizer = _Masters(working, scenario)
    routers = _Routers(model)
    masters = optimizer.of
    run = Run(validation=_validate(model, scenario), model=scenario.model)
    run.float8 = bool(scenario.float8.blocks(scenario.model.num_layers))
    if scenario.optim.name == OptimizerName.lion:
        run.weight_bound = _SIGN_BOUND
    run.initial = {name: m.detach().numpy().copy() for name, m in (masters | routers.state).items()}
    for step in range(scenario.steps):
        loss, tokens, gradients = _gradients(model, scenario, step)
        for name, master in masters.items():
            master.grad = gradients[name]
        if step == 0:
            run.gradients = {name: g.numpy().copy() for name, g in gradients.items()}
        run.norms.append(_clip_gradients(gradients, scenario.clip_grad))
        run.losses.append(loss)
        run.tokens.append(tokens)
        optimizer.step(scenario.lr)
        with torch.no_grad():
            for name, master in masters.items():
                working[name].copy_(master)
        routers.update(scenario.model.moe)
    run.weights = {name: m.detach().numpy() for name, m in (masters | routers.state).items()}
    run.averages = {name: average.float().numpy() for name, average in optimizer.averages.items()}
    return run


def _clip_gradients(gradients: Mapping[str, Tensor], largest: float) -> float:
    """Scales the gradients to a norm of at most `largest` (0: leaves them), and returns their norm before.

    The norm is computed in fp64: torch's fp32 norm of a million elements is off by up to 4e-5 on a CPU.
    """
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    if largest and norm > largest:
        for gradient in gradients.values():
            gradient.mul_(largest / (norm + 1e-6))
    return norm


def _gradients(model: GPT, scenario: Scenario, step: int) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, number of unmasked tokens, and fp32 gradients of one step; the loss is the mean over its global batch."""
    batches = step_batches(scenario, step)
    working = model.parameters_by_name()
    gradients = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in working.items() if p.requires_grad}
    positions = sum(batch.tokens_bs.numel() for batch in batches if batch.tokens_bs is not None)
    total = sum(float(b.loss_mask_bs.sum()) for b in batches if b.loss_mask_bs is not None)
    loss_sum = 0.0
    for batch in batches:
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        logits = model(batch.tokens_bs, dataclasses.replace(batch.info, step_tokens=positions))
        loss = (token_losses(logits, batch.labels_bs) * batch.loss_mask_bs).sum() / total
        objective = loss
        if scenario.z_loss:
            log_z_bs = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)
            objective = loss + scenario.z_loss * (log_z_bs.square() * batch.loss_mask_bs).sum() / total
        model.zero_grad(set_to_none=True)
        objective.backward()
        loss_sum += loss.item()
        for name, total_gradient in gradients.items():
            own = working[name].grad
            assert own is not None
            total_gradient.add_(own.float())
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


def _run_reference(scenario: Scenario, corpus: Path) -> Run:
    """Trains the reference on one thread, like every rank."""
    with _one_thread():
        run = train_reference(scenario)
        run.stream = read_stream(corpus, scenario)
    return run


def _run_layout(folder: Path, job: Job, console: Console, ranks_per_gpu: int = 1) -> tuple[int, list[Run]]:
    """Starts the ranks and waits for them.

    Args:
        folder: folder of the job, logs and results; the caller holds its lease (lease.claimed).
        job: job of the ranks.
        console: console for messages of the launcher.
        ranks_per_gpu: number of ranks that share a GPU.

    Returns:
        The launcher's exit code and, if it is 0, one run per scenario.

    Raises:
        ConfigError: this machine does not have the memory, or the GPUs, for that many processes.
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
    spec = LaunchSpec(
        folder,
        ranks,
        command,
        threads_per_rank=1,
        cpu=not job.cuda,
        saves=False,
        ranks_per_gpu=ranks_per_gpu,
        one_hardware_queue=job.parallel.zero_stage < 3,
        deepspeed=any(
            uses_deepspeed(resolve_engine(scenario.engine, job.parallel.zero_stage), scenario.optim.impl)
            for scenario in job.scenarios
        ),
    )
    code = launch(spec, console).exit_code
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


T = TypeVar("T")

REPORT_FILE = "verify.json"
_TABLE_WIDTH = 100
"""Width of the widest table in characters; a narrower terminal wraps its lines instead of truncating cells."""
_SHOWN_FAULTS = (8, 8, 8, 2)
"""Maximum violations shown for each failed check in order; the last entry also applies to all later ones."""


def verify(config: VerifyLayoutConfig, place: str, defect: str = "") -> tuple[int, int]:
    """Verifies a layout, prints the result and writes it to the folder.

    Args:
        config: config of the run and of its verification.
        place: folder for the report and the logs of the ranks.
        defect: module:function that every rank calls first; tests inject defects with it.

    Returns:
        The exit code of the launcher, and the number of failed checks.
    """
    folder = Path(place)
    config = _of_phase(config)
    scaled = scale(wanted(config), config.verify.max_ranks, config.verify.steps)
    if config.verify.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("verify.device = cuda, but torch finds no GPU on this machine: set verify.device=cpu")
    # With json, stdout holds only JSON and messages go to stderr.
    console = VisibleConsole(highlight=False, stderr=config.json, soft_wrap=True)
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(
        f"{_layout_line(scaled.parallel, scaled.exact.engine)}, against one process of plain torch; folder {folder}"
    )
    notes = [*_phase_notes(config), *scaled.notes]
    if not config.optim.is_built_in:
        notes.append(f"optimizer: adamw instead of optim.name={config.optim.name}, which has no reference")
    for note in notes:
        console.print(f"  {note}", style="dim")
    if config.optim.impl is Implementation.deepspeed:
        build_adam(console.print, cuda=config.verify.device == "cuda")
    with claimed(folder):
        code, found, cause = _compare(config, scaled, folder, defect, console)
        if code != EXIT_OK:
            return code, 0
        content = as_json(scaled, found, cause)
        (folder / REPORT_FILE).write_text(json.dumps(content, indent=2) + "\n")
    if config.json:
        print(json.dumps(content, indent=2))
    else:
        show(console, found, cause)
    return code, sum(not row.passed for row in found)


def _of_phase(config: VerifyLayoutConfig) -> VerifyLayoutConfig:
    """The config with the overrides of verify.phase.

    Raises:
        ConfigError: the run has no such phase.
    """
    phase, phases = config.verify.phase, len(config.train.phases)
    if phase is None:
        return config
    if phase > phases:
        raise ConfigError(f"verify.phase = {phase}: train.phases has {phases or 'none'}; leave it out, or lower it")
    return cast("VerifyLayoutConfig", phase_config(config, phase - 1))


def _phase_notes(config: VerifyLayoutConfig) -> list[str]:
    """Note on which training phase is verified; empty for runs without phases."""
    phases = len(config.train.phases)
    if not phases:
        return []
    if config.verify.phase is None:
        return [f"training phases: the keys of the config itself; verify.phase=1 to {phases} takes those of a phase"]
    return [f"training phases: the keys of phase {config.verify.phase} of {phases}"]


def wanted(config: RootConfig) -> RequestedSettings:
    """Extracts the settings of the run that the verification uses."""
    (config, _), train = run_planner().choose_context_kind(config), config.train
    return RequestedSettings(
        config.model,
        config.parallel,
        config.optim if config.optim.is_built_in else dataclasses.replace(config.optim, name="adamw", options={}),
        train.global_batch_size,
        train.micro_batch_size,
        train.seq_len,
        bf16=train.precision is Precision.bf16,
        document_mask=config.data.document_mask,
        reset_positions=config.data.reset_positions,
        ops=config.ops,
        z_loss=train.z_loss,
        engine=config.engine,
        float8=train.float8,
    )


def _layout_line(parallel: ParallelConfig, asked: EngineKind) -> str:
    """Describes a layout, for example "tp 2 x pp 2 on 4 processes, engine native"."""
    sizes = [f"{axis} {getattr(parallel, axis)}" for axis in AXES if getattr(parallel, axis) > 1]
    processes = f"{' x '.join(sizes)} on {parallel.world_size} processes" if sizes else "one process"
    processes += f", ep {parallel.ep}" if parallel.ep > 1 else ""
    return f"{processes}, engine {resolve_engine(asked, parallel.zero_stage)}"


def _compare(
    config: VerifyLayoutConfig, scaled: Scaled, folder: Path, defect: str, console: VisibleConsole
) -> tuple[int, list[Row], str]:
    """Trains both; returns the launcher's exit code, the rows of the table, and the likely cause of a failure."""
    scenarios = [scaled.exact, *([scaled.bf16] if scaled.bf16 is not None else [])]
    precisions = ("fp32", "bf16")[: len(scenarios)]
    trained = " and ".join(f"{s.steps} steps in {name}" for s, name in zip(scenarios, precisions, strict=True))
    corpus = folder / "corpus"
    write_corpus(corpus, scaled.exact)
    references = _timed(
        console, f"reference: {trained}", lambda: [_run_reference(scenario, corpus) for scenario in scenarios]
    )
    verify, plugins = config.verify, tuple(config.plugins)
    cuda = verify.device == "cuda"
    job = Job(scaled.parallel, tuple(scenarios), corpus, verify.timeout_s, defect, plugins, cuda)
    # Only warnings: the usual lines of a training run have no meaning here.
    with Console(folder, sys.stderr if config.json else sys.stdout, level="warning") as said:
        code, runs = _timed(
            console,
            f"layout: {scaled.parallel.world_size} ranks{' on GPUs' if cuda else ''}, {trained}",
            lambda: _run_layout(folder, job, said, config.cluster.ranks_per_gpu),
        )
    if code != EXIT_OK:
        return code, [], ""
    tied, found = scaled.exact.model.tie_embeddings, []
    for guarantees, precision, run, reference in zip((FP32, BF16), precisions, runs, references, strict=False):
        found += rows(guarantees, precision, run, reference, scaled.parallel, tied)
    failed = [row for row in found if not row.passed]
    cause = likely_cause(failed, runs[0], references[0], scaled.parallel) if failed else ""
    return code, found, cause


def _timed(console: VisibleConsole, what: str, work: Callable[[], T]) -> T:
    console.print(f"{what} ...", end="")
    begin = time.perf_counter()
    result = work()
    console.print(f" {time.perf_counter() - begin:.1f} s")
    return result


def as_json(scaled: Scaled, found: Sequence[Row], cause: str) -> dict[str, Any]:
    """Converts the result to plain dicts."""
    return {
        "passed": all(row.passed for row in found),
        "layout": scaled.parallel.sizes,
        "ranks": scaled.parallel.world_size,
        "scaled_down": list(scaled.notes),
        "checks": [dataclasses.asdict(row) for row in found],
        "likely_cause": cause,
    }


def show(console: VisibleConsole, found: Sequence[Row], cause: str) -> None:
    """Prints the table and, after a failure, the violations and their likely cause."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("", "quantity", "precision", "count", "bound", "found", "result"):
        table.add_column(header, justify="right" if header in ("count", "bound", "found") else "left", no_wrap=True)
    for row in found:
        verdict = "same" if row.passed else "DIFFERS"
        bound = f"{row.bound:.0e}" if row.bound else "bitwise"
        value = f"{row.found:.1e}" if row.bound else "equal" if not row.found else f"{row.found:.0f} differ"
        if not row.compared:
            bound, value = "", "none here" if row.passed else "none seen"
        style = "" if row.passed else "bold red"
        table.add_row(row.guarantee, row.what, row.precision, str(row.compared), bound, value, verdict, style=style)
    console.print(table)
    for line in legend(row.guarantee for row in found):
        console.print(line)
    failed = [row for row in found if not row.passed]
    if not failed:
        console.print("This layout trains the same model.", style="bold green")
        return
    for number, row in enumerate(failed):
        shown = _SHOWN_FAULTS[min(number, len(_SHOWN_FAULTS) - 1)]
        console.print(f"{row.guarantee} {row.what} in {row.precision}:", style="bold")
        for fault in row.faults[:shown]:
            console.print(f"  {fault}")
        if len(row.faults) > shown:
            console.print(f"  and {len(row.faults) - shown} more, see {REPORT_FILE}")
    console.print(f"Likely cause: {cause}", style="bold")
