"""`megads train -m`: Hydra's override grammar as a search space, and a sweep up to the start of its first point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from megads.cli.entry import hydra_initialized
from megads.cli.sweep import Composer, _Points, overrides_of
from megads.cli.train import VERB
from megads.config.root import RootConfig
from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig
from megads.runtime.config import ClusterConfig
from megads.tools.sweep.config import Choice, Interval, LauncherName, SearchName, SweepConfig, TrainCommandConfig, grid
from tests.command import StartCommand, small_model


@pytest.fixture
def composer() -> Iterator[Composer]:
    ConfigStore.instance().store(name="train_schema", node=TrainCommandConfig)
    with hydra_initialized("train"):
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
def test_hydras_grammar_becomes_a_search_space(composer: Composer, given: str, expected: Choice | Interval) -> None:
    """Catches a form of Hydra's grammar that is parsed as another one, and strings that lose their quotes."""
    line = composer.parse(["train.steps=3", given])
    assert list(line.space.values()) == [expected]
    assert line.fixed == ("train.steps=3",)


def test_the_sweeps_own_settings_are_no_part_of_its_points(composer: Composer) -> None:
    """Catches settings of the sweep that reach its points, where they would change names and configs."""
    line = composer.parse(["hparams_search=random", "sweep.trials=5", "+sweep.parallel=2", "train.steps=3,4"])
    assert line.fixed == ()
    settings = composer.settings(line, SweepConfig)
    assert (settings.search, settings.trials, settings.parallel) == (SearchName.random, 5, 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["sweep.parallel=1,2"], "sweep.parallel is a setting of the sweep, so it cannot have several values"),
        (["hydra/launcher=submitit_slurm"], "hydra/launcher has no effect"),
        (["optim.lr=tag(lgo, interval(1, 2))"], "unknown tag lgo; the only tag is log"),
        (["optim.lr=interval(1"], "cannot read the override"),
        (["swep.trials=2"], "unknown key swep.trials: did you mean sweep.trials?"),
        (["sweep.trials=many"], "sweep.trials: Value 'many'"),
    ],
)
def test_a_contradictory_sweep_command_is_refused(composer: Composer, given: list[str], expected: str) -> None:
    """Catches tracebacks, and settings that are silently dropped."""
    with pytest.raises(ConfigError) as caught:
        composer.settings(composer.parse(given), SweepConfig)
    assert expected in str(caught.value)


@pytest.mark.always
def test_points_compose_each_with_its_number_and_choices(composer: Composer) -> None:
    """Catches Hydra state that leaks from one point to the next, and ${hydra:job.num} without a value."""
    line = composer.parse(["model=tiny,demo", "run.id=point-${hydra:job.num}"])
    found = [
        composer.compose([*line.fixed, *overrides_of(assignment)], number)
        for number, assignment in enumerate(grid(line.space))
    ]
    assert [composed.config.run.id for composed in found] == ["point-0", "point-1"]
    assert [composed.choices["model"] for composed in found] == ["tiny", "demo"]
    assert [composed.config.model.num_layers for composed in found] == [2, 4]
    with pytest.raises(ConfigError, match=r"did you mean optim\.lr\?"):
        composer.compose(["lr=3"])


@pytest.mark.parametrize(
    ("gpus", "parallel", "tp", "threads", "said"),
    [
        ("", 4, 1, 2, None),
        ("", 4, 2, 1, None),
        ("", 3, 1, 3, "3 concurrent points x 1 ranks x 3 threads = 9, but this machine has 8 cores: lower .* to 2"),
        ("", 5, 2, 1, "5 concurrent points x 2 ranks x 1 threads = 10, but this machine has 8 cores: lower .* to 4"),
        ("ab", 2, 1, 100, None),
        ("abc", 2, 2, 1, "2 concurrent points x 2 ranks = 4, but this machine has 3 GPUs: lower sweep.parallel to 1"),
        ("", 1, 16, 16, None),
    ],
)
def test_points_side_by_side_share_nothing(
    composer: Composer, gpus: str, parallel: int, tp: int, threads: int, said: str | None
) -> None:
    """Catches concurrent points that share cores or GPUs, cores counted although ranks have GPUs, and advice that would
    be rejected in turn."""
    config = SweepConfig(launcher=LauncherName.local, parallel=parallel)
    points = _Points(VERB, composer, composer.parse(["optim.lr=1,2"]), config, [])
    points._cores, points._gpus = range(8), list(gpus)
    root = RootConfig(parallel=ParallelConfig(tp=tp), cluster=ClusterConfig(threads_per_rank=threads))
    if said is None:
        points._check_share(root)
        return
    with pytest.raises(ConfigError, match=said):
        points._check_share(root)


def refused(megads: StartCommand, corpus: Path, *overrides: str) -> str:
    """Output of a sweep that starts nothing."""
    result = megads("train", "-m", *small_model(corpus, train__steps=5), *overrides).end()
    assert result.code == 2, result
    assert "Traceback" not in result.err
    assert not list(megads.folder.glob("runs/[!s]*")), "no point is started"
    return result.out + result.err


@pytest.mark.distributed
def test_points_that_cannot_run_are_dropped_with_the_reason(megads: StartCommand, corpus: Path) -> None:
    """Catches points found infeasible only once they run, because of memory or an indivisible layout, and a sweep
    without a feasible point that reports success."""
    said = refused(megads, corpus, "model.hidden_size=600000,1200000", "parallel.tp=1,4")
    assert "point 0 is dropped, model.hidden_size=600000 parallel.tp=1: rank 0 needs" in said
    assert "point 3 is dropped, model.hidden_size=1200000 parallel.tp=4: model.num_heads = 6 is not divisible" in said
    assert "4 infeasible" in said and "no point has finished" in said


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("optim.lr=1,2", "run.id=same"), "run.id=same is shared by several points of the sweep"),
        (("optim.lr=interval(1,2)",), "optim.lr is an interval, which a grid cannot enumerate"),
        (("hparams_search=random", "sweep.trials=2"), "no key has several values"),
        (("optim.lr=1,2", "sweep.pruning.name=median"), "evaluation.every_steps = 0: set it"),
        (("optim.lr=1,2", "sweep.launcher=slurm", "sweep.sbatch=no.sbatch"), "sweep.sbatch = no.sbatch: there is no"),
        (("optim.lr=1,2", "sweep.prune=median"), "unknown key sweep.prune"),
        (("optim.lr=1,2", "--config-name=x"), "--config-name=x cannot be combined with -m"),
        (("optim.lr=1,2", "sweep.parallel=1000"), "sweep.parallel = 1000, but this machine has"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_once_before_its_points(
    megads: StartCommand, corpus: Path, overrides: tuple[str, ...], expected: str
) -> None:
    """Catches an error in the sweep itself that is reported once per point, or only after the first one."""
    assert expected in refused(megads, corpus, *overrides)
