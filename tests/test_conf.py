"""Every YAML file composes, with every verb that can take it."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from megads.cli.entry import config_dir
from megads.cli.main import VERBS
from megads.cli.train import TrainCommandConfig
from megads.cli.verb import summary
from megads.config import RootConfig, batch_size_schedule, check_config, learning_rate, run_spans
from megads.evaluate.config import GenerateConfig
from megads.launch.dry_run_warnings import plan_warnings
from megads.plan.model_size import parameter_count
from megads.tools.report.config import ReportConfig

CONF = config_dir()
VERB_OBJECTS = {verb: importlib.import_module(f"megads.cli.{verb}").VERB for verb in VERBS}
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
SEARCHES = sorted(path.stem for path in (CONF / "hparams_search").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))

# Published sizes, in parameters; a preset with a wrong width or depth is off by far more than 3%.
PUBLISHED = {
    "bloom_560m": 559e6,
    "bloom_1b1": 1.065e9,
    "bloom_1b7": 1.722e9,
    "bloom_3b": 3.003e9,
    "bloom_7b1": 7.069e9,
    "gpt3_125m": 125e6,
    "gpt3_350m": 356e6,
    "gpt3_760m": 760e6,
    "gpt3_1b3": 1.316e9,
    "gpt3_2b7": 2.65e9,
    "gpt3_6b7": 6.66e9,
    "gpt3_13b": 12.85e9,
    "gpt3_175b": 174.6e9,
    "megascale_175b": 175e9,
}
EXACT = {
    "bloom_176b": 176_247_271_424,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
}
"""Parameters to the last one, as transformers counts the published configurations."""


def compose_verb(verb: str, *overrides: str) -> object:
    ConfigStore.instance().store(name=f"{verb}_schema", node=VERB_OBJECTS[verb].schema)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose(verb, list(overrides)))


def compose_train(*overrides: str) -> RootConfig:
    config = compose_verb("train", *overrides)
    assert isinstance(config, RootConfig)
    return config


def test_every_verb_has_a_primary_config() -> None:
    """Catches a verb without conf/<verb>.yaml, or a YAML for a verb that is gone."""
    assert set(VERBS) == {verb.name for verb in VERB_OBJECTS.values()} == {path.stem for path in CONF.glob("*.yaml")}


def test_every_yaml_is_covered() -> None:
    """Catches a config group that no test here composes."""
    assert {path.name for path in CONF.iterdir() if path.is_dir()} == {
        "model",
        "experiment",
        "cluster",
        "hparams_search",
    }


@pytest.mark.parametrize("option", ["local", "slurm"])
def test_every_cluster_composes(option: str) -> None:
    """Catches a cluster option whose file sets another kind than its name."""
    assert compose_train(f"cluster={option}").cluster.kind == option


@pytest.mark.parametrize("verb", ["tokenizer", "preprocess"])
def test_data_verbs_compose(verb: str) -> None:
    """Catches a schema that Hydra cannot nest and a defaults list out of order."""
    config = compose_verb(
        verb, "input=[a.jsonl]", "output=out", *(["tokenizer=t.json"] if verb == "preprocess" else [])
    )
    assert isinstance(config, VERB_OBJECTS[verb].schema)


@pytest.mark.parametrize(("given", "runs"), [("run=runs/a", ["runs/a"]), ("run=[a,b]", ["a", "b"]), ("run=7", ["7"])])
def test_report_composes(given: str, runs: list[str]) -> None:
    """Catches a run whose id reads as a number, and a list that stays OmegaConf's own."""
    config = compose_verb("report", given)
    assert isinstance(config, ReportConfig)
    assert config.runs == runs


def test_generate_composes() -> None:
    """Catches a schema that Hydra cannot nest, and defaults that its own check refuses."""
    config = compose_verb("generate", "run=runs/x", "prompts=[a, b]")
    assert isinstance(config, GenerateConfig) and config.prompts == ["a", "b"]
    config.check()


@pytest.mark.parametrize("verb", ["plan", "verify_layout"])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_other_verbs_take_what_train_takes(experiment: str, verb: str) -> None:
    """Catches a plan.yaml or verify_layout.yaml whose groups or values drifted from those of train.yaml."""
    config = compose_verb(verb, f"experiment={experiment}", "train.seed=7")
    trained = compose_train(f"experiment={experiment}", "train.seed=7")
    assert isinstance(config, VERB_OBJECTS[verb].schema)
    names = [item.name for item in dataclasses.fields(RootConfig)]
    assert {name: getattr(config, name) for name in names} == {name: getattr(trained, name) for name in names}


@pytest.mark.parametrize("search", SEARCHES)
def test_every_search_composes_and_checks(search: str) -> None:
    """Catches a preset whose keys the schema lacks, that lands beside sweep, or that its own check refuses."""
    config = compose_verb("train", f"hparams_search={search}", "sweep.parallel=2")
    assert isinstance(config, TrainCommandConfig)
    config.sweep.check()
    assert (config.sweep.search, config.sweep.parallel) == (search, 2)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_composes_and_checks(model: str) -> None:
    """Catches a preset whose heads do not divide its width, a key the schema lacks, and a wrong size."""
    config = compose_train(f"model={model}", "train.steps=1", "data.train=[{path: x}]")
    check_config(config)
    if model in PUBLISHED:
        assert parameter_count(config.model) == pytest.approx(PUBLISHED[model], rel=0.03)
    if model in EXACT:
        assert parameter_count(config.model) == EXACT[model]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_with_settings_that_fit_it(model: str) -> None:
    """Catches a preset of a shape alone, which trains with the schema's sequences, batch and rate."""
    config = compose_train(f"model={model}", "train.samples=100000000", "data.train=[{path: x}]")
    assert plan_warnings(config) == []
    for tp, dp in ((1, 2), (2, 4)):
        check_config(dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tp=tp, dp=dp)))


def test_a_model_that_is_only_a_shape_composes(tmp_path: Path) -> None:
    """Catches presets of one's own, without `@package _global_`, that no longer land in model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("num_layers: 5\n")
    config = compose_train("model=mine", f"hydra.searchpath=[{tmp_path}]")
    assert (config.model.num_layers, config.train.seq_len) == (5, RootConfig().train.seq_len)


def test_bloom_176b_is_the_published_run() -> None:
    """Catches an experiment whose initial weights or layout are not those of the paper."""
    config = compose_train("experiment=bloom_176b")
    assert config.model.weight_std == pytest.approx(0.0048, abs=5e-5)
    assert config.parallel.world_size == 384


def test_llama3_405b_is_the_published_run() -> None:
    """Catches stages with other batches, ends or a shorter schedule than the paper's, and a layout of other GPUs."""
    config = compose_train("experiment=llama3_405b")
    spans = run_spans(config)
    assert [span.global_batch_size * span.seq_len for span in spans] == [4 * 2**20, 8 * 2**20, 16 * 2**20]
    ends = [span.first_token for span in spans[1:]]
    assert ends == pytest.approx([252e6, 2.87e12], rel=2e-3)
    rate, batches = learning_rate(config), batch_size_schedule(config)
    assert rate(batches.samples_after(8000)) == 8e-5 and rate(batches.samples_after(1_200_000)) == 8e-7
    assert config.parallel.world_size == 8192


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_a_small_delta_that_checks(experiment: str) -> None:
    """Catches an experiment that copies a whole config, and one that check_config would refuse on the cluster."""
    lines = (CONF / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert len(lines) <= 20
    check_config(compose_train(f"experiment={experiment}"))


def test_demo_is_small() -> None:
    """Catches a demo that outgrew a laptop."""
    config = compose_train("experiment=demo")
    assert 5e6 < parameter_count(config.model) < 7e6
    assert config.parallel.world_size == config.parallel.dp == 2


def test_command_line_wins_over_experiment_and_model() -> None:
    """Catches an experiment that overrides the command line, or is overridden by the primary config."""
    config = compose_train("experiment=demo", "model.num_layers=3", "train.seed=7")
    assert (config.model.num_layers, config.train.seed, config.train.seq_len) == (3, 7, 256)


def test_wheel_carries_conf() -> None:
    """Catches packaging that leaves an installed megads without its configs."""
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 'conf = "megads/conf"' in pyproject


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_yaml_explains_itself(path: Path) -> None:
    """Catches a file without the first comment that --help and tab completion show, and two with the same one."""
    explanation = summary(path)
    assert 10 <= len(explanation) <= 100
    assert [other for other in CONF.rglob("*.yaml") if summary(other) == explanation] == [path]
