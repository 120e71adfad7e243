"""Hydra's override grammar as a search space, and assignments as typed configs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra.core.config_store import ConfigStore

from megads.cli.sweep_space import Composer, composing, overrides_of
from megads.cli.train import TrainCommandConfig
from megads.errors import ConfigError
from megads.tools.sweep.config import Choice, Interval, SearchName, SweepConfig, grid


@pytest.fixture
def composer() -> Iterator[Composer]:
    ConfigStore.instance().store(name="train_schema", node=TrainCommandConfig)
    with composing("train"):
        yield Composer("train", TrainCommandConfig, [])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("optim.lr=1e-3,2", Choice(("0.001", "2"))),
        ("model=choice(tiny,demo)", Choice(("tiny", "demo"))),
        ("model=glob(bloom_1*)", Choice(("bloom_176b", "bloom_1b1", "bloom_1b7"))),
        ("optim.betas=[0.9,0.95],[0.9,0.99]", Choice(("[0.9,0.95]", "[0.9,0.99]"))),
        ("model.num_layers=range(2,7,2)", Choice(("2", "4", "6"))),
        ("optim.lr=interval(0.1,0.2)", Interval(0.1, 0.2)),
        ("optim.lr=tag(log, interval(1e-5, 1e-2))", Interval(1e-5, 1e-2, log=True)),
        ("model.num_layers=int(interval(1,8))", Interval(1, 8, integer=True)),
        ("run.id=\"a b\",'c,d'", Choice(('"a b"', "'c,d'"))),
    ],
)
def test_the_grammar_becomes_a_space(composer: Composer, given: str, expected: Choice | Interval) -> None:
    """Catches a form of Hydra's grammar that is read as another one, and texts that lose their quotes."""
    line = composer.parse(["train.steps=3", given])
    assert list(line.space.values()) == [expected]
    assert line.fixed == ("train.steps=3",)


def test_the_sweeps_own_settings_are_no_part_of_its_points(composer: Composer) -> None:
    """Catches settings that reach the points, where they would change names and configs."""
    line = composer.parse(["hparams_search=random", "sweep.trials=5", "+sweep.parallel=2", "train.steps=3,4"])
    assert line.fixed == ()
    settings = composer.settings(line, SweepConfig)
    assert (settings.search, settings.trials, settings.parallel) == (SearchName.random, 5, 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["sweep.parallel=1,2"], "sweep.parallel is a setting of the sweep, so it cannot have several values"),
        (["hydra/launcher=submitit_slurm"], "hydra/launcher has no effect"),
        (["optim.lr=tag(lgo, interval(1, 2))"], "the tag lgo means nothing here; log is known"),
        (["optim.lr=interval(1"], "cannot read the override"),
        (["swep.trials=2"], "unknown key swep.trials: did you mean sweep.trials?"),
        (["sweep.trials=many"], "sweep.trials: Value 'many'"),
    ],
)
def test_a_line_that_makes_no_sense(composer: Composer, given: list[str], expected: str) -> None:
    """Catches tracebacks, and settings that are dropped without a word."""
    with pytest.raises(ConfigError) as caught:
        composer.settings(composer.parse(given), SweepConfig)
    assert expected in str(caught.value)


def test_points_compose_each_with_its_number_and_choices(composer: Composer) -> None:
    """Catches state of Hydra's that one point leaves to the next, and ${hydra:job.num} without a value."""
    line = composer.parse(["model=tiny,demo", "run.id=point-${hydra:job.num}"])
    found = [
        composer.compose([*line.fixed, *overrides_of(assignment)], number)
        for number, assignment in enumerate(grid(line.space))
    ]
    assert [composed.config.run.id for composed in found] == ["point-0", "point-1"]
    assert [composed.choices["model"] for composed in found] == ["tiny", "demo"]
    assert [composed.config.model.num_layers for composed in found] == [2, 6]
    with pytest.raises(ConfigError, match=r"did you mean optim\.lr\?"):
        composer.compose(["lr=3"])
