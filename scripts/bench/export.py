#!/usr/bin/env python3
"""Export to the Hugging Face format, compared with transformers' `save_pretrained` and with writing the same bytes.

    python -m scripts.bench.export                         # BLOOM-1.1B, 4.3 GB in fp32
    python -m scripts.bench.export --model bloom_560m --rounds 2

Each side is a separate process; they alternate, and the fastest round is used. `save_pretrained` starts from a model in
memory, whose loading is not timed; megads from a checkpoint on disk, whose checksums it verifies. All wait until the
bytes are on disk. Memory is the peak of the process minus that of a process with only the same imports: total resident
memory, and its anonymous part. The rest are pages of mapped files, which the kernel can reclaim.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from omegaconf import OmegaConf

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.store import save_parts
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.data.indexed.sidecar import embedding_rows, load_tokenizer, tokenizer_sha256
from megads.engine.interface import Shard
from megads.model.config import ModelConfig
from megads.model.model_size import parameter_shapes
from megads.tools.convert.export import export_checkpoint
from megads.tools.convert.export_config import ExportConfig, ExportPrecision
from tests.small_run import write_dataset

PRESETS = Path(__file__).parents[2] / "conf" / "model"
SIDES = ("megads", "save_pretrained", "write", "nothing")


def model_of(preset: str) -> ModelConfig:
    """Returns the model shape of a preset."""
    found = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(PRESETS / f"{preset}.yaml").model)
    )
    assert isinstance(found, ModelConfig)
    return found


def write_run(run_dir: Path, model: ModelConfig, tokenizer: Path) -> None:
    """Writes a checkpoint of random weights, one file per stage."""

    def parts() -> Iterator[list[Shard]]:
        stages: dict[str, list[str]] = {}
        shapes = parameter_shapes(model)
        for name in shapes:
            stages.setdefault(".".join(name.split(".")[:2]), []).append(name)
        for names in stages.values():
            yield [Shard(f"weight/{n}", shapes[n], (0,) * len(shapes[n]), torch.randn(shapes[n])) for n in names]

    content = json.loads(json.dumps(dataclasses.asdict(model)))
    rows = embedding_rows(load_tokenizer(tokenizer))
    record = RunRecord(
        {"step": 0, "samples": 0, "tokens": 0}, 0, "", content, {"tp": 1, "cp": 1, "pp": 1, "dp": 1},
        tokenizer=TokenizerRecord(tokenizer_sha256(tokenizer), rows, None, "ignore"),
    )  # fmt: skip
    save_parts(run_dir, parts(), record)
    shutil.copyfile(tokenizer, run_dir / "tokenizer.json")


def one_side(side: str, folder: Path) -> dict[str, float]:
    """Times one side in this process, and measures its resident memory, total and anonymous."""
    done, peaks = threading.Event(), {"resident_bytes": 0, "anonymous_bytes": 0}

    def watch() -> None:
        process = psutil.Process()
        while True:
            now = process.memory_info()
            peaks["resident_bytes"] = max(peaks["resident_bytes"], now.rss)
            peaks["anonymous_bytes"] = max(peaks["anonymous_bytes"], now.rss - now.shared)
            if done.wait(0.005):
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return {"seconds": _seconds_of(side, folder), **peaks}
    finally:
        done.set()
        watcher.join()


def _seconds_of(side: str, folder: Path) -> float:
    output = folder / f"of-{side}"
    shutil.rmtree(output, ignore_errors=True)
    os.sync()
    start_s = 0.0
    if side == "megads":
        start_s = time.monotonic()
        export_checkpoint(ExportConfig(str(folder / "run"), str(output), precision=ExportPrecision.fp32))
    elif side == "save_pretrained":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder / "of-megads")
        start_s = time.monotonic()
        model.save_pretrained(output)
        os.sync()
    elif side == "write":
        source = max((folder / "of-megads").glob("*.safetensors"), key=lambda path: path.stat().st_size)
        count = sum(path.stat().st_size for path in (folder / "of-megads").glob("*.safetensors"))
        content = source.read_bytes()
        output.mkdir()
        start_s = time.monotonic()
        with (output / "bytes").open("wb") as file:
            while count > 0:
                file.write(content[:count])
                count -= len(content)
            file.flush()
            os.fsync(file.fileno())
    return time.monotonic() - start_s if start_s else 0.0


def main() -> None:
    """Prints times and memory of the sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bloom_1b1", help="an option of conf/model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: a temporary folder)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(one_side(arguments.side, arguments.folder)))
        return
    model = model_of(arguments.model)
    block = sum(4 * torch.Size(s).numel() for n, s in parameter_shapes(model).items() if n.startswith("blocks.0."))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_run(folder / "run", model, Path(f"{write_dataset(folder / 'data')}.tokenizer.json"))
        found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(arguments.rounds):
            for side in SIDES:
                command = [sys.executable, "-m", "scripts.bench.export", "--side", side, "--folder", str(folder)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[side].append(json.loads(done.stdout.splitlines()[-1]))
        nbytes = sum(path.stat().st_size for path in (folder / "of-megads").glob("*.safetensors"))
    kinds = ("resident_bytes", "anonymous_bytes")
    imports = {kind: min(one[kind] for one in found["nothing"]) for kind in kinds}
    print(f"{arguments.model}: {nbytes / 1e9:.2f} GB in fp32, a block {block / 1e6:.0f} MB")
    for side in SIDES[:-1]:
        seconds = min(one["seconds"] for one in found[side])
        resident, anonymous = (max(one[kind] for one in found[side]) - imports[kind] for kind in kinds)
        print(
            f"{side:16} {seconds:6.2f} s  {nbytes / seconds / 1e9:5.2f} GB/s  "
            f"{resident / 1e6:8,.0f} MB resident, {anonymous / 1e6:8,.0f} MB of it anonymous"
        )


if __name__ == "__main__":
    main()
