"""Output of `megads why`: one table per sample, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from megads.api import VisibleConsole
from megads.data.sampling.runs import DocumentSpan
from megads.tools.inspect.why import Explanation, Losses, ShownSample

_WIDTH = 120
_CONTROL = {code: repr(chr(code))[1:-1] for code in chain(range(32), range(127, 160))}
"""Escapes of control characters, because a line break in a cell would look like one of the table."""


def as_text(found: Explanation, max_characters: int, tokens: bool) -> str:
    """Formats the result as tables, at most 120 characters wide.

    Args:
        found: result to print.
        max_characters: maximum characters of text per document.
        tokens: whether to add one line per token.
    """
    lines = list(_heading(found))
    for sample in found.samples:
        lines += ["", *_sample(found, sample, max_characters)]
        if tokens:
            lines.append(_printed(_token_table(found, sample)))
    left = found.num_samples - len(found.samples)
    if left:
        lines += ["", f"{left:,} more samples: count=<number> shows more, first=<number> others, json=true all"]
    return "\n".join(lines)


def as_json(found: Explanation) -> str:
    """Formats the result as one JSON object; unknown losses and texts are null."""
    line, config = found.trained.line, found.trained.config
    share = found.share
    content = {
        "run": str(found.run_dir),
        "step": line["step"],
        "samples": [int(found.trained.samples[0]), int(found.trained.samples[-1]) + 1],
        "batch_hash": line["batch_hash"],
        "batch_hash_verified": True,
        "data_verified": found.trained.data_recorded,
        "seq_len": config.train.seq_len,
        "layout": config.parallel.sizes,
        "rank": None if share is None else {"rank": share.rank, **share.place._asdict()},
        "metrics_loss": _finite(line["loss"]),
        "weights": None if found.weights is None else _weights_json(found),
        "notes": list(found.notes),
        "num_samples": found.num_samples,
        "shown": [_sample_json(found, sample) for sample in found.samples],
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


def _heading(found: Explanation) -> Iterator[str]:
    line, trained = found.trained.line, found.trained
    yield (
        f"step {line['step']} of {found.run_dir}: samples {trained.samples[0]:,} to {trained.samples[-1]:,} of the "
        f"run, {trained.samples.size:,} x {trained.config.train.seq_len:,} tokens"
    )
    held = "its data as recorded" if trained.data_recorded else "its data not recorded"
    skipped = "; the step was skipped, no weight changed" if line.get("skipped") else ""
    yield f"batch_hash {line['batch_hash']}: recomputed, as in metrics.jsonl; {held}{skipped}"
    if found.share is not None:
        place = " ".join(f"{axis}={value}" for axis, value in found.share.place._asdict().items())
        held_places = ", ".join(f"{chunk.start}-{chunk.stop - 1}" for chunk in found.share.chunks)
        yield f"rank {found.share.rank} ({place}): {found.num_samples:,} samples, positions {held_places} of each"
    if found.weights is not None:
        yield _weights_line(found)
    yield from found.notes


def _weights_line(found: Explanation) -> str:
    assert found.weights is not None
    step, at = found.trained.line["step"], found.weights.state["step"]
    which = "those the step started from" if at == step - 1 else f"not those of step {step - 1}, which the step had"
    losses = np.concatenate([sample.counted_losses() for sample in found.samples])
    mean = f"{losses.mean():.6f}" if losses.size else "none"
    return (
        f"losses by the weights after step {at} ({which}): mean {mean} over {losses.size:,} tokens shown; "
        f"metrics.jsonl has {found.trained.line['loss']:.6f} for the step"
    )


def _sample(found: Explanation, sample: ShownSample, max_characters: int) -> Iterator[str]:
    origin = sample.origin
    names = ("dataset", "epoch", "row")[-len(origin.key) :]
    key = ", ".join(f"{name} {value:,}" for name, value in zip(names, origin.key, strict=True))
    losses = sample.counted_losses()
    mean = f", mean loss {losses.mean():.4f}" if losses.size else ""
    yield f"sample {origin.sample:,} (micro-batch {sample.micro_batch}; {key}){mean}"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), width=_WIDTH)
    table.add_column("dataset", overflow="fold", max_width=24)
    for header in ("document", "document tokens", "positions", *(["loss"] if sample.losses is not None else [])):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("text", overflow="fold", ratio=1)
    for stretch in origin.stretches:
        table.add_row(*_row(found, sample, stretch, max_characters))
    yield _printed(table)


def _row(found: Explanation, sample: ShownSample, stretch: DocumentSpan, max_characters: int) -> Iterator[Text]:
    end = stretch.tokens.size - 1
    text = found.text(stretch)
    if text is None:
        text = " ".join(map(str, stretch.tokens[:max_characters].tolist()))
    cells = [
        Path(stretch.dataset).name,
        f"{stretch.document:,}",
        f"{stretch.offset:,}-{stretch.offset + end:,} of {stretch.document_tokens:,}",
        f"{stretch.place:,}-{stretch.place + end:,}",
    ]
    losses = sample.span_losses(stretch)
    if losses is not None:
        cells.append(f"{losses[stretch.counted].mean():.3f}" if stretch.counted.any() else "-")
    cut = " ..." if len(text) > max_characters else ""
    yield from (Text(cell) for cell in (*cells, text[:max_characters].translate(_CONTROL) + cut))


def _token_table(found: Explanation, sample: ShownSample) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption="- : masked, not part of the loss")
    for header in ("position", "document", "offset", "token"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("loss", justify="right")
    table.add_column("text", overflow="fold")
    for stretch in sample.origin.stretches:
        losses = sample.span_losses(stretch)
        texts = found.token_texts(stretch)
        for at, (token, counted) in enumerate(zip(stretch.tokens.tolist(), stretch.counted.tolist(), strict=True)):
            loss = "" if losses is None else f"{losses[at]:.4f}"
            table.add_row(
                str(stretch.place + at),
                str(stretch.document),
                str(stretch.offset + at),
                str(token),
                loss if counted else "-",
                Text(texts[at].translate(_CONTROL)),
            )
    return table


def _printed(table: Table) -> str:
    console = VisibleConsole(highlight=False, width=_WIDTH, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").splitlines())


def _weights_json(found: Explanation) -> dict[str, Any]:
    assert found.weights is not None
    losses = np.concatenate([sample.counted_losses() for sample in found.samples])
    return {
        "checkpoint": str(found.weights.folder),
        "after_step": found.weights.state["step"],
        "mean_loss": _finite(losses.mean()) if losses.size else None,
        "tokens": int(losses.size),
    }


def _sample_json(found: Explanation, sample: ShownSample) -> dict[str, Any]:
    return {
        "sample": sample.origin.sample,
        "micro_batch": sample.micro_batch,
        "key": list(sample.origin.key),
        "documents": [
            {
                "dataset": stretch.dataset,
                "document": stretch.document,
                "offset": stretch.offset,
                "document_tokens": stretch.document_tokens,
                "place": stretch.place,
                "text": found.text(stretch),
                "tokens": stretch.tokens.tolist(),
                "loss_counts": stretch.counted.tolist(),
                "losses": _losses_json(sample.span_losses(stretch)),
            }
            for stretch in sample.origin.stretches
        ],
    }


def _losses_json(losses: Losses | None) -> list[float | None] | None:
    """Converts losses to JSON; null for the first token of a sample, which is not predicted."""
    return None if losses is None else [_finite(loss) for loss in losses]


def _finite(value: float) -> float | None:
    """Replaces non-finite values by None, because JSON has no NaN."""
    return float(value) if np.isfinite(value) else None
