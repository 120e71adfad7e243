"""Summary of a run at the top of its report: status, key numbers and facts."""

from __future__ import annotations

import math
import time
from itertools import groupby

import numpy as np

from megads.api import EVENTS_FILE, read_json_lines, render_duration
from megads.monitor.run_state import is_alive
from megads.tools.report.charts import finite
from megads.tools.report.history import FloatArray, RunHistory, number
from megads.tools.report.html_page import KeyNumber
from megads.tools.report.timeline import find_starts, layer_costs

_EXITS = {0: "finished", 2: "bad configuration", 3: "bad data", 4: "no usable checkpoint", 5: "stopped on request",
          6: "preempted", 7: "numerical failure", 10: "a rank was killed", 130: "killed"}  # fmt: skip
_LAST_STEPS = 10


def status(history: RunHistory) -> tuple[str, str]:
    """Status of the run as text, and its kind: "good", "bad" or "open"."""
    starts = find_starts(history)
    if not starts:
        return "no starts recorded", "open"
    code = starts[-1].exit_code
    if code is None:
        alive = is_alive(history.run_dir, time.time())
        # A live page draws later than it reads: the run may have ended, with a record, in between.
        later = sum(1 for _ in read_json_lines(history.run_dir / EVENTS_FILE)) > len(history.events)
        if alive or later:
            return "in progress", "open"
        return "ended without a record: killed, or its node was lost", "bad"
    words = _EXITS.get(code, "failed")
    return (words if code in (0, 5, 6) else f"{words}, exit {code}"), (
        "good" if code == 0 else "open" if code in (5, 6) else "bad"
    )


def key_numbers(history: RunHistory) -> list[KeyNumber]:
    """Key numbers of the run."""
    columns, numbers = history.columns, list[KeyNumber]()
    for validation in history.validations:
        name = f" {validation.name}" if len(history.validations) > 1 else ""
        loss, final, notes = finite(validation.loss), float(validation.loss[-1]), []
        if np.isfinite(loss).any():
            best = int(np.nanargmin(loss))
            at_end = best == len(loss) - 1
            notes.append("the best so far" if at_end else f"best {loss[best]:.4f} at step {validation.step[best]:,.0f}")
        if math.isfinite(validation.unigram_loss):
            notes.append(f"unigram {validation.unigram_loss:.4f}")
        perplexity = math.exp(final) if final < 700 else math.inf
        shown = f"{perplexity:,.1f}" if perplexity < 1e6 else short(perplexity)
        numbers.append(KeyNumber(f"validation loss{name}", loss_text(final), ", ".join(notes)))
        numbers.append(KeyNumber(f"perplexity{name}", shown, f"of validation at step {validation.step[-1]:,.0f}"))
    for task in history.tasks:
        numbers.append(KeyNumber(task.name, f"{task.value[-1]:.4g}", f"at step {task.step[-1]:,.0f}"))
    tail = finite(columns["loss"])[-_LAST_STEPS:]
    mean = float(np.nanmean(tail)) if np.isfinite(tail).any() else math.nan
    note = f"mean of the last {len(tail)} steps" if len(tail) > 1 else f"step {history.step[-1]:,.0f}"
    if lost := int((~np.isfinite(columns["loss"])).sum()):
        note += f"; {lost:,} of all not finite"
    numbers.append(KeyNumber("train loss", loss_text(mean), note))
    numbers.append(KeyNumber("tokens", short(last(columns["tokens"])), f"{_count(last(columns['samples']))} samples"))
    mfu = median(columns["mfu"])
    note = "median" + (f", MFU {100 * mfu:.3g}%" if math.isfinite(mfu) else "")
    numbers.append(KeyNumber("tokens/s", short(median(columns["tokens_per_s"])), note))
    trained = render_duration(float(np.nansum(finite(columns["step_time_s"]))))
    if starts := find_starts(history):
        ran = render_duration(sum(start.end - start.begin for start in starts))
        numbers.append(KeyNumber("running time", ran, f"{trained} in the steps shown"))
    else:
        numbers.append(KeyNumber("time in steps", trained))
    if (accounting := history.accounting) is not None and accounting.wall_us:
        share, wall = f"{accounting.effective_time:.1%}", render_duration(accounting.wall_us / 1e6)
        numbers.append(KeyNumber("effective time", share, f"in steps that count, of {wall} from the first command on"))
        if accounting.faults:
            detect_s, recover_s = accounting.mean_time_to_detect_s, accounting.mean_time_to_recover_s
            detected = f"detected in {detect_s:.1f} s" if detect_s is not None else "detected at once"
            recovered = f"recovered {recover_s:.1f} s later" if recover_s is not None else "not recovered since"
            note = f"{detected}, {recovered}, on average"
            numbers.append(KeyNumber("faults", f"{len(accounting.faults):,}", note))
    return numbers


def facts(history: RunHistory) -> list[tuple[str, str]]:
    """Model, layout, data and environment of the run, as labels and values."""
    start, launch, setting = history.last_event("start"), history.last_event("launch"), history.setting
    planned = number(start.get("total_steps"))
    memory = finite(history.columns["peak_memory_bytes"])
    device, threads = str(start.get("device") or ""), start.get("threads_per_rank")
    if threads and device == "cpu":
        device += f", threads of each rank {threads}"
    batch, length = setting("train.global_batch_size"), setting("train.seq_len")
    sets = setting("data.train")
    paths = [str(item.get("path")) for item in sets if isinstance(item, dict)] if isinstance(sets, list) else []
    model = ""
    if setting("model.num_layers") is not None:
        model = (
            f"{setting('model.num_layers')} layers, hidden {setting('model.hidden_size')}, "
            f"{setting('model.num_heads')} heads, vocabulary {_count(number(setting('model.vocab_size')))}, "
            f"{setting('model.position')}"
        )
    costs = layer_costs(history)
    rows = [
        ("model", model),
        ("parameters", _count(number(start.get("parameters")))),
        ("layout", _of_starts(history, "layout")),
        ("engine", _of_starts(history, "engine")),
        ("precision", str(start.get("precision") or setting("train.precision") or "")),
        ("device", device),
        ("ranks", _count(number(launch.get("ranks")))),
        ("steps", _count(history.step[-1]) + (f" of {planned:,.0f} planned" if math.isfinite(planned) else "")),
        ("skipped steps", f"{int(np.nansum(history.columns['skipped'])):,}"),
        ("starts", f"{max(1, len(find_starts(history))):,}"),
        ("batch", f"{batch} samples of {length} tokens" if batch and length else ""),
        ("data", ", ".join(paths)),
        ("peak memory", f"{size(float(np.nanmax(memory)))} on rank 0" if np.isfinite(memory).any() else ""),
        (
            "layer costs",
            f"[{costs[0]:.2f},1,{costs[2]:.2f}]: embedding, a block, head, measured; for parallel.layer_costs"
            if costs
            else "",
        ),
        ("config", str(start.get("config_digest") or "")[:8]),
    ]
    return [(label, value) for label, value in rows if value]


def _of_starts(history: RunHistory, key: str) -> str:
    """A value of the run's starts; several, in order, if it was resumed with another one."""
    values = [str(event[key]) for event in history.events if event.get("event") == "start" and key in event]
    return " -> ".join(value for value, _ in groupby(values))


def last(values: FloatArray) -> float:
    """The last finite value; NaN if there is none."""
    valid = values[np.isfinite(values)]
    return float(valid[-1]) if len(valid) else math.nan


def median(values: FloatArray) -> float:
    """The median of the finite values; NaN if there are none."""
    valid = values[np.isfinite(values)]
    return float(np.median(valid)) if len(valid) else math.nan


def loss_text(loss: float) -> str:
    """Formats a loss with four decimals, or as "not finite"."""
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def short(value: float) -> str:
    """Formats a count with up to four digits, for example 204.8 k."""
    if not math.isfinite(value):
        return "not finite" if math.isinf(value) else "unknown"
    for unit, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def size(num_bytes: float) -> str:
    """Formats bytes in binary units."""
    for unit, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {suffix}"
    return f"{num_bytes:.0f} B"


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else ""
