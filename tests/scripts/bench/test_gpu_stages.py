"""scripts/bench/gpu.sh: budget, order and verdicts."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.checkpoint.store import save_parts
from megads.cli.main import run
from megads.engine.interface import Shard
from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.gpt import GPT, initial_value
from megads.model.model_size import parameter_count
from megads.model.moe import Experts
from megads.model.moe_config import MoEConfig
from megads.model.rotary import rotary_tables
from megads.ops.config import TORCH
from megads.ops.rotary import rotate
from megads.runtime.metrics import MetricsWriter, read_json_lines
from scripts.bench import gpu_judges
from scripts.bench.gpu_checks import verdict
from scripts.bench.gpu_judges import NotJudged, Place, bit_equal, ranks_of, within_n3, within_n4
from scripts.bench.gpu_kernels import findings
from scripts.bench.gpu_runs import CASES
from scripts.bench.gpu_stages import (
    ALWAYS,
    BUILD,
    NCCL,
    RESERVE_S,
    STAGES,
    Clock,
    Item,
    Runner,
    chosen,
    first_error,
    items,
    plan,
    rounds,
)
from scripts.bench.gpu_train import SIZES, fit_of
from scripts.bench.host_waits import SYNCHRONIZING, HostWaits, HostWaitsOptions
from scripts.bench.plain_gpt import PlainGPT, plain_weights
from scripts.bench.torchtitan_side import torchtitan_weights
from tests.checkpoint.random_layouts import run_record
from tests.command import COMPUTED
from tests.model.test_gpt import hot_value


def runner_for(folder: Path, seconds: float) -> Runner:
    """Returns a runner with the given budget."""
    arguments = argparse.Namespace(work=folder, append=folder / "bench.jsonl", run="now", device="cuda")
    return Runner(arguments, Clock(RESERVE_S + seconds, 0.0))


def short(name: str, code: str, expected_s: float = 0.1, **fields: Any) -> Item:
    """Returns an item that runs a line of Python."""
    return Item("kernels", name, ("-c", code), expected_s, appends=False, **fields)


@pytest.mark.slow
def test_a_budget_is_kept_and_nothing_is_left_running(tmp_path: Path) -> None:
    """Catches a script that exceeds its budget, an item that outlives it, one that starts without enough time left or
    without the kernels or GPUs that it needs, a failure without its cause in the results, and a hang without stacks."""
    runner = runner_for(tmp_path, 3.0)
    child = "import subprocess as s, sys; s.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
    before = set(psutil.Process().children(recursive=True))
    begin = time.monotonic()
    runner.run([short("fails", "import sys; print('x'); int('no number')")])
    runner.run([short("two GPUs", "", devices=2)])
    runner.run([short("needs kernels", "", kernels=True)])
    runner.run([short("long", child, most_s=99.0)])
    runner.run([short("late", "", expected_s=1.0)])
    assert time.monotonic() - begin < RESERVE_S + 3.0
    assert set(psutil.Process().children(recursive=True)) <= before
    assert runner.failed
    lines = list(read_json_lines(runner.arguments.append))
    assert [(line["name"], line["outcome"]) for line in lines] == [
        ("fails", "failed"), ("two GPUs", "not run"), ("needs kernels", "not run"), ("long", "ended for lack of time"),
        ("late", "not run"),
    ]  # fmt: skip
    assert lines[0]["reason"] == "exit code 1: ValueError: invalid literal for int() with base 10: 'no number'"
    assert "subprocess.py" in (runner.logs / "kernels_long.txt").read_text()


def test_items_that_time_nothing_run_beside_each_other(tmp_path: Path) -> None:
    """Catches timed items that run in parallel, and checks that run one after another."""
    runner = runner_for(tmp_path, 30.0)
    meet = "import pathlib as p, time\np.Path({mine!r}).touch()\nwhile not p.Path({other!r}).exists(): time.sleep(0.01)"
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    pair = [short(name, meet.format(mine=mine, other=other), alone=False)
            for name, mine, other in (("a", first, second), ("b", second, first))]  # fmt: skip
    runner.run(pair)
    assert {line["outcome"] for line in read_json_lines(runner.arguments.append)} == {"done"}
    timed = short("timed", "")
    assert rounds([timed, *pair, timed, timed]) == [[timed], pair, [timed], [timed]]


def test_a_failure_in_cuda_is_run_again_with_blocking_launches(tmp_path: Path) -> None:
    """Catches a log that names the call that synchronized with the device, not the kernel launch that failed."""
    runner = runner_for(tmp_path, 60.0)
    code = "import os\nprint(os.environ.get('CUDA_LAUNCH_BLOCKING'))\nraise RuntimeError('CUDA error: no access')"
    runner.run([short("broken", code)])
    logs = [(runner.logs / f"kernels_{name}.txt").read_text().splitlines()[0] for name in ("broken", "broken_blocking")]
    assert logs == ["None", "1"]
    (line,) = read_json_lines(runner.arguments.append)
    assert line["reason"] == "exit code 1: RuntimeError: CUDA error: no access"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("kernels/a.cu(3): error: no x\n1 error detected\nRuntimeError: failed", "kernels/a.cu(3): error: no x"),
        ("  raise ValueError('x')\nValueError: x\nDuring ...\nKeyError: 'y'", "ValueError: x"),
        ("Fatal Python error: Segmentation fault\n  File a", "Fatal Python error: Segmentation fault"),
        ("FAILED tests/a.py::b - assert 1 == 2\n1 failed", "FAILED tests/a.py::b - assert 1 == 2"),
        ("nothing known\nlast", "last"),
    ],
)
def test_the_first_error_is_the_cause(text: str, found: str) -> None:
    """Catches a consequence of a failure, or a line of source code, that is reported as the cause."""
    assert first_error(text) == found


def test_stages_select_their_items() -> None:
    """Catches a stage without items or without the item that builds its kernels, a check that omits a stage, and a plan
    whose most valuable items exceed the budget."""
    for check in (True, False):
        found = items(check, Path("work"), ["train.steps=6"])
        for stage in STAGES:
            assert {item.stage for item in chosen(found, [stage])} == {ALWAYS, stage}
        every = [item.arguments for item in chosen(found, list(STAGES))]
        assert len(set(every)) == len(every)
        assert all("train.steps=6" in item.arguments for item in chosen(found, ["layouts"]) if item.stage != ALWAYS)
        assert len({(item.stage, item.name) for item in found}) == len(found)
    rows = {line.split("  ")[-1]: line for line in plan(rounds(found), Clock(540.0, 10.0)).splitlines()}
    assert float(rows["plan: calibration and steps"].split()[0]) < 540 - RESERVE_S


def test_several_ranks_on_one_gpu_fit_their_budget() -> None:
    """Catches cases that begin after the kernels, which few need, the least valuable ones first, unlike cases that run
    beside each other, a case that is stopped before the time that it takes, and a stage of seven minutes that runs with
    all others."""
    found = chosen(items(False, Path("work"), []), [NCCL])
    assert [item.name for item in found[:3]] == ["device", "tp2", "dp2"]
    names = [item.name for item in found]
    assert names.index(BUILD) == names.index("CUDA graphs, dropout, documents, recompute") - 1
    assert [len(together) for together in rounds(found)[:5]] == [1, 2, 2, 1, 1]
    assert all(item.most_s >= 1.4 * item.expected_s for item in found)
    expected = [(item.name, begin) for begin, item in begins(rounds(found))]
    assert dict(expected)["dp2, SIGKILL and SIGSTOP of a rank"] + 160 < 420 - RESERVE_S
    assert NCCL not in STAGES


class Begun:
    """In place of a command of a case that is only composed."""

    def wait_for(self, *_arguments: object) -> None:
        raise NotJudged


@pytest.mark.quick("350M tp2 pp2 in fp32")
@pytest.mark.parametrize("name", [
    "zb_v, cold", "interleaved pp2 v2 m4, 1 connection", "dp2, SIGKILL and SIGSTOP of a rank", "350M tp2 pp2 in fp32",
    "350M tp2 pp2 in bf16", "350M tp2 pp2, killed; host waits", *(case.name for case in CASES if case.devices > 2),
    "parallel.pp=2 parallel.schedule=zb_v",
])  # fmt: skip
def test_runs_for_the_gpu_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a config that only a machine with a GPU would refuse."""
    begun: list[tuple[str, ...]] = []

    def begin(_megads: object, *words: str, **_more: object) -> Begun:
        begun.append(words)
        return Begun()

    def finish(*_arguments: object) -> None:
        raise NotJudged

    monkeypatch.setattr(gpu_judges, "begin", begin)
    monkeypatch.setattr(gpu_judges, "finish", finish)
    (case,) = [case for case in CASES if case.name == name]
    with pytest.raises(NotJudged):
        case.judge(Place(True, tmp_path, tmp_path))
    assert len(begun) == {"350M tp2 pp2 in bf16": 6, "interleaved pp2 v2 m4, 1 connection": 1}.get(
        name, 1 if case.stage == "layouts" else 2
    )
    for words in begun:
        # This kind is for GPUs, and the machine may be too small.
        asked = [word for word in words if word != gpu_judges.FLEX]
        assert run([*asked, "run.dry_run=true", "run.check_memory=false"]) == 0


def begins(together: list[list[Item]]) -> Iterator[tuple[float, Item]]:
    """Expected start of each item."""
    begin = 0.0
    for of_round in together:
        yield from ((begin, item) for item in of_round)
        begin += max(item.expected_s for item in of_round)


STEP = {"loss": 4.0, "grad_norm": 1.0, "batch_hash": "a"}


def test_wrong_layouts_are_judged_wrong() -> None:
    """Catches a verdict that is always good: other samples, one step beyond N3, a loss that no split explains."""
    one = [STEP, STEP]
    assert within_n3(one, [STEP, STEP | {"loss": 4.0 + 3e-5}])[1]
    assert not within_n3(one, [STEP | {"loss": 4.0 + 3e-5}, STEP])[1]
    assert not within_n3(one, [STEP, STEP | {"grad_norm": 1.001}])[1]
    assert not within_n3(one, [STEP, STEP | {"batch_hash": "b"}])[1]
    splits = [[4.0, 3.0], [4.1, 3.0]]
    assert within_n4(splits, [4.3, 3.2])[1] and not within_n4(splits, [4.3, 3.4])[1]
    assert not within_n4([[4.0], [4.0]], [4.001])[1] and within_n4([[4.0], [4.0]], [4.0007])[1]
    assert [ranks_of(words) for words in ("", "parallel.tp=2 parallel.dp=3", "parallel.tp_chunks=2")] == [1, 6, 1]


def test_host_waits_are_counted_per_step(tmp_path: Path) -> None:
    """Catches warnings that are counted once for all steps, other warnings among them, and none written."""
    context: Any = SimpleNamespace(run_dir=tmp_path, rank=3)
    hook = HostWaits(HostWaitsOptions(after=1, steps=2), context)
    with warnings.catch_warnings(record=True) as others:
        for step in range(1, 5):
            hook.on_step(SimpleNamespace(step=step))  # type: ignore[arg-type]
            for _ in range(3):
                warnings.warn(SYNCHRONIZING, stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    assert list(json.loads((tmp_path / "host_waits_3.json").read_text()).values()) == [3.0]
    assert any("something else" in str(found.message) for found in others)


@pytest.mark.parametrize(
    ("size", "gib", "recompute"),
    [("1.3b", 138, "none"), ("1.3b", 26, "full"), ("8b", 138, "full"), ("bloom_1b1", 138, "none"),
     ("llama_1b", 138, "none"), ("llama_1b", 78, "none"), ("qwen3_moe", 138, "none"), ("qwen3_moe", 78, "none"),
     ("qwen3_dense", 78, "none")],
)  # fmt: skip
def test_a_micro_batch_size_fits_the_gpus_memory(size: str, gib: int, recompute: str) -> None:
    """Catches a model size that is not trained at all, a plan that leaves memory unused or exceeds it, and
    recomputation where a smaller micro-batch suffices. 138 GiB: what an H200 has free."""
    work = SIZES[size].work("cuda")
    fit = fit_of(work, "fused", gib * 2**30, fixed=SIZES[size].micro_batch is not None)
    assert fit.recompute == recompute and work.batch % fit.micro_batch == 0
    assert fit.planned_bytes < gib * 2**30
    if size == "8b":
        assert fit.micro_batch == 1
        assert fit_of(work, "fused", 120 * 2**30, fixed=True).planned_bytes > 120 * 2**30


def test_gpu_tests_that_were_cut_short_still_count() -> None:
    """Catches failures that are not reported, and an unfinished test file that looks as if it had passed."""
    outcomes = {"tests/a.py::one": "PASSED", "tests/a.py::two": "FAILED", "tests/b.py::three": "PASSED"}
    assert verdict(outcomes, ["b"]) == "1 failed, 2 passed; failed: tests/a.py::two; not finished: b"
    assert verdict({}, []) == "no test ended"


def test_torchtitan_gets_our_weights() -> None:
    """Catches a comparison with another model: permuted heads, and RoPE features rotated in wrong pairs."""
    model = ModelConfig(
        num_layers=1, hidden_size=24, num_heads=6, num_kv_heads=2, ffn_size=40, vocab_size=11, position=Position.rope,
        norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, bias=False, embedding_norm=False, tie_embeddings=False,
    )  # fmt: skip
    value = initial_value(model, seed=3)
    theirs = torchtitan_weights(model, value)
    assert sum(weight.numel() for weight in theirs.values()) == parameter_count(model)
    hidden_sh = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    qkv = (hidden_sh @ value("blocks.0.attention.qkv.weight", (40, 24)).T).view(1, 5, 2, 5, 4)
    cos, sin = rotary_tables(torch.arange(5), 4, model.rope_theta, torch.float32)
    q, k = (rotate(x.flatten(2, 3), cos, sin, TORCH)[0] for x in (qkv[:, :, :, :3], qkv[:, :, :, 3:4]))
    turns = torch.complex(cos, sin)

    def turned(name: str) -> Tensor:
        pairs = (hidden_sh @ theirs[f"layers.0.attention.{name}.weight"].T).view(5, -1, 2, 2)
        return torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(2)

    ours = torch.einsum("snd,tnd->nst", q, k.repeat_interleave(3, 1))
    peers = torch.einsum("snd,tnd->nst", turned("wq"), turned("wk").repeat_interleave(3, 1))
    torch.testing.assert_close(peers, ours)


def test_the_plain_gpt_is_the_same_model() -> None:
    """Catches a comparison with another model: permuted heads, another GELU or norm, other labels, an untied head."""
    shape = replace(SIZES["124m"].model, num_layers=2, hidden_size=48, num_heads=6, vocab_size=512, max_seq_len=32)
    tokens_bs = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))
    labels_bs = tokens_bs.roll(-1, 1).index_fill(1, torch.tensor([31]), -100)
    ours, theirs = GPT(shape, 0, hot_value).double(), PlainGPT(shape).double()
    theirs.load_state_dict(plain_weights(shape, hot_value))
    logits_bsv = ours(tokens_bs, BatchInfo(torch.arange(2), seq_len=32))
    loss = torch.nn.functional.cross_entropy(logits_bsv[:, :-1].flatten(0, 1), tokens_bs[:, 1:].flatten())
    torch.testing.assert_close(theirs(tokens_bs, labels_bs).double() / 62, loss, rtol=1e-6, atol=0.0)


def test_torchtitan_gets_our_experts() -> None:
    """Catches gates taken for ups, experts mixed up, a second projection that is not transposed, and the pairs of
    torchtitan's Llama, which its Qwen3 does not have."""
    model = ModelConfig(
        num_layers=1, hidden_size=24, num_heads=6, num_kv_heads=2, vocab_size=11, position=Position.rope, qk_norm=True,
        norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, bias=False, embedding_norm=False, tie_embeddings=False,
        moe=MoEConfig(num_experts=3, expert_ffn_size=10),
    )  # fmt: skip
    value = initial_value(model, seed=3)
    theirs = torchtitan_weights(model, value)
    assert sum(weight.numel() for weight in theirs.values()) == parameter_count(model)
    qkv = value("blocks.0.attention.qkv.weight", (40, 24)).view(2, 5, 4, 24)
    assert torch.equal(theirs["layers.0.attention.wq.weight"], qkv[:, :3].reshape(24, 24))
    experts = Experts(model)
    for name, weight in experts.named_parameters():
        weight.data = value(f"blocks.0.mlp.experts.{name}", tuple(weight.shape))
    hidden_bsh = torch.randn(1, 3, 24, generator=torch.Generator().manual_seed(0))
    ours_bsh = experts(hidden_bsh, torch.ones(1, 3, 1), torch.tensor([[[2], [0], [1]]]))
    w1, w2, w3 = (theirs[f"layers.0.moe.experts.w{number}"] for number in (1, 2, 3))
    for x, expert, ours in zip(hidden_bsh[0], (2, 0, 1), ours_bsh[0], strict=True):
        peers = w2[expert] @ (torch.nn.functional.silu(w1[expert] @ x) * (w3[expert] @ x))
        torch.testing.assert_close(peers, ours)


def test_findings_of_compute_sanitizer_are_parsed() -> None:
    """Catches findings that are not parsed."""
    said = "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n=========     at gelu\n"
    said += "========= ERROR SUMMARY: 1 error"
    assert findings(said) == "ERROR SUMMARY: 1 error; first: Invalid __global__ read of size 4 bytes"


def run_of(folder: Path, losses: list[float], weight: float = 1.0) -> Path:
    """Writes a run's metrics and last checkpoint."""
    metrics = MetricsWriter(folder, enabled=True)
    for step, loss in enumerate(losses, start=1):
        metrics.write(dict.fromkeys(COMPUTED, 0) | {"step": step, "loss": loss})
    save_parts(folder, [[Shard("weight/a", (1,), (0,), torch.tensor([weight]))]], run_record(len(losses)))
    return folder


def test_an_inexact_resume_is_judged_wrong(tmp_path: Path) -> None:
    """Catches a run that counts as equal although it has other losses, other tensors or fewer steps."""
    reference = run_of(tmp_path / "reference", [4.0, 3.0, 2.0, 1.0])
    assert bit_equal(reference, run_of(tmp_path / "same", [4.0, 3.0, 2.0, 1.0])) == "4 steps and all tensors bit-equal"
    for name, losses, weight, said in (
        ("other", [4.0, 3.0, 2.0, 1.5], 1.0, "from step 4"),
        ("tensors", [4.0, 3.0, 2.0, 1.0], 2.0, "other tensors in the last checkpoint"),
        ("short", [4.0, 3.0, 2.0], 1.0, "3 and 4 steps"),
    ):
        with pytest.raises(NotJudged, match=said):
            bit_equal(reference, run_of(tmp_path / name, losses, weight))
