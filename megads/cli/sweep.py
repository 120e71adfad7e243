"""`megads train -m`: skips points that cannot run, trains the others, and reports the best one."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig

from megads.cli.entry import (
    Composed,
    as_config_errors,
    compose_typed,
    exit_code_of,
    hydra_initialized,
    sweep_table,
    typed,
)
from megads.cli.verb import Invocation, Verb, config_dir
from megads.config.root import RootConfig, check_config
from megads.errors import EXIT_OK, ConfigError
from megads.launch.layout import Machine, run_planner, this_machine
from megads.launch.preflight import locate_data, place
from megads.runtime.environment import available_core_numbers
from megads.runtime.machine_memory import visible_gpus
from megads.tools.jobs import exclusive, machine_shares
from megads.tools.sweep.config import (
    Assignment,
    Choice,
    Interval,
    LauncherName,
    PrunerName,
    SearchName,
    Space,
    SweepConfig,
    check_space,
    draw,
)
from megads.tools.sweep.driver import Driver, known_points, make_study
from megads.tools.sweep.launchers import Launcher, LocalLauncher, RayLauncher, SlurmLauncher
from megads.tools.sweep.points import Point, PointBook, read_points
from megads.tools.sweep.results import SweepRecord, make_record, summary, write_record, write_results

_SETTINGS_GROUP = "hparams_search"
_SETTINGS_SECTION = "sweep"


@dataclass(frozen=True)
class SweepLine:
    """A parsed command line of a sweep.

    Attributes:
        fixed: overrides that apply to every point.
        settings: overrides of the sweep's own config.
        space: search space, by key.
    """

    fixed: tuple[str, ...]
    settings: tuple[str, ...]
    space: Space


class Composer:
    """Composes configs of one verb; to be used inside `hydra_initialized`.

    Args:
        verb: the verb's name.
        schema: dataclass of its config.
        flags: folders given with --config-dir.
    """

    def __init__(self, verb: str, schema: type, flags: Sequence[str]):
        self._verb, self._schema = verb, schema
        folders = [Path(flag).resolve() for flag in flags]
        self._search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"] if folders else []

    def parse(self, overrides: Sequence[str]) -> SweepLine:
        """Parses the overrides of a command line.

        Raises:
            ConfigError: an override is malformed, or sweeps over a setting of the sweep itself.
        """
        with as_config_errors(self._schema):
            loader = GlobalHydra.instance().config_loader()
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
            return self._split(parsed)

    def _split(self, parsed: Sequence[Override]) -> SweepLine:
        fixed: list[str] = []
        settings: list[str] = []
        space: dict[str, Choice | Interval] = {}
        for override in parsed:
            key = override.get_key_element()
            plain = key.lstrip("+~")
            own = plain == _SETTINGS_GROUP or plain.partition(".")[0] == _SETTINGS_SECTION
            if plain.startswith(("hydra/launcher", "hydra/sweeper", "hydra.sweep", "hydra.launcher")):
                raise ConfigError(
                    f"{plain} has no effect: megads {self._verb} does not run sweeps with Hydra's plugins; see "
                    "hparams_search= and the keys of sweep, such as sweep.launcher=slurm, in docs/sweep.md"
                )
            if not override.is_sweep_override():
                text = str(override.input_line)
                (settings if own else fixed).append(text)
            elif own:
                raise ConfigError(f"{key} is a setting of the sweep, so it cannot have several values")
            else:
                space[key] = _parameter(override)
        return SweepLine(tuple(fixed), tuple(settings), space)

    def compose(self, overrides: Sequence[str], number: int = 0) -> Composed:
        """Composes one config.

        Args:
            overrides: all overrides of the point.
            number: number of the point, the value of ${hydra:job.num}.

        Raises:
            ConfigError: the config does not compose or does not fit the schema.
        """
        return compose_typed(self._verb, self._schema, [*self._search, *overrides, f"hydra.job.num={number}"])

    def settings(self, line: SweepLine, schema: type) -> Any:
        """Returns the config of the sweep itself, composed without the swept keys.

        Raises:
            ConfigError: the overrides that are not swept do not compose.
        """
        with as_config_errors(self._schema):
            config = compose(self._verb, [*self._search, *line.fixed, *line.settings])
            section = config[_SETTINGS_SECTION]
            assert isinstance(section, DictConfig)
            return typed(section, schema)


def overrides_of(assignment: Assignment) -> list[str]:
    """Returns an assignment as overrides."""
    return [f"{key}={value}" for key, value in assignment.items()]


def _parameter(override: Override) -> Choice | Interval:
    """Converts Hydra's choice(...), range(...), glob(...) or interval(...), which may be int or tagged log."""
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return Choice(tuple(override.sweep_string_iterator()))
    assert value.start is not None and value.end is not None
    integer = isinstance(value.start, int) and isinstance(value.end, int)
    unknown = sorted(str(tag) for tag in value.tags - {"log"})
    if unknown:
        raise ConfigError(f"{override.get_key_element()}: unknown tag {unknown[0]}; the only tag is log")
    return Interval(float(value.start), float(value.end), log="log" in value.tags, integer=integer)


_WIDTH = (150, 50)
"""Columns and lines if the terminal size is unknown."""
_TRIES = 20
_CONFIG_DIR_FLAGS = ("--config-dir", "-cd")


def run_sweep(verb: Verb, arguments: Sequence[str]) -> int:
    """Runs or continues the sweep that a command line describes.

    Args:
        verb: megads train.
        arguments: Hydra's flags and overrides, without -m.

    Returns:
        0 if every point that can run has finished or was pruned; 2 if no point can run; else the first non-zero exit
        code of a point.

    Raises:
        ConfigError: the sweep itself cannot be run.
    """
    flags, overrides = _split_flags(arguments)
    with hydra_initialized(verb.name):
        composer = Composer(verb.name, verb.schema, flags)
        line = composer.parse(overrides)
        config: SweepConfig = composer.settings(line, SweepConfig)
        config.check()
        check_space(config, line.space)
        points = _Points(verb, composer, line, config, flags)
        base = points.any_config()
        if base.config.train.minutes is not None:
            raise ConfigError(
                f"train.minutes = {base.config.train.minutes:g}: each point of a sweep would measure its own number of "
                "steps, so that their losses cannot be compared; set train.steps=<number>"
            )
        record = make_record(points.name(base), [*_flag_words(flags), *line.fixed], line.space, config)
        folder = Path(config.dir or f"runs/sweeps/{record.name}")
        with exclusive(folder, "sweep.dir"):
            write_record(folder, record)
            if base.config.run.dry_run:
                return points.dry_run()
            return _run(points, base.config, folder, record)


def _run(points: _Points, base: RootConfig, folder: Path, record: SweepRecord) -> int:
    """Runs the points of a sweep; the caller holds the lock on its folder."""
    config, space = points.config, points.line.space
    if config.pruning.name is not PrunerName.none and base.evaluation.every_steps == 0:
        raise ConfigError(
            f"sweep.pruning.name = {config.pruning.name} compares points by their validation loss, but "
            "evaluation.every_steps = 0: set it, for example to a twentieth of the steps"
        )
    points.refuse_shared_run()
    study = make_study(config, space, base.evaluation.every_steps)
    launcher = points.launcher(folder, base)
    points.taken.update({point.run_id: point.number for point in read_points(folder) if point.run_id})
    book = PointBook(folder)
    print(f"sweep {record.name} in {folder}", flush=True)
    try:
        code = Driver(config, space, book, points.plan, launcher, study, _say).run()
    finally:
        book.close()
        write_results(folder, record, book.points)
    print(summary(record, book.points, shutil.get_terminal_size(_WIDTH).columns), flush=True)
    print(f"      {draw_page(folder)}", flush=True)
    return code


def draw_page(folder: Path) -> str:
    """Writes the HTML page and figures of a sweep if matplotlib is installed; returns a line for the console."""
    try:
        from megads.tools.sweep.page import write_page
    except ModuleNotFoundError as error:
        return f"no report: {error.name} is not installed: pip install 'megads[report]'"
    return f"report: {write_page(folder)}"


class _Points:
    """Plans the points of a sweep: composes, checks and names the run of each."""

    def __init__(self, verb: Verb, composer: Composer, line: SweepLine, config: SweepConfig, flags: Sequence[str]):
        self._verb, self._composer, self._flags = verb, composer, flags
        self.line, self.config = line, config
        self.taken: dict[str, int] = {}
        self._machine: Machine | None = None
        self._cores: Sequence[int] = ()
        self._gpus: Sequence[str] = ()

    def any_config(self) -> Composed:
        """Returns the config of any point that composes, for the values that all points share.

        Raises:
            ConfigError: no point composes.
        """
        for number in range(_TRIES - 1):
            with suppress(ConfigError):
                return self._compose(draw(self.line.space, 0, number), 0)
        return self._compose(draw(self.line.space, 0, _TRIES - 1), 0)

    def name(self, base: Composed) -> str:
        """Returns the first part of the sweep's derived name."""
        name = base.config.run.name or base.choices.get("experiment") or base.choices.get("model") or "sweep"
        return name.replace("/", "-")

    def refuse_shared_run(self) -> None:
        """Refuses a run.id or run.dir shared by all points, which would then continue each other's run."""
        swept = set(self.line.space)
        for key in ("run.id", "run.dir"):
            given = [text for text in self.line.fixed if text.partition("=")[0] == key]
            if given and self.line.space and not {"run.id", "run.dir"} & swept:
                raise ConfigError(
                    f"{given[0]} is shared by several points of the sweep: remove it, so that every point gets its "
                    "own, or sweep over it too"
                )

    def _compose(self, assignment: Assignment, number: int) -> Composed:
        return self._composer.compose([*self.line.fixed, *overrides_of(assignment)], number)

    def plan(self, point: Point, seed_place: int) -> None:
        """Checks that a point can run, and assigns its run id; see `megads.tools.sweep.driver.Plan`."""
        composed = self._compose(point.assignment, point.number)
        config: RootConfig = composed.config
        overrides = [*_flag_words(self._flags), *self.line.fixed, *overrides_of(point.assignment)]
        if any("${hydra:" in text for text in overrides):
            overrides.append(f"hydra.job.num={point.number}")
        if seed_place:
            seed = config.train.seed + seed_place
            config = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
            overrides.append(f"train.seed={seed}")
        check_config(config)
        self._check_share(config)
        located, data = locate_data(config)
        placed = place(located, composed.choices)
        if self._machine is not None:
            known, _ = run_planner().choose_recompute(data.planned(placed), self._machine)
            run_planner().refuse_unfit(known, self._machine)
        own_dir = None if seed_place else config.run.dir
        if own_dir is None:
            overrides = [text for text in overrides if text.partition("=")[0] not in ("run.id", "run.dir")]
        point.run_id = self._own_id(str(placed.run.id), point.number)
        point.run_dir = own_dir or f"runs/{point.run_id}"
        point.overrides, point.ranks = [*overrides, f"run.id={point.run_id}"], config.parallel.world_size

    def _own_id(self, run_id: str, number: int) -> str:
        """Makes the run id unique: points that differ only in their length have the same derived name."""
        if self.taken.setdefault(run_id, number) == number:
            return run_id
        own = f"{run_id}-{number}"
        self.taken[own] = number
        return own

    def _check_share(self, config: RootConfig) -> None:
        """Checks that concurrent points do not share cores or GPUs."""
        parallel = self.config.parallel or 1
        if self.config.launcher is not LauncherName.local or parallel == 1:
            return
        cores, gpus = len(self._cores), len(self._gpus)
        threads = config.cluster.threads_per_rank or 1
        ranks = config.parallel.world_size
        have, what = (gpus, "GPUs") if gpus else (cores, "cores")
        need = parallel * (-(-ranks // config.cluster.ranks_per_gpu) if gpus else ranks * threads)
        if need > have:
            each = f"{ranks} ranks" + ("" if gpus else f" x {threads} threads")
            raise ConfigError(
                f"sweep.parallel = {parallel} concurrent points x {each} = {need}, but this machine has {have} {what}: "
                f"lower sweep.parallel to {max(1, parallel * have // need)}"
            )

    def launcher(self, folder: Path, base: RootConfig) -> Launcher:
        """Returns the launcher of the points; sets the machine whose memory they must fit."""
        config, command = self.config, ("-m", "megads.cli.main", self._verb.name)
        if config.launcher is not LauncherName.local:
            gib = base.cluster.gpu_memory_gib
            share = base.cluster.ranks_per_gpu
            self._machine = None if gib is None else Machine(int(gib * 2**30), per_gpu=True, ranks_per_gpu=share)
            if gib is None:
                _say("memory is not checked before submission: set cluster.gpu_memory_gib to the memory of one GPU")
            # Without a limit all points would be proposed before any has a result.
            most = config.parallel or (config.startup_trials if config.search is SearchName.bayes else None)
            if config.launcher is LauncherName.ray:
                return RayLauncher(
                    folder, command, config.ray_address, config.ray_cpus, config.ray_gpus, most, config.poll_s
                )
            options = shlex.split(config.sbatch_options)
            return SlurmLauncher(folder, _sbatch_script(config.sbatch), options, most, config.poll_s)
        parallel = config.parallel or 1
        self._cores, self._gpus = available_core_numbers(), visible_gpus()
        have, what = (len(self._gpus), "GPUs") if self._gpus else (len(self._cores), "cores")
        if parallel > max(1, have):
            raise ConfigError(f"sweep.parallel = {parallel}, but this machine has {have} {what}: lower it to {have}")
        machine = this_machine(ranks_per_gpu=base.cluster.ranks_per_gpu)
        # On a CPU, concurrent points share the machine's memory.
        self._machine = (
            machine if machine.per_gpu else dataclasses.replace(machine, available=machine.available // parallel)
        )
        shares = machine_shares(self._cores, self._gpus, parallel)
        return LocalLauncher(folder, command, shares, config.poll_s)

    def dry_run(self) -> int:
        """Dry run of all points that are known in advance; with search=bayes, of the startup trials."""
        known = known_points(self.config, self.line.space) or [
            draw(self.line.space, self.config.seed, number) for number in range(self.config.startup_trials)
        ]
        claimed: set[str] = set()
        results: list[tuple[str, int | None]] = []
        for number, assignment in enumerate(known):
            words = " ".join([*self.line.fixed, *overrides_of(assignment)])
            print(f"=== point {number}: {words}", flush=True)

            def show(assignment: Assignment = assignment, number: int = number) -> int:
                composed = self._compose(assignment, number)
                return self._verb.run(composed.config, Invocation(composed.choices, claimed))

            results.append((words, exit_code_of(self._verb.name, show)))
        print(sweep_table(results), flush=True)
        return next((code for _, code in results if code), EXIT_OK)


def _say(text: str) -> None:
    print(text, file=sys.stdout, flush=True)


def _split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the folders of --config-dir, and the overrides.

    Raises:
        ConfigError: another flag is given.
    """
    folders, overrides, words = [], [], iter(arguments)
    for word in words:
        flag, _, value = word.partition("=")
        if flag in _CONFIG_DIR_FLAGS:
            folders.append(value or next(words, ""))
        elif word.startswith("-"):
            raise ConfigError(f"{word} cannot be combined with -m: a sweep takes --config-dir and overrides only")
        else:
            overrides.append(word)
    return folders, overrides


def _flag_words(folders: Sequence[str]) -> list[str]:
    return [word for folder in folders for word in ("--config-dir", folder)]


def _sbatch_script(given: str) -> Path:
    """Returns the batch script to submit: the path as given, or relative to the checkout of megads.

    Raises:
        ConfigError: neither exists.
    """
    found = next((path for path in (Path(given), config_dir().parent / given) if path.is_file()), None)
    if found is None:
        raise ConfigError(f"sweep.sbatch = {given}: there is no such script; give the path of your site's script")
    return found
