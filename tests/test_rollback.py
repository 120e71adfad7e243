"""Detection of a loss spike and rollback of the run: the real command, a range of noise in its data, real kills."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.writer import IndexedDatasetWriter
from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of
from tests.corpus import VOCAB_SIZE

pytestmark = pytest.mark.distributed

STEPS, BATCH, FIRST_BAD = 56, 12, 40
"""Samples are noise from step 41 on."""
TEXTS = 40
"""Number of source files in the real text."""


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of random tokens."""
    prefix = tmp_path_factory.mktemp("noise") / "noise"
    draw = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(200):
            writer.append(draw.integers(0, VOCAB_SIZE, 60).tolist())
    return prefix


def overrides(
    corpus: Path, noise: Path, bad_steps: int, first_bad: int = FIRST_BAD, batch: int = BATCH, **changes: object
) -> list[str]:
    """A model that learns quickly, on a blend that is noise for some steps."""
    first, end = first_bad * batch, (first_bad + bad_steps) * batch
    mixes = ((1, "[1, 0]"), (first, "[0, 1]"), (end, "[1, 0]"))
    values = {
        "data__train": f"[{{path: {corpus}, max_epochs: 9, weight: 1}}, {{path: {noise}, max_epochs: 9, weight: 1}}]",
        "data__phases": f"[{', '.join(f'{{from_sample: {at}, weights: {weights}}}' for at, weights in mixes)}]",
        "parallel__dp": 2,
        "train__micro_batch_size": BATCH // 2,
        "train__steps": STEPS,
        "optim__lr": 6e-3,
        "checkpoint__every_steps": 10,
        "checkpoint__keep": 3,
        "resilience__spikes__window_steps": 24,
        "resilience__spikes__action": "roll_back",
    }
    return small_model(corpus, **(values | changes))


@pytest.mark.fault(12)
def test_a_spike_is_rolled_back_and_its_data_skipped(corpus: Path, noise: Path, megads: StartCommand) -> None:
    """Catches a spike that is not detected, a rollback that continues from a later checkpoint, samples repeated or
    lost, and a ledger other than that of a run with data.skip."""
    run_dir, reference = megads.folder / "run", megads.folder / "reference"
    ended = megads("train", *overrides(corpus, noise, 3), f"run.dir={run_dir}").end()
    assert ended.code == 0, ended.err
    (decided,) = events_of(run_dir, "roll_back")
    assert (decided["first_step"], decided["step"], decided["begin"]) == (41, 43, 37)
    assert decided["skip_samples"] == [37 * BATCH, 43 * BATCH] and decided["checkpoint"] == "step_00000030"
    assert [event["step"] for event in events_of(run_dir, "resume")] == [30]
    assert list(events_of(run_dir, "left_behind")[0]["checkpoints"]) == ["40"]
    assert (run_dir / "metrics.1.jsonl").is_file(), "the spike is to be seen afterwards"

    skip = f"data.skip=[{{samples: [{37 * BATCH}, {43 * BATCH}]}}]"
    plain = overrides(corpus, noise, 3, resilience__spikes__action="warn")
    assert megads("train", *plain, skip, f"run.dir={reference}").end().code == 0
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, STEPS)) == checksums(checkpoint_of(reference, STEPS))
    # The same command finds the recorded decision and a finished run.
    again = megads("train", *overrides(corpus, noise, 3), f"run.dir={run_dir}").end()
    assert again.code == 0 and "finished at step" in again.out + again.err, again.out + again.err


@pytest.mark.slow
def test_a_rollback_leaves_local_checkpoints_behind(corpus: Path, noise: Path, megads: StartCommand) -> None:
    """Catches a start that resumes from a local checkpoint within the spike although one before it is on disk."""
    run_dir = megads.folder / "run"
    local = {"checkpoint__every_steps": 30, "checkpoint__local_every_steps": 2}
    ended = megads("train", *overrides(corpus, noise, 3, **local), f"run.dir={run_dir}").end()
    assert ended.code == 0, ended.err
    (decided,) = events_of(run_dir, "roll_back")
    (resumed,) = events_of(run_dir, "resume")
    assert decided["checkpoint"] == resumed["checkpoint"] == "step_00000030" and resumed["step"] == 30


@pytest.mark.fault(12)
@pytest.mark.slow
def test_a_rollback_survives_kills_and_ends_at_its_limit(corpus: Path, noise: Path, megads: StartCommand) -> None:
    """Catches a run that is rolled back forever, a decision that changes after a restart or that a kill before the
    restart loses, and later checkpoints from which a start resumes meanwhile."""
    run_dir, reference = megads.folder / "run", megads.folder / "reference"
    arguments = [*overrides(corpus, noise, 8), f"run.dir={run_dir}"]
    command = megads("train", *arguments, "resilience.spikes.max_rollbacks=1")
    command.wait_for(lambda: bool(events_of(run_dir, "roll_back")))
    command.kill_everything()
    for _ in range(2):
        ended = megads("train", *arguments, "resilience.spikes.max_rollbacks=1").end()
        assert ended.code == 7, ended.err
        assert "rolled back 1 times (resilience.spikes.max_rollbacks = 1). Lower optim.lr" in ended.err
    assert len(events_of(run_dir, "roll_back")) == 1

    command = megads("train", *arguments)
    command.wait_for(lambda: len(events_of(run_dir, "roll_back")) == 2)
    command.kill_everything()
    assert megads("train", *arguments).end().code == 0
    first, second = events_of(run_dir, "roll_back")
    assert first["skip_samples"] == [37 * BATCH, 43 * BATCH]
    # The remaining noise comes 6 steps earlier, and twice as many samples are skipped.
    assert second["skip_samples"] == [34 * BATCH, 46 * BATCH] and second["skip_index"] == 1

    ranges = ", ".join(f"{{samples: {event['skip_samples']}}}" for event in (first, second))
    plain = overrides(corpus, noise, 8, resilience__spikes__action="warn")
    assert megads("train", *plain, f"data.skip=[{ranges}]", f"run.dir={reference}").end().code == 0
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, STEPS)) == checksums(checkpoint_of(reference, STEPS))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, module_megads: StartCommand) -> tuple[Path, Path]:
    """Sources of Python's standard library as a dataset, and another dataset of the same tokens, shuffled."""
    folder = tmp_path_factory.mktemp("text")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:TEXTS]
    for path in sources:
        (folder / f"{path.stem}.txt").write_text(path.read_text(errors="replace"))
    given, tokenizer, prefix = f"input=[{folder}/*.txt]", folder / "tokenizer.json", folder / "data"
    assert module_megads("tokenizer", given, f"vocab_size={VOCAB_SIZE}", f"output={tokenizer}").end().code == 0
    assert module_megads("preprocess", given, f"tokenizer={tokenizer}", f"output={prefix}").end().code == 0
    shuffled, tokens = folder / "shuffled", np.random.default_rng(0).permutation(IndexedDataset(prefix).all_tokens)
    with IndexedDatasetWriter(shuffled, np.uint16) as writer:
        for first in range(0, len(tokens), 1000):
            writer.append(tokens[first : first + 1000].tolist())
    return prefix, shuffled


@pytest.mark.fault(12)
@pytest.mark.slow
def test_a_block_of_shuffled_text_is_skipped(text: tuple[Path, Path], megads: StartCommand) -> None:
    """Catches a spike that is only detected on random tokens: these are the text's own, in random order."""
    run_dir, reference = megads.folder / "run", megads.folder / "reference"
    bad, batch = 240, 16
    changes = {
        "parallel__dp": 1,
        "train__steps": 264,
        "train__seq_len": 64,
        "train__global_batch_size": batch,
        "train__micro_batch_size": batch,
        "schedule__warmup_samples": 40 * batch,
        "checkpoint__every_steps": 30,
    }
    given = overrides(text[0], text[1], 3, first_bad=bad, batch=batch, **changes)
    ended = megads("train", *given, f"run.dir={run_dir}").end(1200)
    assert ended.code == 0, ended.err
    (decided,) = events_of(run_dir, "roll_back")
    assert (decided["first_step"], decided["step"]) == (bad + 1, bad + 3) and decided["loss"] > 1.5 * decided["median"]
    assert decided["checkpoint"] == "step_00000210"
    first, end = decided["skip_samples"]
    plain = [*given, "resilience.spikes.action=warn", f"data.skip=[{{samples: [{first}, {end}]}}]"]
    assert megads("train", *plain, f"run.dir={reference}").end(1200).code == 0
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 264)) == checksums(checkpoint_of(reference, 264))
