#!/usr/bin/env python3
"""Compares every family of transformers in and out, and writes the table of docs/hugging-face.md.

    python -m scripts.hf_table [--page docs/hugging-face.md] [gemma2 ...]

Each small random model (tests/tools/convert/families.py) is saved by transformers, imported, exported and loaded by
transformers again. "In" is the largest difference of fp32 logits between megads and transformers, "out" that between
the exported and the original model in transformers.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.tools.convert import export, load
from megads.tools.convert.architectures import ARCHITECTURES
from megads.tools.convert.export_config import ExportConfig, ExportFormat, ExportPrecision
from megads.tools.convert.import_config import ImportConfig
from tests.tools.convert import families

BEGIN, END = "<!-- table: python -m scripts.hf_table --page docs/hugging-face.md -->", "<!-- end of the table -->"
TOKENS = 8
"""Length of the greedy continuations that are compared."""


@dataclass(frozen=True)
class Row:
    """What was measured of one model.

    Attributes:
        spread: standard deviation of transformers' logits.
        into: largest difference of megads' logits from transformers'.
        out: largest difference of the exported model's logits from the original's, in transformers.
        equal_tokens: whether greedy text is equal.
        equal_weights: whether all tensors of the export equal the original's bit by bit.
    """

    spread: float
    into: float
    out: float
    equal_tokens: bool
    equal_weights: bool


def measured(name: str, number: int) -> Row:
    """Takes one case of a family in and out."""
    theirs, ids_bs = families.their_model(name, families.CASES[name][number]), families.tokens()
    wanted = families.their_logits(theirs, ids_bs)
    with tempfile.TemporaryDirectory() as parent:
        folder = families.write_folder(theirs, Path(parent, "theirs"))
        run = load.import_folder(ImportConfig(str(folder), f"{parent}/in"))
        ours = load_unsharded(open_checkpoint(run.folder), torch.device("cpu"), torch.float32).eval()
        config = ExportConfig(f"{parent}/in", f"{parent}/out", ExportFormat(name), ExportPrecision.fp32)
        out = export.export_checkpoint(config).folder
        again, _ = families.reloaded(out)
        before, after = (load_file(some / "model.safetensors") for some in (folder, out))
    made = families.their_greedy(theirs, ids_bs, TOKENS)
    return Row(
        spread=wanted.std().item(),
        into=(families.our_logits(ours, ids_bs) - wanted).abs().max().item(),
        out=(families.their_logits(again, ids_bs) - wanted).abs().max().item(),
        equal_tokens=torch.equal(families.greedy(ours, ids_bs, TOKENS), made),
        equal_weights=before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before),
    )


def table(names: list[str]) -> str:
    """A Markdown table with a row for each family, of its worst case."""
    lines = ["| format | transformers' class | models | in | out | spread | text | weights |", "|---" * 8 + "|"]
    for name in names:
        rows = [measured(name, number) for number in range(len(families.CASES[name]))]
        into, out = (f"{max(getattr(row, side) for row in rows):.1e}" for side in ("into", "out"))
        same = (all(getattr(row, side) for row in rows) for side in ("equal_tokens", "equal_weights"))
        text, weights = ("equal" if each else "DIFFER" for each in same)
        spread = max(row.spread for row in rows)
        cells = (f"`{name}`", f"`{ARCHITECTURES[name].class_name}`", str(len(rows)), into, out, f"{spread:.1f}")
        lines.append(f"| {' | '.join((*cells, text, weights))} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model types; all of them if none is given")
    parser.add_argument("--page", type=Path, help="page whose table is replaced")
    arguments = parser.parse_args()
    unknown = set(arguments.families) - ARCHITECTURES.keys()
    if unknown:
        parser.error(f"unknown families {', '.join(sorted(unknown))}: choose from {', '.join(sorted(ARCHITECTURES))}")
    found = table(arguments.families or sorted(ARCHITECTURES))
    if arguments.page:
        before, _, rest = arguments.page.read_text().partition(BEGIN)
        arguments.page.write_text(f"{before}{BEGIN}\n\n{found}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
