"""Command lines that a newcomer types: right settings in a wrong form, with a fixed seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SETTINGS = {
    "train": ["train.steps=100", "optim.lr=1e-3", "data.raw=notes", "model.hidden_size=64", "run.name=mine"],
    "plan": ["model.num_layers=4", "train.seq_len=128", "parallel.tp=2", "ranks=8"],
    "verify_layout": ["verify.steps=5", "parallel.pp=2", "train.micro_batch_size=1"],
    "tokenizer": ["input=notes", "vocab_size=300", "output=t.json", "text_field=body"],
    "preprocess": ["input=notes", "tokenizer=t.json", "output=d", "workers=1"],
    "dataset": ["action=stats", "input=d", "count=3", "output=e"],
    "generate": ["run=runs/a", "prompt=hello", "max_new_tokens=3", "temperature=0.5", "input=p.txt"],
    "evaluate": ["run=runs/a", "batch_size=2", "limit=3", "data=notes"],
    "export": ["run=runs/a", "output=e", "shard_mib=100"],
    "import": ["input=hf", "output=e", "vocab_size=300"],
    "checkpoint": ["action=list", "run=runs/a", "last=3", "output=e"],
    "report": ["run=runs/a", "output=r.html"],
    "why": ["run=runs/a", "step=3", "count=1"],
    "watch": ["run=runs", "port=8000"],
    "chaos": ["faults=2", "minutes=1", "seed=3"],
    "doctor": ["timeout_s=3", "runs_dir=runs"],
    "diagnose": ["run=runs/a"],
    "check_nodes": ["timeout_s=3", "folder=x"],
    "calibrate": ["seconds=1", "threads=1", "out=dev.yaml"],
}
"""Settings of each command that are right but for the files that they name."""

_WORDS = ["runs/notes", "notes.txt", "notes/*.txt", "config.yaml", "100", "tiny", "gpt2", "first", "a b", "now", ".",
          "./data", "s3://bucket/x", "model.yaml", "run", "steps", "lst", "@config", "it's", "ä", "-1"]  # fmt: skip
_FLAGS = [["--steps", "100"], ["--lr", "1e-3"], ["-c", "config.yaml"], ["--config", "config.yaml"], ["--lr=1e-3"],
          ["--config=config.yaml"], ["--batch-size", "8"], ["--model", "gpt2"], ["--data", "notes"], ["-n", "4"],
          ["--output-dir", "out"], ["--nproc-per-node", "2"], ["--num_train_epochs=3"], ["--bf16"], ["-v"],
          ["--fp16", "true"], ["--tensor-model-parallel-size", "2"], ["--input", "a.txt"], ["-o", "x"], ["--resume"],
          ["--vocab-size=1000"], ["--prompt", "hello you"], ["--run", "x"], ["--seed", "1"], ["--hlep"], ["-f"],
          ["--overwrite"], ["--verbose"], ["--dry-run"], ["--gpus", "1"], ["-p", "hello"], ["--cfg"], ["--cfg", "x"],
          ["--config-name", "config"], ["--config-path", "runs/a"], ["--config-name=config"], ["-cn", "a.yaml"],
          ["--multi-run"], ["--info", "config.yaml"], ["--"], ["-"], ["--config-dir"]]  # fmt: skip
_FOREIGN = ["batch_size=8", "lr=1e-3", "learning_rate=1e-3", "n_layer=4", "epochs=1", "max_iters=10", "block_size=64",
            "out_dir=x", "dataset=shakespeare", "device=gpu", "dtype=bf16", "model_name=gpt2", "config=a.yaml",
            "tensor_model_parallel_size=2", "+foo.bar=1", "++x=1", "~y", "seed=abc", "model=gpt2", "num_gpus=2",
            "experiment=mine", "train=10", "optim=adam", "run.naem=x", "cluster=8", "data=notes"]  # fmt: skip
_ENDINGS = ["=year=2019", "#1", "'s", " d'é", "日本", "(1)", "&b", ";c", "<x>", "!", "`x`", '"q', "[a", "a]", "{b",
            "}", "^2", "$x", "\\", ",b", " b", ":c", "?d=1", "|e", "~", "%20", "*", "\t", "\n", "(a", "[a b]",
            "'a'b"]  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """A command line.

    Attributes:
        arguments: the command and its arguments.
        form: what is wrong with it.
        wrong: the arguments that are wrong.
        refused: whether it cannot be meant as it is.
    """

    arguments: list[str]
    form: str
    wrong: str
    refused: bool


def _separators(key: str, value: str, draw: random.Random) -> list[str]:
    forms = [
        [f"{key}:{value}"], [f"{key}:", value], [key, "=", value], [f"{key}=", value], [key, f"={value}"], [key, value],
        [f"--{key}", value], [f"--{key}={value}"], [f"-{key}", value], [f"{key} = {value}"], [f"{key}:={value}"],
        [f"{key}->{value}"], [f"{key} {value}"], [f"{key},{value}"], [f"{key}/{value}"],
    ]  # fmt: skip
    return draw.choice(forms)


def _quotes(key: str, value: str, draw: random.Random) -> list[str]:
    forms = [f"'{key}'={value}", f'"{key}={value}"', f"{key}='{value}", f'{key}={value}"', f"{key}=[{value}",
             f"{key}=({value})", f"{key}={{{value}}}", f"{key}=[{value}]", f"{key}=", f"={value}", f"{key}=={value}",
             f"{key}=`{value}`", f"{key}=“{value}”", f"{key}={value} other=1", f"{key}[0]={value}",
             f"{key}={value},", f"{key}={value};"]  # fmt: skip
    return [draw.choice(forms)]


def attempts(count: int, seed: int = 0) -> Iterator[Attempt]:
    """Yields wrong command lines of all commands in turn.

    Args:
        count: number of command lines.
        seed: seed of the generator.
    """
    draw = random.Random(seed)
    for number in range(count):
        verb = list(SETTINGS)[number % len(SETTINGS)]
        settings = SETTINGS[verb]
        key, _, value = draw.choice(settings).partition("=")
        rest = [text for text in settings if not text.startswith(f"{key}=")]
        forms: dict[str, Callable[[], list[str]]] = {
            "separator": lambda key=key, value=value: _separators(key, value, draw),  # type: ignore[misc]
            "quotes": lambda key=key, value=value: _quotes(key, value, draw),  # type: ignore[misc]
            "word": lambda: [draw.choice(_WORDS)],
            "flag": lambda: list(draw.choice(_FLAGS)),
            "foreign key": lambda: [draw.choice(_FOREIGN)],
            "ending": lambda key=key, value=value: [f"{key}={value}{draw.choice(_ENDINGS)}"],  # type: ignore[misc]
        }
        form = list(forms)[number // len(SETTINGS) % len(forms)]
        wrong = forms[form]()
        tail = {"train": ["run.dry_run=true"], "chaos": ["dry_run=true"]}.get(verb, [])
        yield Attempt([verb, *rest, *wrong, *tail], form, " ".join(wrong), form in ("word", "flag"))
