"""Plan of a run's training stages (train.stages), as `megads plan` and a dry run print it."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.config import RootConfig, learning_rate, planned_steps, run_spans, stage_config
from megads.launch.preflight_memory import gib, plan_of
from megads.runtime.visible_console import VisibleConsole
from megads.stages import WEIGHTS, StageSpan, parse_stages
from megads.train_config import LENGTHS


def stages_json(config: RootConfig, *, cuda: bool) -> list[dict[str, Any]]:
    """Training stages as JSON-serializable values; None for values not known, and for rates of a stage not reached.

    Args:
        config: config of the run.
        cuda: whether ranks compute on GPUs.
    """
    has_length = any(getattr(config.train, length) is not None for length in LENGTHS)
    last = planned_steps(config) if has_length else None
    return [_stage_json(config, span, last, cuda=cuda) for span in run_spans(config)]


def _stage_json(config: RootConfig, span: StageSpan, last: int | None, *, cuda: bool) -> dict[str, Any]:
    train = stage_config(config, span.place).train
    ends = [step for step in (None if span.steps is None else span.first_step + span.steps, last) if step is not None]
    steps = max(0, min(ends) - span.first_step) if ends else None
    end_sample = None if steps is None else span.sample_after(steps)
    rates: tuple[float, float] | None = None
    if last is not None and steps and end_sample is not None:
        rate = learning_rate(config)
        rates = (rate(span.sample_after(1)), rate(end_sample))
    size = None
    if config.model.vocab_size is not None:
        size = plan_of(stage_config(config, span.place), cuda=cuda).largest.peak
    return {
        "stage": span.place + 1,
        "first_step": span.first_step,
        "steps": steps,
        "end_step": None if steps is None else span.first_step + steps,
        "tokens": None if steps is None else steps * span.global_batch_size * span.seq_len,
        "end_tokens": None if steps is None else span.first_token + steps * span.global_batch_size * span.seq_len,
        "global_batch_size": span.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "seq_len": span.seq_len,
        "lr_begin": rates[0] if rates else None,
        "lr_end": rates[1] if rates else None,
        "largest_rank_bytes": size,
        "weights": parse_stages(config.train.stages)[span.place].changes.get(WEIGHTS),
    }


def stage_table(config: RootConfig, *, cuda: bool) -> Table:
    """One row per training stage.

    Args:
        config: config of the run.
        cuda: whether ranks compute on GPUs.
    """
    table = Table(title="training stages", title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    rows = stages_json(config, cuda=cuda)
    mixed = any(row["weights"] for row in rows)
    headers = ["stage", "until step", "steps", "tokens", "batch", "micro-batch", "seq_len", "tokens a step"]
    headers += ["rate at begin", "at end", "largest rank", *(["weights"] if mixed else [])]
    for header in headers:
        table.add_column(header.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in rows:
        per_step = row["global_batch_size"] * row["seq_len"]
        counts = [row[key] for key in ("end_step", "steps", "tokens")]
        counts += [row["global_batch_size"], row["micro_batch_size"], row["seq_len"], per_step]
        if row["steps"] == 0:
            counts[:3] = ["not reached", 0, 0]
        rates = ["-" if row[key] is None else f"{row[key]:.3g}" for key in ("lr_begin", "lr_end")]
        size = row["largest_rank_bytes"]
        cells = [_shown(count) for count in counts] + rates + ["-" if size is None else gib(size)]
        weights = [":".join(f"{weight:g}" for weight in row["weights"] or ())] if mixed else []
        table.add_row(str(row["stage"]), *cells, *weights)
    return table


def _shown(count: int | str | None) -> str:
    if count is None:
        return "-"
    return f"{count:,}" if isinstance(count, int) else count


def stage_text(config: RootConfig, width: int, *, cuda: bool) -> list[str]:
    """The table as text for the dry run; empty for a run without stages.

    Args:
        config: config of the run.
        width: maximum width of a line, in characters.
        cuda: whether ranks compute on GPUs.
    """
    if not config.train.stages:
        return []
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(stage_table(config, cuda=cuda))
    return [captured.get().rstrip("\n")]
