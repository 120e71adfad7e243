"""Tests `megads generate`: prompts, output, errors and terminal sessions."""

from __future__ import annotations

import gzip
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megads.batch import BatchInfo
from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.data.config import DatasetConfig
from megads.data.indexed.sidecar import load_tokenizer
from megads.errors import CheckpointError, ConfigError, DataError, MegadsError
from megads.evaluate.config import GenerateConfig
from megads.evaluate.generation import Completion, Stop
from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.gpt import GPT
from megads.tools import generate
from megads.tools.generate import (
    Task,
    completion_line,
    config_prompts,
    converse,
    dataset_prefixes,
    refuse_to_overwrite,
)
from tests.checkpoint.test_format import read_checkpoint
from tests.command import StartCommand, checkpoint_of, small_model
from tests.small_run import TOKENS, hot_model, model_config, write_dataset, write_run


def test_data_of_a_frozen_config(tmp_path: Path) -> None:
    """Catches a dataset path looked up in the wrong folder: it is relative to where training was started."""
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    config = RootConfig()
    config.data.train = [DatasetConfig(path="data/corpus")]
    freeze(config, run_dir / "config.yaml")
    assert dataset_prefixes(run_dir) == [Path("data/corpus"), tmp_path / "data" / "corpus"]


@pytest.mark.parametrize("content", [None, "", "[]", "data: 3", "data: {train: null}", "data: {train: [x]}", "{"])
def test_a_run_without_a_readable_config(content: str | None, tmp_path: Path) -> None:
    """Catches a traceback for a checkpoint that was moved out of its run."""
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert dataset_prefixes(tmp_path) == []


def prompt_config(**changes: object) -> GenerateConfig:
    return GenerateConfig(run="x", **changes)  # type: ignore[arg-type]


def test_prompts_of_the_command_line() -> None:
    """Catches an empty prompt treated as no prompt, and no prompt treated as an empty one."""
    assert config_prompts(prompt_config(prompt="")) == [Task("")]
    assert config_prompts(prompt_config(prompts=["a", ""])) == [Task("a"), Task("")]
    assert config_prompts(prompt_config()) == []


def test_files_of_prompts(tmp_path: Path) -> None:
    """Catches blank lines treated as prompts, lost fields, and non-ASCII text escaped in the output."""
    lines, records = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("one\n\n  two, {three}\n")
    assert config_prompts(prompt_config(input=str(lines))) == [Task("one"), Task("  two, {three}")]
    records.write_text('{"id": 7, "q": "漢"}\n{"q": ""}\n')
    tasks = config_prompts(prompt_config(input=str(records), prompt_field="q"))
    assert [task.prompt for task in tasks] == ["漢", ""]
    line = completion_line(tasks[0], Completion("漢", "字\n", 3, Stop.length))
    assert "漢" in line and "\n" not in line
    assert json.loads(line) == {"id": 7, "q": "漢", "prompt": "漢", "completion": "字\n", "tokens": 3, "stop": "length"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "there is no such file"),
        ("empty.txt", b"\n \n", "holds no prompts"),
        ("latin.txt", b"na\xefve\n", "cannot be read as UTF-8"),
        ("bad.jsonl", b'{"prompt": "a"}\nplain\n', r"bad.jsonl:2: not JSON.*put plain text in a .txt"),
        ("field.jsonl", b'{"text": "a"}\n', r"field.jsonl:1: has no text in 'prompt', it has text: give prompt_field"),
        ("number.jsonl", b"1\n", "it is not an object"),
    ],
)
def test_bad_files(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    """Catches a traceback, or a line skipped without a message."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        config_prompts(prompt_config(input=str(tmp_path / name)))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """Catches a repeated command that overwrites earlier completions, and an output that overwrites its input."""
    path = tmp_path / "out.jsonl"
    refuse_to_overwrite(prompt_config(output=str(path)))
    path.touch()
    with pytest.raises(ConfigError, match="exists; choose another output or give overwrite=true"):
        refuse_to_overwrite(prompt_config(output=str(path)))
    refuse_to_overwrite(prompt_config(output=str(path), overwrite=True))
    with pytest.raises(ConfigError, match="is the input"):
        refuse_to_overwrite(prompt_config(input=str(path), output=str(path), overwrite=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be at least 1"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"temperature": -1.0}, "temperature = -1.0: must not be negative"),
        ({"temperature": float("nan")}, "must be a finite number"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"prompt": "", "input": "x"}, "prompt and input are both given"),
        ({"output": "x"}, "output = x: give prompt"),
    ],
)
def test_values_out_of_range(change: dict[str, object], message: str) -> None:
    """Catches an invalid value that is refused only after the model is loaded, or never."""
    prompt_config(prompt=None).check()
    with pytest.raises(ConfigError, match=message):
        prompt_config(**change).check()


ENDLESS = ("max_new_tokens=1000000", "end_of_document=none")


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a model of random weights and its dataset; read only."""
    folder = tmp_path_factory.mktemp("run")
    return write_run(folder / "runs" / "mine", write_dataset(folder / "data"), hot_model(model_config()))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(small_run: Path, **changes: object) -> GenerateConfig:
    values = {"run": str(small_run), "max_new_tokens": 12, "device": "cpu", "seed": 1} | changes
    return GenerateConfig(**values)  # type: ignore[arg-type]


@torch.no_grad()
def greedy_text(model: GPT, tokenizer_file: Path, prompt: str, count: int) -> str:
    """The greedy completion by full forward passes, without a KV cache; an end-of-document token does not end it."""
    tokenizer = load_tokenizer(tokenizer_file)
    ids = tokenizer.encode(prompt).ids
    for _ in range(count):
        logits = model(torch.tensor([ids]), BatchInfo(sample_ids=torch.tensor([0])))
        ids.append(int(logits[0, -1, :TOKENS].argmax()))
    return tokenizer.decode(ids, skip_special_tokens=False).rstrip("\ufffd")


@pytest.mark.always
def test_one_prompt(small_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches text that is not the model's, statistics printed to stdout, and a prompt that is not echoed."""
    greedy = config(small_run, prompt="def f(x, y", temperature=0.0, end_of_document="none")
    assert generate.generate(greedy) == 0
    shown = capsys.readouterr()
    carried = small_run.parent.parent / "data" / "corpus.tokenizer.json"
    assert shown.out == greedy_text(hot_model(model_config()), carried, "def f(x, y", 12) + "\n"
    assert "step_00000003: " in shown.err and "float32 on cpu" in shown.err and f"tokenizer {carried}" in shown.err
    assert "12 tokens after" in shown.err and "tokens/s, first token after" in shown.err
    greedy.echo = False
    generate.generate(greedy)
    assert capsys.readouterr().out == shown.out.removeprefix("def f(x, y")


def test_a_model_with_every_feature(small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches model config keys that the checkpoint lacks, and generation that ignores the attention window."""
    shape = model_config(
        Position.rope, num_kv_heads=2, window=5, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, parallel_block=True
    )
    prefix = small_run.parent.parent / "data" / "corpus"
    features = write_run(tmp_path / "features", prefix, hot_model(shape))
    assert generate.generate(config(features, prompt="def f(x, y", temperature=0.0, end_of_document="none")) == 0
    carried = prefix.with_name("corpus.tokenizer.json")
    assert capsys.readouterr().out == greedy_text(hot_model(shape), carried, "def f(x, y", 12) + "\n"


def test_batches_and_their_file(small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an output file that differs from the printed completions, or depends on the batch size."""
    prompts = ["def", "漢字", "", "return softmax(query"]
    generate.generate(config(small_run, prompts=prompts))
    printed = capsys.readouterr().out
    source, output = tmp_path / "prompts.jsonl", tmp_path / "new" / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt, "id": i}) + "\n" for i, prompt in enumerate(prompts)))
    for batch_size in (1, 3):
        generate.generate(
            config(small_run, input=str(source), output=str(output), batch_size=batch_size, overwrite=True)
        )
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert [line["id"] for line in lines] == [0, 1, 2, 3]
        texts = [f"=== {i + 1} of 4\n{line['prompt']}{line['completion']}\n" for i, line in enumerate(lines)]
        assert "".join(texts) == printed
        assert f"{output}: 4 completions" in capsys.readouterr().out


def test_piped_prompts(small_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches lines not joined at a backslash, blank lines treated as prompts, and no error without a prompt."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f(\\\n    x\n\nabc"))
    assert generate.generate(config(small_run)) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("def f(\n    x") and shown.err.count("tokens/s") == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    with pytest.raises(ConfigError, match="there is no prompt: give prompt="):
        generate.generate(config(small_run))


def test_a_run_goes_by_its_name(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that is found only by its path, and an error that does not list the existing runs."""
    monkeypatch.chdir(small_run.parent.parent)
    for name in ("mine", "runs/mine", "runs/mine/checkpoints/step_00000003"):
        assert generate.generate(config(Path(name), prompt="x")) == 0
    with pytest.raises(CheckpointError, match=r"run = min: there is no such folder; runs/ has mine"):
        generate.generate(config(Path("min"), prompt="x"))


def without_checkpoint(folder: Path) -> dict[str, object]:
    (folder / "empty").mkdir()
    return {"run": str(folder / "empty")}


def damaged(folder: Path) -> dict[str, object]:
    run_dir = write_run(folder / "damaged", folder / "none", hot_model(model_config()))
    file = checkpoint_of(run_dir, 3) / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    return {"run": str(run_dir)}


def without_dataset(folder: Path) -> dict[str, object]:
    return {"run": str(write_run(folder / "moved", folder / "gone", hot_model(model_config())))}


def other_tokenizer(folder: Path) -> dict[str, object]:
    return {"tokenizer": f"{write_dataset(folder, TOKENS - 20)}.tokenizer.json"}


def learned_positions(folder: Path) -> dict[str, object]:
    model = hot_model(model_config(Position.learned))
    return {"run": str(write_run(folder / "learned", write_dataset(folder), model)), "prompt": "漢" * 30}


MISTAKES: list[tuple[Callable[[Path], dict[str, object]], type[MegadsError], int, str]] = [
    (lambda _: {"run": "runs/nope"}, CheckpointError, 4, "run = runs/nope: there is no such folder"),
    (without_checkpoint, CheckpointError, 4, "empty holds no checkpoint"),
    (damaged, CheckpointError, 4, "no checkpoint in .*damaged is usable: .* fails its checksum"),
    (without_dataset, DataError, 3, r"no tokenizer found \(looked for .*gone.tokenizer.json.*give tokenizer="),
    (other_tokenizer, DataError, 3, "is not the tokenizer with which"),
    (lambda _: {"tokenizer": "none.json"}, DataError, 3, "none.json: no such tokenizer file"),
    (lambda _: {"input": "none.txt", "prompt": None}, DataError, 3, "none.txt: there is no such file"),
    (learned_positions, ConfigError, 2, "prompt 1: a prompt of .* the model has learned 32"),
    (lambda _: {"device": "tpu"}, ConfigError, 2, "device = tpu"),
    (lambda _: {"top_p": 2.0}, ConfigError, 2, "top_p = 2.0"),
    (lambda folder: {"output": f"{folder}"}, ConfigError, 2, "exists; choose another"),
    (lambda folder: {"output": "/proc/none/x.jsonl"}, ConfigError, 2, "cannot be written"),
]


@pytest.mark.parametrize(("mistake", "kind", "exit_code", "message"), MISTAKES)
def test_mistakes(
    mistake: Callable[[Path], dict[str, object]],
    kind: type[MegadsError],
    exit_code: int,
    message: str,
    small_run: Path,
    tmp_path: Path,
) -> None:
    """Catches a wrong exit code, a traceback, or text decoded with another tokenizer."""
    with pytest.raises(kind, match=message) as caught:
        generate.generate(config(small_run, **({"prompt": "x"} | mistake(tmp_path))))
    assert caught.value.exit_code == exit_code


def test_a_terminal_session(small_run: Path, tmp_path: Path) -> None:
    """Catches a prompt echoed twice, a Ctrl-C that ends the session, no saved history, and a Ctrl-D without effect."""
    terminal, process_side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "megads.cli.main", "generate", f"run={small_run}", "device=cpu", *ENDLESS],
        stdin=process_side,
        stdout=process_side,
        stderr=process_side,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "XDG_CACHE_HOME": str(tmp_path)},
    )
    os.close(process_side)
    try:
        assert "Ctrl-D exits" in read_until(terminal, r"> ")
        os.write(terminal, b"def f(\n")
        shown = read_until(terminal, r"def f\(\r\n.+")
        process.send_signal(signal.SIGINT)
        shown += read_until(terminal, r"first token after.*stopped.*> ")
        assert shown.count("def f(") == 1
        os.write(terminal, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(terminal)
    assert "def f(" in (tmp_path / "megads" / "generate_history").read_text()


def read_until(terminal: int, pattern: str, timeout_s: float = 120.0) -> str:
    os.set_blocking(terminal, False)
    shown, deadline = "", time.monotonic() + timeout_s
    while not re.search(pattern, shown, re.DOTALL):
        assert time.monotonic() < deadline, shown
        try:
            shown += os.read(terminal, 65536).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.02)
    return shown


def test_a_prompt_that_does_not_fit_ends_no_session(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a session that ends on a prompt that is too long, so that the model must be loaded again."""
    from megads.tools.generate import text_generator

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    changes = learned_positions(tmp_path)
    generator = text_generator(config(small_run, run=changes["run"]))
    monkeypatch.setattr(generate, "_typed", lambda: iter([str(changes["prompt"]), "ok"]))
    assert converse(generator, Terminal(), echo=True) == 0
    err = capsys.readouterr().err
    assert "has learned 32" in err and err.count("tokens/s") == 1


def assembled(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The full weights, assembled from the files without megads' reader."""
    found = read_checkpoint().tensors(checkpoint)
    return {key.removeprefix("weight/"): tensor for key, tensor in found if key.startswith("weight/")}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_model_trained_in_another_layout(megads: StartCommand) -> None:
    """Catches weights assembled wrongly from four ranks, and a command line that cuts a prompt at a comma."""
    prefix = write_dataset(megads.folder / "data")
    trained = megads(
        "train",
        *small_model(prefix, model__vocab_size=TOKENS, parallel__tp=2, parallel__pp=2, train__steps=3, optim__lr=0.05),
        "run.dir=run",
        "schedule.warmup_samples=0",
        "evaluation.at_end=false",
    ).end()
    assert trained.code == 0, trained.err
    prompt = "def attention(query, key): return ${x} 'and \"so"
    generate = ("generate", "run=run", "max_new_tokens=20", "device=cpu", "temperature=0", "end_of_document=none")
    done = megads(*generate, f"prompt={prompt}").end()
    assert done.code == 0, done.err
    shape = ModelConfig(num_layers=2, hidden_size=48, num_heads=6, vocab_size=TOKENS)
    weights = assembled(checkpoint_of(megads.folder / "run", 3))
    model = GPT(shape, 0, lambda name, _: weights[name]).eval()
    assert done.out == greedy_text(model, Path(f"{prefix}.tokenizer.json"), prompt, 20) + "\n"


def test_prompts_are_read_as_preprocess_reads_text(tmp_path: Path) -> None:
    """Catches characters that end a line for one command only, byte order marks in prompts, and files in other
    encodings or of other kinds that only `megads preprocess` reads."""
    odd = ["a small\u2028boat", "the river\x0cand\x85a boat", "\x1c漢"]
    (tmp_path / "a.jsonl").write_text(
        "\ufeff" + "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in odd)
    )
    (tmp_path / "a.txt").write_text("\ufeff" + "\r\n".join(odd), newline="")
    (tmp_path / "b.txt").write_bytes("\n".join(odd).encode("utf-16"))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n".join(odd).encode()))
    (tmp_path / "a.csv").write_text("\ufeffid,prompt\n" + "".join(f'1,"{text}"\n' for text in odd))
    for path in sorted(tmp_path.iterdir()):
        found = [task.prompt for task in config_prompts(prompt_config(input=str(path)))]
        assert found == odd, path.name
