"""A killed run resumes as if it had not been interrupted: the real command, real kills."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from megads.checkpoint.manifest import read_manifest
from tests.command import (
    Command,
    StartCommand,
    checkpoint_of,
    checksums,
    events_of,
    small_model,
    steps_of,
    validations_of,
)
from tests.faults import HOLD_STEP

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def finished(corpus: Path, module_megads: StartCommand) -> Path:
    """A finished run of two steps; read only."""
    run_dir = module_megads.folder / "finished"
    ended = module_megads("train", *small_model(corpus, train__steps=2, run__dir=run_dir)).end()
    assert ended.code == 0, ended.err
    return run_dir


def damage(checkpoint: Path) -> None:
    """Flips one bit of the last tensor of a file."""
    path = min(checkpoint.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def last_step(run_dir: Path) -> int:
    steps = steps_of(run_dir)
    return steps[-1]["step"] if steps else 0


def kill_at_a_random_moment(command: Command, run_dir: Path, first: int, last: int) -> str:
    """Kills everything at a random time after a random step has been written; returns when.

    The command has the fault `hold`, so that the run cannot end meanwhile.
    """
    step, delay_s = random.randint(first, last), random.uniform(0.0, 0.05)
    command.wait_for(lambda: last_step(run_dir) >= step)
    time.sleep(delay_s)
    assert command.process.poll() is None, "the run ended before it could be killed"
    command.kill_everything()
    return f"killed {delay_s:.3f} s after step {step}, ledger at step {last_step(run_dir)}"


def test_a_killed_run_continues_bit_for_bit(corpus: Path, megads: StartCommand) -> None:
    """N5. Catches state that is not saved: moments, step counts, dropout RNG, data order, learning rate."""
    overrides = small_model(
        corpus, train__precision="bf16", parallel__tp=2, parallel__pp=2, train__steps=10, checkpoint__every_steps=3,
        model__hidden_dropout=0.1, model__attention_dropout=0.1, evaluation__every_steps=4,
    )  # fmt: skip
    reference, killed = megads.folder / "reference", megads.folder / "killed"
    assert megads("train", *overrides, f"run.dir={reference}").end().code == 0
    command = megads("train", *overrides, f"run.dir={killed}", fault="hold", variables={HOLD_STEP: "10"})
    moment = kill_at_a_random_moment(command, killed, 4, 7)
    print(moment)
    assert not checkpoint_of(killed, 10).exists()
    again = megads("train", *overrides, f"run.dir={killed}").end()
    assert (again.code, again.err) == (0, "")
    resumed = events_of(killed, "resume")
    assert len(resumed) == 1 and resumed[0]["step"] in (3, 6, 9), moment
    assert resumed[0]["software_differences"] == []
    assert [line["step"] for line in steps_of(reference)] == list(range(1, 11))
    assert steps_of(killed) == steps_of(reference), moment
    assert validations_of(killed) == validations_of(reference), moment
    assert [line["step"] for line in validations_of(reference)] == [4, 8, 10]
    assert checksums(checkpoint_of(killed, 10)) == checksums(checkpoint_of(reference, 10)), moment


@pytest.mark.slow
def test_a_kill_within_a_pipeline_step_changes_nothing(corpus: Path, megads: StartCommand) -> None:
    """N5 with micro-batches in flight on virtual stages. Catches gradients or p2p transfers that outlive their step."""
    overrides = small_model(
        corpus, parallel__pp=2, parallel__schedule="zb_v", model__num_layers=4, train__steps=4,
        checkpoint__every_steps=2, logging__timeline_every_steps=4,
    )  # fmt: skip
    reference, killed = megads.folder / "reference", megads.folder / "killed"
    assert megads("train", *overrides, f"run.dir={reference}").end().code == 0
    assert megads("train", *overrides, f"run.dir={killed}", fault="die_in_a_weight_part").end().code == -9
    assert last_step(killed) == 2
    again = megads("train", *overrides, f"run.dir={killed}").end()
    assert (again.code, again.err) == (0, "")
    assert events_of(killed, "resume")[0]["step"] == 2
    assert steps_of(killed) == steps_of(reference)
    assert checksums(checkpoint_of(killed, 4)) == checksums(checkpoint_of(reference, 4))
    files = sorted(path.name for path in (reference / "timeline").iterdir())
    assert files == ["step_00000004.rank_00000.json", "step_00000004.rank_00001.json"]


# Each layout resumes the run of the previous one: vocabulary padding, data parallel size and stages change. The 509
# tokens of the vocabulary are not divisible by 2 or 3.
CHAIN = [
    ("tp3", {"tp": 3}),
    ("pp2", {"pp": 2}),
    ("tp2", {"tp": 2}),
    ("dp3", {"dp": 3}),
    ("single", {}),
]
FEATURES = {
    "model__num_kv_heads": 3, "model__window": 6, "model__norm": "rmsnorm", "model__mlp": "swiglu",
    "model__parallel_block": True, "model__position": "rope",
}  # fmt: skip
FEATURES_CHAIN = [("tp3", {"tp": 3}), ("cp2", {"cp": 2}), ("single", {})]
KINDS_CHAIN = [
    ("cp2", {"cp": 2}),
    ("cp2 ulysses", {"cp": 2, "cp_kind": "ulysses"}),
    ("cp2 ring", {"cp": 2, "cp_kind": "ring"}),
    ("cp4 ulysses 2 x ring", {"cp": 4, "cp_kind": "ring", "cp_ulysses": 2}),
    ("cp4 ulysses 2 x allgather", {"cp": 4, "cp_ulysses": 2}),
    ("cp2 again", {"cp": 2}),
]


@pytest.mark.fault(20)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chain", "model"),
    [
        pytest.param(CHAIN, {}, id="plain"),
        pytest.param(FEATURES_CHAIN, FEATURES, id="features", marks=pytest.mark.slow),
        pytest.param(KINDS_CHAIN, FEATURES, id="kinds of context parallelism", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_in_another_layout(chain: list, model: dict, corpus: Path, megads: StartCommand) -> None:
    """N6, N2. Catches padding rows read as weights, ZeRO shards at wrong offsets, skipped samples, queries separated
    from their keys, gates separated from their values, and a kind of context parallelism that trains another model."""
    run_dir = megads.folder / "run"
    continued: dict[int, dict] = {}
    for number, (name, layout) in enumerate(chain):
        sizes = {f"parallel__{key}": size for key, size in layout.items()}
        overrides = small_model(
            corpus, train__steps=2 * (number + 2), checkpoint__every_steps=2, optim__lr=1e-2,
            schedule__name="constant", run__id="chain", run__dir=run_dir, **sizes, **model,
        )  # fmt: skip
        ended = megads("train", *overrides).end()
        assert ended.code == 0, ended.err
        lines = {line["step"]: line for line in steps_of(run_dir)}
        if continued:
            first = 2 * number + 1
            # The previous layout also trained step `first`, without an interruption.
            assert lines[first]["batch_hash"] == continued[first]["batch_hash"], name
            for key, bound in (("loss", 1e-6), ("grad_norm", 1e-5)):
                off = abs(lines[first][key] / continued[first][key] - 1)
                print(f"{chain[number - 1][0]} -> {name}: first {key} off by {off:.1e}")
                assert off <= bound, (name, key)
            assert events_of(run_dir, "resume")[-1]["step"] == first - 1
        continued = lines
        # As if the run had been killed before its last checkpoint.
        shutil.rmtree(checkpoint_of(run_dir, 2 * (number + 2)))


@pytest.mark.slow
def test_longer_training_continues_the_run(corpus: Path, megads: StartCommand) -> None:
    """Catches an increased train.steps that starts another run, reads samples twice, or skips the last validation."""
    overrides = small_model(corpus, schedule__decay_samples=120)
    assert megads("train", *overrides, "train.steps=2").end().code == 0
    longer = megads("train", *overrides, "train.steps=4").end()
    assert longer.code == 0 and longer.out.count("train.steps 2 -> 4") == 1
    (run_dir,) = (megads.folder / "runs").iterdir()
    (changed,) = events_of(run_dir, "config_changed")
    assert (
        changed["changes"] == [{"key": "train.steps", "before": 2, "after": 4, "class": "warn"}]
        and changed["level"] == "warning"
    )
    steps = steps_of(run_dir)
    assert [(line["step"], line["samples"]) for line in steps] == [(1, 12), (2, 24), (3, 36), (4, 48)]
    assert len({line["batch_hash"] for line in steps}) == 4
    assert [line["step"] for line in validations_of(run_dir)] == [2, 4]
    # The same command on a finished run changes nothing.
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert megads("train", *overrides, "train.steps=4").end().code == 0
    assert (run_dir / "metrics.jsonl").read_bytes() == before


COUNT_DRAWS = """
from pathlib import Path
import megads.model.gpt as gpt
inner = gpt.parameter_generator
def counted(seed, name):
    with Path("drawn.txt").open("a") as file:
        file.write(name + chr(10))
    return inner(seed, name)
gpt.parameter_generator = counted
"""


@pytest.mark.slow
def test_a_resume_does_not_initialize_weights_that_it_loads(corpus: Path, megads: StartCommand) -> None:
    """Catches a restart that initializes weights which it then loads: a minute and 14 GB for BLOOM-176B."""
    (megads.folder / "count_draws.py").write_text(COUNT_DRAWS)
    drawn = megads.folder / "drawn.txt"
    first = (*small_model(corpus), "plugins=[count_draws]")
    assert megads("train", *first, "train.steps=1", "run.id=first").end().code == 0
    assert "embedding.word.weight" in drawn.read_text()
    drawn.unlink()
    ended = megads("train", *first, "train.steps=2", "run.id=first").end()
    assert ended.code == 0 and not drawn.exists(), ended.err
    ended = megads("train", *first, "train.steps=1", "run.id=second", "checkpoint.init_from=runs/first").end()
    assert ended.code == 0 and not drawn.exists(), ended.err


@pytest.mark.fault(7)
def test_a_damaged_checkpoint_is_skipped_and_load_none_starts_afresh(corpus: Path, megads: StartCommand) -> None:
    """Catches a flipped bit that is loaded, an older checkpoint that is not tried, and a load=none that loads."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, checkpoint__every_steps=2, checkpoint__keep=0, run__dir=run_dir, train__steps=6)
    assert megads("train", *overrides).end().code == 0
    reference, weights = steps_of(run_dir), checksums(checkpoint_of(run_dir, 6))
    damage(checkpoint_of(run_dir, 6))
    (truncated,) = checkpoint_of(run_dir, 4).glob("*.safetensors")
    truncated.write_bytes(truncated.read_bytes()[:-100])
    assert megads("train", *overrides).end().code == 0
    (event,) = events_of(run_dir, "resume")
    assert (event["step"], event["checkpoint"]) == (2, "step_00000002")
    newest, older = event["passed_by"]
    assert newest.startswith("step_00000006: ") and "fails its checksum" in newest
    assert older.startswith("step_00000004: ") and "bytes instead of" in older
    assert steps_of(run_dir) == reference
    assert checksums(checkpoint_of(run_dir, 6)) == weights

    assert megads("train", *overrides, "checkpoint.load=none", "train.steps=1").end().code == 0
    assert steps_of(run_dir)[0]["loss"] == reference[0]["loss"]
    assert len(events_of(run_dir, "resume")) == 1
    assert "kept as metrics.1.jsonl" in events_of(run_dir, "ledger")[-1]["message"]
    assert (run_dir / "metrics.1.jsonl").read_text().count('"batch_hash"') == 6
    # The earlier checkpoints stay, but the newest is the fresh run's.
    assert read_manifest(checkpoint_of(run_dir, 1)).sequence > read_manifest(checkpoint_of(run_dir, 6)).sequence


@pytest.mark.slow
def test_a_kill_before_the_last_validation_does_not_lose_it(corpus: Path, finished: Path, megads: StartCommand) -> None:
    """Catches a run that counts as finished after its last checkpoint and never runs its last validation."""
    killed = megads.folder / "killed"
    overrides = small_model(corpus, train__steps=2, run__dir=killed)
    cut_off = megads("train", *overrides, fault="die_in_validation").end()
    assert cut_off.code == -9
    assert checkpoint_of(killed, 2).exists() and validations_of(killed) == []
    assert megads("train", *overrides).end().code == 0
    assert steps_of(killed) == steps_of(finished)
    assert len(validations_of(finished)) == 1
    assert validations_of(killed) == validations_of(finished)


@pytest.mark.slow
def test_a_decay_may_branch_off_a_run(corpus: Path, finished: Path, megads: StartCommand) -> None:
    """Catches a branch that decays from another checkpoint, whose learning rate depends on when it was interrupted, or
    that cannot resume without the checkpoint it started from."""
    stable, run_dir = shutil.copytree(finished, megads.folder / "stable"), megads.folder / "branch"
    settings = {"name": "wsd", "decay_from": stable, "decay_shape": "linear", "decay_steps": 6}
    branch = {f"schedule__{key}": value for key, value in settings.items()} | {"run__dir": run_dir}
    ended = megads("train", *small_model(corpus, train__steps=4, **branch)).end()
    assert ended.code == 0, ended.err
    shutil.rmtree(stable)
    ended = megads("train", *small_model(corpus, train__steps=6, **branch)).end()
    assert ended.code == 0, ended.err
    rates = {line["step"]: line["lr"] for line in steps_of(run_dir)}
    assert rates == pytest.approx({3: 2.25e-4, 4: 1.5e-4, 5: 0.75e-4, 6: 0.0})
    for changes, said in (
        ({"run__dir": megads.folder / "other"}, f"schedule.decay_from = {stable}: there is no such folder"),
        ({"checkpoint__load": "none"}, "continues that checkpoint, but checkpoint.load = none"),
        ({"schedule__decay_start_samples": 12}, "has 24 samples"),
        ({"schedule__decay_steps": 2}, f"= 24 of schedule.decay_from = {stable}: the decay must start between"),
        ({"schedule__decay_from": "s3://bucket/run"}, "fetch it first with `megads checkpoint download`"),
    ):
        ended = megads("train", *small_model(corpus, train__steps=6, **(branch | changes))).end()
        assert ended.code in (2, 4) and said in ended.err, (ended, said)


def test_a_checkpoint_of_another_model_is_refused(corpus: Path, finished: Path, megads: StartCommand) -> None:
    """Catches weights that are loaded because their shapes happen to match, and a differing key that is not named."""
    before, run_dir = checksums(checkpoint_of(finished, 2)), megads.folder / "run"
    other = small_model(
        corpus, train__steps=1, run__dir=run_dir, checkpoint__load=finished, model__num_heads=4, model__num_layers=3
    )
    ended = megads("train", *other).end()
    assert ended.code == 4
    assert "is of another model" in ended.err and "Traceback" not in ended.err
    for difference in ("model.num_heads: 6 there, 4 here", "model.num_layers: 2 there, 3 here"):
        assert difference in ended.err
    assert not (run_dir / "checkpoints").exists()
    assert checksums(checkpoint_of(finished, 2)) == before
