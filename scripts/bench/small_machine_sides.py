"""The sides of `scripts.bench.small_machine`, each a process that writes its training clock as JSON lines.

The clock counts seconds of training: it starts before the first step, after the model is built, and is paused during
validation. `TrainingClock` is a plugin of megads; the peers are run by

    python -m scripts.bench.small_machine_sides <JSON of SideWork>
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megads
from megads.runtime.metrics import JsonLinesWriter
from scripts.bench.muon_peers import RECIPES, PeerModel, PeerOptimizer

NO_TOKEN = -1
"""Marks positions of a validation window without a token to predict."""
WINDOWS_AT_ONCE = 8


@dataclass
class ClockOptions:
    """The clock has no options."""


@megads.register_hook("training_clock", ClockOptions)
class TrainingClock(megads.Hook):
    """Writes wall-clock and CPU seconds of every step of this rank; the last hook, so validation runs before it."""

    def __init__(self, options: ClockOptions, context: megads.HookContext) -> None:
        self._lines = JsonLinesWriter(context.run_dir / f"clock_{context.rank}.jsonl")
        self._last = (0.0, 0.0)

    def on_start(self, state: Any) -> None:
        self._last = (time.perf_counter(), time.process_time())

    def on_step(self, info: megads.StepInfo) -> None:
        now = (time.perf_counter(), time.process_time())
        taken = {"clock_s": now[0] - self._last[0], "processor_s": now[1] - self._last[1]}
        self._lines.write_line({"step": info.step, "step_time_s": info.step_time_s, **taken})
        self._last = now


@dataclass(frozen=True)
class SideWork:
    """What a peer trains.

    Attributes:
        side: a key of PEERS.
        data: folder with train.bin and val.bin (uint16 tokens), meta.pkl (nanoGPT's) and windows.npy.
        output: file of lines {step, clock_s, processor_s, loss}; loss only for validated steps.
        layers, hidden, heads, vocabulary, seq_len: model shape.
        steps: number of training steps.
        validate_every: validation interval in steps.
        lr: peak learning rate; of the peers with Muon, multiple of their rates.
        batch: samples per step.
        bf16: use autocast; nanoGPT computes in fp32 on CPUs.
        checkout: folder of nanoGPT; empty for others.
    """

    side: str
    data: str
    output: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    seq_len: int
    steps: int
    validate_every: int
    lr: float
    batch: int
    bf16: bool = False
    checkout: str = ""

    @property
    def warmup(self) -> int:
        """Warmup steps."""
        return self.steps // 20

    @property
    def json(self) -> str:
        return json.dumps(asdict(self))


class Watch:
    """The clock of a peer, and its validation: mean loss over the windows' tokens, in nats."""

    def __init__(self, work: SideWork) -> None:
        self._work = work
        self._lines = JsonLinesWriter(Path(work.output))
        self._windows_bt = torch.from_numpy(np.load(Path(work.data) / "windows.npy")).long()
        self._done = [0.0, 0.0]
        self._since: tuple[float, float] | None = None

    def go_on(self) -> None:
        """Starts the clock."""
        self._since = (time.perf_counter(), time.process_time())

    def pause(self) -> None:
        """Stops the clock, if it runs."""
        if self._since is not None:
            self._done[0] += time.perf_counter() - self._since[0]
            self._done[1] += time.process_time() - self._since[1]
            self._since = None

    def step(self, step: int, logits: Callable[[Tensor], Tensor] | None) -> None:
        """Writes the line of a step; with `logits` also validates, for which the clock must be stopped."""
        running = self._since is not None
        self.pause()
        line = {"step": step, "clock_s": self._done[0], "processor_s": self._done[1]}
        if logits is not None:
            line["loss"] = self._validate(logits)
        self._lines.write_line(line)
        if running:
            self.go_on()

    @torch.no_grad()
    def _validate(self, logits: Callable[[Tensor], Tensor]) -> float:
        loss_sum, tokens = 0.0, 0
        for windows_bt in self._windows_bt.split(WINDOWS_AT_ONCE):
            inputs_bs, labels_bs = windows_bt[:, :-1].clamp(min=0), windows_bt[:, 1:]
            found = logits(inputs_bs).float().flatten(0, 1)
            loss_sum += F.cross_entropy(found, labels_bs.flatten(), ignore_index=NO_TOKEN, reduction="sum").item()
            tokens += int((labels_bs != NO_TOKEN).sum())
        return loss_sum / tokens

    def parameters(self, model: nn.Module) -> None:
        """Writes the number of parameters of the model."""
        self._lines.write_line({"parameters": sum(weight.numel() for weight in model.parameters())})


def nanogpt(work: SideWork) -> None:
    """Runs nanoGPT's train.py, unchanged, as in its README for a CPU except for sizes, learning rate and warmup.

    While its estimate_loss switches the model to evaluation mode and back, the clock is stopped and the windows are
    validated. It saves no checkpoint.
    """
    os.chdir(work.checkout)
    sys.path.insert(0, work.checkout)
    theirs: Any = importlib.import_module("model")
    watch, step = Watch(work), 0

    class Watched(theirs.GPT):
        def train(self, mode: bool = True) -> Watched:
            nonlocal step
            super().train(mode)
            if mode:
                watch.go_on()
                return self
            watch.pause()
            if step == 0:
                watch.parameters(self)
            # With targets the model returns logits of every position.
            watch.step(step, lambda inputs_bs: self(inputs_bs, inputs_bs)[0])
            if step >= work.steps:
                raise SystemExit(0)
            step += work.validate_every
            return self

    def keeps_nothing(*_arguments: object, **_named: object) -> None:
        pass

    theirs.GPT = Watched
    torch.save = keeps_nothing
    sys.argv = [
        "train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=1",
        "--log_interval=1000000", f"--eval_interval={work.validate_every}", f"--block_size={work.seq_len}",
        f"--batch_size={work.batch}", f"--n_layer={work.layers}", f"--n_head={work.heads}", f"--n_embd={work.hidden}",
        f"--max_iters={work.steps}", f"--lr_decay_iters={work.steps}", f"--warmup_iters={work.warmup}",
        "--dropout=0.0", f"--learning_rate={work.lr}", f"--min_lr={work.lr / 10}", f"--dataset={work.data}",
        f"--out_dir={Path(work.output).parent / 'nanogpt'}",
    ]  # fmt: skip
    runpy.run_path("train.py", run_name="__main__")


def trainer(work: SideWork) -> None:
    """Trains transformers' GPT-2 with its Trainer and default settings except for rate, warmup, length and batch."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    config = GPT2Config(
        vocab_size=work.vocabulary, n_positions=work.seq_len, n_embd=work.hidden, n_layer=work.layers,
        n_head=work.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model, watch = GPT2LMHeadModel(config), Watch(work)
    watch.parameters(model)
    stream = np.memmap(Path(work.data) / "train.bin", dtype=np.uint16, mode="r")
    blocks = [stream[at : at + work.seq_len] for at in range(0, len(stream) - work.seq_len, work.seq_len)]

    class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(blocks)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            tokens_s = torch.from_numpy(blocks[index].astype(np.int64))
            return {"input_ids": tokens_s, "labels": tokens_s}

    class Watching(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.go_on()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.pause()
            model.eval()
            due = state.global_step % work.validate_every == 0
            watch.step(state.global_step, (lambda inputs_bs: model(inputs_bs).logits) if due else None)
            model.train()
            watch.go_on()

    arguments = TrainingArguments(
        output_dir=str(Path(work.output).parent / "trainer"), max_steps=work.steps, learning_rate=work.lr,
        per_device_train_batch_size=work.batch, warmup_steps=work.warmup, use_cpu=True, bf16=work.bf16,
        save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, seed=1,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Blocks(), callbacks=[Watching()]).train()


def muon_peer(work: SideWork) -> None:
    """Trains a peer with Muon on random windows of the text, as `scripts.bench.muon_peers` describes."""
    recipe = RECIPES[work.side]
    torch.manual_seed(1)
    model, watch = PeerModel(recipe, work.layers, work.hidden, work.heads, work.vocabulary, work.seq_len), Watch(work)
    watch.parameters(model)
    optimizer = PeerOptimizer(model, recipe, work.steps, work.warmup, work.lr)
    stream = np.memmap(Path(work.data) / "train.bin", dtype=np.uint16, mode="r")
    generator, offsets = np.random.default_rng(1), np.arange(work.seq_len + 1)

    def logits(inputs_bs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=work.bf16):
            found: Tensor = model(inputs_bs)
        return found

    watch.go_on()
    for step in range(1, work.steps + 1):
        starts = generator.integers(0, len(stream) - work.seq_len - 1, work.batch)
        windows_bt = torch.from_numpy(stream[starts[:, None] + offsets].astype(np.int64))
        loss = F.cross_entropy(logits(windows_bt[:, :-1]).flatten(0, 1), windows_bt[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.update(step - 1)
        watch.step(step, logits if step % work.validate_every == 0 else None)


PEERS = {"nanogpt": nanogpt, "trainer": trainer, **dict.fromkeys(RECIPES, muon_peer)}


def main() -> None:
    """The command line."""
    found = json.loads(sys.argv[1])
    work = SideWork(**{field.name: found[field.name] for field in fields(SideWork)})
    PEERS[work.side](work)


if __name__ == "__main__":
    main()
