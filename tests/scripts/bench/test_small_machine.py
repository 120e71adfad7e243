"""Tests the benchmark on a small machine: its use of times and losses, its peers with Muon, and the command itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.config.train import BatchRampConfig
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.runtime.run_dir import CONFIG_FILE
from scripts.bench import small_machine
from scripts.bench.muon_peers import RECIPES, PeerModel, PeerOptimizer, orthogonalize
from scripts.bench.small_machine import (
    NANOCHAT,
    NANOGPT,
    OURS,
    POINTS,
    Bench,
    Curve,
    Peer,
    Point,
    points_of_ranks,
    shown,
    steps_within,
    table,
    verdicts,
)

ROOT = Path(__file__).parents[3]
BENCH = Bench(Path("/nowhere"), seconds=90.0, by="clock", cores=2, nanogpt=None)


def curve(side: str, lr: float | None, *losses: float, step_s: float = 1.0) -> Curve:
    """A curve with a validation every 15 steps."""
    points = [Point(15 * k, 15 * k * step_s, 30 * k * step_s, loss) for k, loss in enumerate(losses, 1)]
    return Curve(side, lr, 8, 2048 * points[-1].step, 100, tuple(points))


def test_validation_is_not_training() -> None:
    """Catches a time that includes validation, and one rank's CPU time used as that of all ranks."""
    steps = [
        {"step": 1, "step_time_s": 0.9, "clock_s": 1.0, "processor_s": 0.5},
        {"step": 2, "step_time_s": 0.9, "clock_s": 9.0, "processor_s": 7.0},
        {"step": 3, "step_time_s": 0.9, "clock_s": 1.0, "processor_s": 0.5},
        {"step": 4, "step_time_s": 0.8, "clock_s": 9.0, "processor_s": 7.0},
        {"step": 5, "step_time_s": 0.8, "clock_s": 1.0, "processor_s": 0.5},
    ]
    first, second = points_of_ranks([steps, steps], {2: 5.0, 4: 4.0})
    assert (first.step, first.loss) == (2, 5.0) and (second.step, second.loss) == (4, 4.0)
    assert first.clock_s == pytest.approx(1.9) and second.clock_s == pytest.approx(3.7)
    assert first.processor_s == pytest.approx(2.0) and second.processor_s == pytest.approx(4.0)


def test_steps_that_fit() -> None:
    """Catches a number of steps based on the slow first steps, or not divisible by that of validations."""
    trial = Curve(OURS["demo"], None, 8, 24_576, 100, (Point(6, 12.0, 24.0, 9.0), Point(12, 14.0, 28.0, 8.0)))
    assert steps_within([trial], BatchSizeSchedule(8), 90.0, "clock") == 270
    assert steps_within([trial], BatchSizeSchedule(8), 180.0, "processor") == 270
    assert steps_within([trial], BatchSizeSchedule(8), 0.01, "clock") == POINTS


def test_steps_of_a_ramp_that_fit() -> None:
    """Catches a ramp whose steps all count as its first ones, or all as its final ones."""
    first, last = (
        Curve(OURS["demo"], None, size, 0, 100, (Point(12, 5.0, 9.0, 9.0), Point(24, 5.0 + 12 * step_s, 9.0, 8.0)))
        for size, step_s in ((4, 0.25), (8, 0.5))
    )
    ramp = BatchSizeSchedule(8, start=4, increment=4, ramp_samples=160)
    # 40 steps of 4 samples take 10 s, and 102 of 8 samples 51 s.
    assert ramp.samples_after(142) == 40 * 4 + 102 * 8
    assert steps_within([first, last], ramp, 61.1, "clock") == 144
    assert steps_within([first, last], ramp, 6.1, "clock") == 24


def test_a_ramp_is_tried_at_its_first_and_its_final_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches steps estimated from a trial that lies within the ramp."""
    config = RootConfig()
    config.train.batch_ramp = BatchRampConfig(start=4, increment=4, samples=160)
    tried = []

    def train(_bench: Bench, _experiment: str, name: str, steps: int, _points: int, overrides: list[str]) -> Curve:
        (tmp_path / name).mkdir()
        freeze(config, tmp_path / name / CONFIG_FILE)
        tried.append((name, *overrides))
        step_s = 0.25 if name.endswith("_4") else 0.5
        points = (Point(steps // 2, 5.0, 9.0, 9.0), Point(steps, 5.0 + steps / 2 * step_s, 9.0, 8.0))
        return Curve(OURS["demo"], None, 4 if name.endswith("_4") else 8, 0, 100, points)

    monkeypatch.setattr(small_machine, "train_ours", train)
    trial, steps = small_machine.try_ours(Bench(tmp_path, 61.1, "clock", 2, None), "demo", ["optim.lr=1"])
    assert (trial.batch, steps) == (8, 144)
    constant = ("optim.lr=1", "train.batch_ramp.start=0")
    assert tried == [
        ("trial_demo", "optim.lr=1"),
        ("trial_demo_4", *constant, "train.global_batch_size=4"),
        ("trial_demo_8", *constant, "train.global_batch_size=8"),
    ]


def test_best_run_is_shown_and_compared_by_time() -> None:
    """Catches a peer shown at a bad learning rate, and a time ratio at another loss than the peer's last."""
    ours = curve(OURS["demo"], None, 7.0, 6.0, 5.0, 4.5, 4.2, 4.0)
    slow, good = curve(NANOGPT, 1e-3, 8.0, 7.0, 6.0, 5.9, 5.8, 5.7), curve(NANOGPT, 4e-3, 8.0, 7.0, 6.0, 5.8, 5.6, 5.5)
    assert shown([ours, slow, good]) == [ours, good]
    assert good.loss_at(22.5, "clock") == pytest.approx(7.5) and good.loss_at(45.0, "processor") == pytest.approx(7.5)
    [verdict] = verdicts([ours, slow, good], BENCH)
    # 5.5 lies half way between the losses at 30 and at 45 s.
    assert verdict.times == pytest.approx(90 / 37.5) and verdict.against == "nanoGPT, lr 0.004, batch 8"
    text = table([ours, slow, good], BENCH)
    assert "| 15 s | 30 s | 60 s | 90 s |" in text and "lr 0.001" not in text
    assert "| megads, demo | 7.000 | 6.000 | 4.500 | 4.000 | 90 | 184,320 |" in text


def test_a_loss_that_is_never_reached() -> None:
    """Catches an invented time for a loss above or below the whole curve."""
    ours = curve(OURS["demo"], None, 7.0, 6.0)
    assert ours.reached_s(5.9, "clock") is None
    assert ours.reached_s(7.5, "clock") == 15.0


def test_rates_first_then_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a search that tries other batch sizes at a bad learning rate, or repeats a run other than the best."""
    losses = {(1e-3, 8): 6.0, (2e-3, 8): 5.5, (4e-3, 8): 5.8, (2e-3, 4): 5.6}
    tried = []

    def train(_bench: Bench, _config: object, peer: Peer, lr: float, _name: str, _points: int) -> Curve:
        tried.append((lr, peer.batch, peer.steps))
        return Curve(peer.side, lr, peer.batch, 0, 100, (Point(6, 1.0, 2.0, losses[lr, peer.batch]),))

    def try_peer(_bench: Bench, _config: object, side: str, batch: int, _parameters: int) -> Peer:
        return Peer(side, batch, 2400 // batch)

    monkeypatch.setattr(small_machine, "train_peer", train)
    monkeypatch.setattr(small_machine, "try_peer", try_peer)
    curves, peer = small_machine.search_peer(BENCH, RootConfig(), NANOGPT, 100, [1e-3, 2e-3, 4e-3], [8, 4])
    assert tried == [(1e-3, 8, 300), (2e-3, 8, 300), (4e-3, 8, 300), (2e-3, 4, 600)]
    assert len(curves) == 4 and peer == Peer(NANOGPT, 8, 300)


def test_our_better_recipe_is_compared_and_a_peer_ahead_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a comparison with our worse recipe, and a peer with a lower loss that is not reported."""
    demo, dial = curve(OURS["demo"], None, 7.0, 5.0), curve(OURS["dial"], None, 7.0, 4.5)
    ahead, behind = curve(NANOCHAT, 0.5, 7.0, 4.0), curve(NANOGPT, 1e-3, 7.0, 6.0)
    found = verdicts([demo, dial, ahead, behind], BENCH)
    out = capsys.readouterr().out
    assert "nanochat, rates x 0.5, batch 8 ends at 4.000, 0.500 nats AHEAD of megads, dial" in out
    assert "nanoGPT, lr 0.001, batch 8 ends at 6.000, 1.500 nats behind megads, dial" in out
    assert [verdict.against for verdict in found] == ["nanoGPT, lr 0.001, batch 8"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_peer_learns_and_is_causal(name: str) -> None:
    """Catches a peer that loses by a bug: a mask, a rate or an update that keeps it from learning."""
    torch.manual_seed(0)
    model = PeerModel(RECIPES[name], layers=4, hidden=32, heads=2, vocabulary=50, seq_len=16)
    optimizer = PeerOptimizer(model, RECIPES[name], steps=60, warmup=3, scale=0.5)
    tokens_bt = (torch.arange(17) * 3 + torch.arange(8)[:, None]) % 50
    losses = []
    for step in range(60):
        loss = F.cross_entropy(model(tokens_bt[:, :-1]).flatten(0, 1), tokens_bt[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.update(step)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(50.0).log().item(), abs=1e-4) and losses[-1] < 0.3
    changed_bs = tokens_bt[:, :-1].clone()
    changed_bs[:, -1] += 1
    with torch.no_grad():
        before, after = model(tokens_bt[:, :-1]), model(changed_bs % 50)
    assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before[:, -1], after[:, -1])


def test_peers_schedules_and_updates() -> None:
    """Catches a rate that does not rise, hold and fall, and updates that are not orthogonal."""
    model = PeerModel(RECIPES["modded"], layers=2, hidden=32, heads=2, vocabulary=50, seq_len=16)
    optimizer = PeerOptimizer(model, RECIPES["modded"], steps=100, warmup=10, scale=1.0)
    factors = [optimizer.factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1) and factors[9:55] == [1.0] * 46
    assert factors[55:] == sorted(factors[55:], reverse=True) and factors[-1] == pytest.approx(1 / 45)
    torch.manual_seed(0)
    for shape in ((2, 8, 24), (2, 24, 8)):
        singular_kr = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert singular_kr.min() > 0.6 and singular_kr.max() < 1.3


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
def test_the_command_runs(tmp_path: Path) -> None:
    """Catches a renamed key, hook or metric, and a peer whose program changed."""
    command = [sys.executable, "-m", "scripts.bench.small_machine", "--folder", str(tmp_path / "runs")]
    command += ["--seconds", "4", "--multiple", "0.5", "--batch", "4", "--tokens", "2048"]
    command += ["--append", str(tmp_path / "bench.jsonl"), "--picture", str(tmp_path / "loss.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| megads, demo |" in done.stdout and "| megads, dial |" in done.stdout
    assert "| nanochat, rates x 0.5, batch 4 |" in done.stdout and "| modded, rates x 0.5, batch 4 |" in done.stdout
    assert (tmp_path / "loss.png").exists() and (tmp_path / "bench.jsonl").exists()
