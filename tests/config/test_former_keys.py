"""Keys under their former names: on the command line, in config files and in frozen configs of earlier versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megads.cli.main import run
from megads.config.frozen import computation_digest, config_of_start, derive_run_id, freeze, load_frozen
from megads.config.identity import changed_keys
from megads.config.root import RootConfig, run_spans
from megads.config.train import rename_keys, rename_overrides
from megads.errors import ConfigError
from megads.runtime.run_dir import CONFIG_FILE
from tests.test_minutes import composed

PHASES = [{"until_steps": 3}, {"train": {"seq_len": 64}}]
OVERRIDE = "[{until_steps: 3}, {train: {seq_len: 64}}]"
OLD_DIGEST = "a3b0141050adf5ac52fbb55caacc4d51b52b293ad7656ad8783427e520c73228"
OLD_CONFIG = f"""\
# sha256 {OLD_DIGEST}
train:
  global_batch_size: 8
  micro_batch_size: 1
  seq_len: 128
  steps: 10
  stages:
  - until_steps: 3
  - train:
      seq_len: 64
  precision: bf16
  seed: 1234
"""
"""The part about training of a config.yaml written in November 2026, before the key had its name of today."""


def phased() -> RootConfig:
    """The config that OLD_CONFIG is of, under today's name."""
    config = RootConfig()
    config.train = replace(config.train, steps=10, phases=PHASES)
    return config


def test_run_ids_are_those_of_earlier_versions() -> None:
    """Catches a run, with phases or without, that the command which started it no longer finds."""
    config = RootConfig()
    config.train.steps = 10
    assert derive_run_id(config, "x") == "x-44136fa3"
    assert derive_run_id(phased(), "x") == "x-fc21a2d3"
    assert computation_digest(config) != computation_digest(phased())


def test_a_config_frozen_by_an_earlier_version_is_that_of_its_run(tmp_path: Path) -> None:
    """Catches a run made before the rename that resumes without its phases, or that is refused."""
    (tmp_path / CONFIG_FILE).write_text(OLD_CONFIG)
    config = config_of_start(tmp_path, OLD_DIGEST)
    assert config is not None and config.train == phased().train
    assert [span.seq_len for span in run_spans(config)] == [128, 64]
    assert changed_keys(config, phased(), 64, ()) == []


def test_a_complete_config_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Catches a rename that counts as a missing key, and the value of a config that gives both names."""
    path = tmp_path / CONFIG_FILE
    freeze(phased(), path)
    text = path.read_text()
    path.write_text(text.replace("\n  phases:\n  - until_steps", "\n  stages:\n  - until_steps"))
    assert "stages:" in path.read_text() and load_frozen(path) == phased()
    path.write_text(text.replace("\n  seed:", "\n  stages: []\n  seed:"))
    with pytest.raises(ConfigError, match=r"gives both train\.stages and train\.phases"):
        load_frozen(path)


def test_the_former_key_replaces_an_experiments_phases(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an override under the former name that is refused, ignored, or loses against a file."""
    assert composed("experiment=llama3_8b", "++train.stages=[]").train.phases == []
    assert composed(f"train.stages={OVERRIDE}", "train.steps=9").train.phases == PHASES
    assert capsys.readouterr().err.count("train.stages is now called train.phases") <= 1, "once per process"


def test_giving_a_key_under_both_names_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches one of two values that is dropped silently."""
    assert run(["train", f"train.stages={OVERRIDE}", "train.phases=[]", "train.steps=5", "dry_run=true"]) == 2
    assert "the command line gives both train.stages and train.phases, its current name" in capsys.readouterr().err


def test_arguments_that_only_contain_a_former_key_stay() -> None:
    """Catches a value or a longer key that contains a former key, and a sign that is lost."""
    given = ["a=train.stages", "train.stages_of=1", "~train.stages", "++train.stages=[]", "-m", "data.stage_to=x"]
    renamed, found = rename_overrides(given)
    assert renamed == [*given[:2], "~train.phases", "++train.phases=[]", *given[4:]] and found == ["train.stages"]


@pytest.mark.parametrize(
    ("content", "package", "renamed"),
    [
        ({"train": {"stages": PHASES, "seed": 1}}, "", {"train": {"phases": PHASES, "seed": 1}}),
        ({"stages": PHASES}, "train", {"phases": PHASES}),
        ({"stages": PHASES, "stage": 1}, "", {"stages": PHASES, "stage": 1}),
        ({"hooks": [{"train": {"stages": 1}}]}, "", {"hooks": [{"train": {"stages": 1}}]}),
    ],
)
def test_only_the_key_of_its_section_is_renamed(content: dict, package: str, renamed: dict) -> None:
    """Catches a plugin's option with the same last part, and a file whose keys are put into a section."""
    found = rename_keys(content, "a file", package)
    assert content == renamed and found == (["train.stages"] if "phases" in str(renamed) else [])


@pytest.mark.parametrize("first_line, indent", [("_global_", 2), ("train", 0)])
def test_an_own_experiment_gives_phases_under_the_former_name(
    first_line: str, indent: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a user's file that an earlier version composed and this one refuses."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    lines = [" " * indent + line for line in ("stages:", "- until_steps: 3", "- train: {seq_len: 64}", "steps: 9")]
    text = "\n".join([f"# @package {first_line}", *(["train:"] if indent else []), *lines])
    (folder / "mine.yaml").write_text(text + "\n")
    assert run(["train", "--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job"]) == 0
    assert "  phases:\n  - until_steps: 3\n" in capsys.readouterr().out
