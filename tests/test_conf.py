"""Every YAML file composes with every verb that accepts it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from megads.cli.entry import config_dir
from megads.cli.main import VERBS, run
from megads.cli.verb import summary
from megads.config.root import (
    RootConfig,
    batch_size_schedule,
    check_config,
    learning_rate,
    planned_steps,
    run_spans,
)
from megads.evaluate.config import GenerateConfig
from megads.model.model_size import active_parameter_count, parameter_count
from megads.tools.plan.dry_run import plan_warnings
from megads.tools.report.config import ReportConfig
from megads.tools.sweep.config import TrainCommandConfig

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
    "olmo_1b": 1_176_764_416,
    "olmo_7b": 6_888_095_744,
    "olmo3_7b": 7_298_011_136,
    "pythia_160m": 162_322_944,
    "pythia_410m": 405_334_016,
    "pythia_2_8b": 2_775_208_960,
    "pythia_6_9b": 6_857_302_016,
    "gpt_neox_20b": 20_554_567_680,
    "stablelm_3b": 2_795_443_200,
    "smollm3_3b": 3_075_098_624,
    "gptj_6b": 6_050_882_784,
    "falcon_7b": 6_921_720_704,
    "mpt_7b": 6_649_286_656,
    "gemma3_1b": 999_885_952,
    "qwen2_5_0_5b": 494_032_768,
    "mixtral_8x7b": 46_702_792_704,
    "olmoe_1b_7b": 6_919_161_856,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
}
"""Exact parameter counts of the published configurations, from transformers."""
NO_RECIPE = {"gemma3_1b", "mixtral_8x7b", "olmo3_7b", "qwen2_5_0_5b"}
"""Presets of models whose training is not published, or has a schedule that megads lacks."""
ACTIVE = {"mixtral_8x7b": 12.9e9, "olmoe_1b_7b": 1.3e9, "qwen3_30b_a3b": 3.3e9, "qwen3_235b_a22b": 22e9}
"""Published numbers of parameters that process a token."""


def compose_verb(verb: str, *overrides: str) -> object:
    ConfigStore.instance().store(name=f"{verb}_schema", node=VERB_OBJECTS[verb].schema)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose(verb, list(overrides)))


_composed = functools.cache(compose_verb)


def compose_train(*overrides: str) -> RootConfig:
    config = copy.deepcopy(_composed("train", *overrides))
    assert isinstance(config, RootConfig)
    return config


def test_every_verb_has_a_primary_config() -> None:
    """Catches a verb without conf/<verb>.yaml, or a YAML of a removed verb."""
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
def test_every_cluster_option_composes(option: str) -> None:
    """Catches a cluster option whose file sets a kind other than its name."""
    assert compose_train(f"cluster={option}").cluster.kind == option


@pytest.mark.parametrize("verb", ["tokenizer", "preprocess"])
def test_data_verbs_compose(verb: str) -> None:
    """Catches a schema that Hydra cannot nest, and a defaults list in the wrong order."""
    config = compose_verb(
        verb, "input=[a.jsonl]", "output=out", *(["tokenizer=t.json"] if verb == "preprocess" else [])
    )
    assert isinstance(config, VERB_OBJECTS[verb].schema)


@pytest.mark.parametrize(("given", "runs"), [("run=runs/a", ["runs/a"]), ("run=[a,b]", ["a", "b"]), ("run=7", ["7"])])
def test_report_composes(given: str, runs: list[str]) -> None:
    """Catches a run id parsed as a number, and a list that stays an OmegaConf ListConfig."""
    config = compose_verb("report", given)
    assert isinstance(config, ReportConfig)
    assert config.runs == runs


def test_generate_composes() -> None:
    """Catches a schema that Hydra cannot nest, and defaults that its own check rejects."""
    config = compose_verb("generate", "run=runs/x", "prompts=[a, b]")
    assert isinstance(config, GenerateConfig) and config.prompts == ["a", "b"]
    config.check()


@pytest.mark.quick("demo-plan", "demo-verify_layout", "llama3_405b-plan")
@pytest.mark.parametrize("verb", ["plan", "verify_layout"])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_other_verbs_take_what_train_takes(experiment: str, verb: str) -> None:
    """Catches a plan.yaml or verify_layout.yaml whose groups or values differ from train.yaml's."""
    config = compose_verb(verb, f"experiment={experiment}", "train.seed=7")
    trained = compose_train(f"experiment={experiment}", "train.seed=7")
    assert isinstance(config, VERB_OBJECTS[verb].schema)
    names = [item.name for item in dataclasses.fields(RootConfig)]
    assert {name: getattr(config, name) for name in names} == {name: getattr(trained, name) for name in names}


@pytest.mark.parametrize("search", SEARCHES)
def test_every_search_composes_and_checks(search: str) -> None:
    """Catches a preset with keys that the schema lacks, one placed outside sweep, or one that its own check rejects."""
    config = compose_verb("train", f"hparams_search={search}", "sweep.parallel=2")
    assert isinstance(config, TrainCommandConfig)
    config.sweep.check()
    assert (config.sweep.search, config.sweep.parallel) == (search, 2)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains_with_settings_that_fit_it(model: str) -> None:
    """Catches a preset whose heads do not divide its hidden size, a key that the schema lacks, a wrong parameter count,
    and a preset without training settings, which would use the schema's sequence length, batch and learning rate."""
    config = compose_train(f"model={model}", "train.samples=100000000", "data.train=[{path: x}]")
    if model in PUBLISHED:
        assert parameter_count(config.model) == pytest.approx(PUBLISHED[model], rel=0.03)
    if model in EXACT:
        assert parameter_count(config.model) == EXACT[model]
    assert plan_warnings(config) == []
    widest = 1 + (config.model.num_heads % 2 == 0)  # Falcon 7B has 71 heads
    for tp, dp in ((1, 1), (1, 2), (widest, 4)):
        check_config(dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tp=tp, dp=dp)))


@pytest.mark.parametrize("model", ACTIVE)
def test_models_have_their_published_active_parameters(model: str) -> None:
    """Catches a count of active parameters with experts that a token does not use, or without other parameters."""
    config = compose_train(f"model={model}", "train.samples=100000000", "data.train=[{path: x}]").model
    assert active_parameter_count(config) == pytest.approx(ACTIVE[model], rel=0.02)
    config.moe.top_k = config.moe.num_experts
    assert active_parameter_count(config) == parameter_count(config)


def test_a_users_preset_without_a_package_header_composes(tmp_path: Path) -> None:
    """Catches a user's preset without `@package _global_` that is not placed under model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("num_layers: 5\n")
    config = compose_train("model=mine", f"hydra.searchpath=[{tmp_path}]")
    assert (config.model.num_layers, config.train.seq_len) == (5, RootConfig().train.seq_len)


def test_bloom_176b_is_the_published_run() -> None:
    """Catches an experiment whose weight initialization or layout differs from the paper's."""
    config = compose_train("experiment=bloom_176b")
    assert config.model.weight_std == pytest.approx(0.0048, abs=5e-5)
    assert config.parallel.world_size == 384


def test_llama3_405b_is_the_published_run() -> None:
    """Catches phases whose batches, ends or schedule differ from the paper's, and another number of GPUs."""
    config = compose_train("experiment=llama3_405b")
    spans = run_spans(config)
    assert [span.global_batch_size * span.seq_len for span in spans] == [4 * 2**20, 8 * 2**20, 16 * 2**20]
    ends = [span.first_token for span in spans[1:]]
    assert ends == pytest.approx([252e6, 2.87e12], rel=2e-3)
    rate, batches = learning_rate(config), batch_size_schedule(config)
    assert rate(batches.samples_after(8000)) == 8e-5 and rate(batches.samples_after(1_200_000)) == 8e-7
    assert config.parallel.world_size == 8192


@dataclass(frozen=True)
class Recipe:
    """A published run, in the units of its paper. The first lines of the recipe say which missing values are assumed.

    Attributes:
        gpus: number of GPUs of the layout.
        tokens: tokens of the whole run.
        batches: tokens per step, first and last; of every phase if the run has phases.
        lr: peak learning rate.
        last_lr: learning rate of the last step.
    """

    gpus: int
    tokens: float
    batches: tuple[float, ...]
    lr: float
    last_lr: float


M = 2**20
RECIPES = {
    "bloom_560m": Recipe(32, 450e9, (192 * 2048, M / 2), 3e-4, 1e-5),
    "bloom_1b1": Recipe(32, 450e9, (192 * 2048, M / 2), 2.5e-4, 1e-5),
    "bloom_1b7": Recipe(64, 450e9, (192 * 2048, M), 2e-4, 1e-5),
    "bloom_3b": Recipe(128, 450e9, (192 * 2048, M), 1.6e-4, 1e-5),
    "bloom_7b1": Recipe(128, 450e9, (192 * 2048, M), 1.2e-4, 1e-5),
    "bloom_176b": Recipe(384, 450e9, (192 * 2048, 4 * M), 6e-5, 6e-6),
    "gpt3_125m": Recipe(8, 300e9, (2**15, M / 2), 6e-4, 6e-5),
    "gpt3_350m": Recipe(8, 300e9, (2**15, M / 2), 3e-4, 3e-5),
    "gpt3_760m": Recipe(8, 300e9, (2**15, M / 2), 2.5e-4, 2.5e-5),
    "gpt3_1b3": Recipe(8, 300e9, (2**15, M), 2e-4, 2e-5),
    "gpt3_2b7": Recipe(16, 300e9, (2**15, M), 1.6e-4, 1.6e-5),
    "gpt3_6b7": Recipe(32, 300e9, (2**15, 2 * M), 1.2e-4, 1.2e-5),
    "gpt3_13b": Recipe(64, 300e9, (2**15, 2 * M), 1e-4, 1e-5),
    "gpt3_175b": Recipe(1536, 300e9, (2**15, 3 * M), 6e-5, 6e-6),
    "llama3_8b": Recipe(256, 15e12, (4 * M, 8 * M, 16 * M), 3e-4, 1.55e-5),
    "llama3_70b": Recipe(1024, 15e12, (4 * M, 8 * M, 16 * M), 1.5e-4, 7.75e-6),
    "llama3_405b": Recipe(8192, 15.6e12, (4 * M, 8 * M, 16 * M), 8e-5, 2.6e-6),
    "megascale_175b": Recipe(12288, 300e9, (12 * M, 12 * M), 2.2e-3, 2.2e-4),
    "olmo2_1b": Recipe(64, 4.05e12, (2 * M, 2 * M), 4e-4, 0.0),
    "olmo2_7b": Recipe(128, 3.945e12, (4 * M, 4 * M), 3e-4, 0.0),
    "olmo_1b": Recipe(64, 3.101e12, (4 * M, 4 * M), 4e-4, 4e-5),
    "olmo_7b": Recipe(128, 2e12, (4 * M, 4 * M), 3e-4, 3e-5),
    "pythia_160m": Recipe(32, 299.892736e9, (2 * M, 2 * M), 6e-4, 6e-5),
    "pythia_410m": Recipe(32, 299.892736e9, (2 * M, 2 * M), 3e-4, 3e-5),
    "pythia_2_8b": Recipe(64, 299.892736e9, (2 * M, 2 * M), 1.6e-4, 1.6e-5),
    "pythia_6_9b": Recipe(128, 299.892736e9, (2 * M, 2 * M), 1.2e-4, 1.2e-5),
    "gpt_neox_20b": Recipe(96, 471.8592e9, (3 * M, 3 * M), 9.7e-5, 9.7e-6),
    "stablelm_3b": Recipe(256, 4.00556e12, (4 * M, 4 * M), 3.2e-4, 1.28e-5),
    "gptj_6b": Recipe(64, 402.128896e9, (M, M), 1.2e-4, 1.2e-5),
    "falcon_7b": Recipe(384, 1.5e12, (192 * 2048, 2304 * 2048), 6e-4, 1.2e-5),
    "mpt_7b": Recipe(64, 134.0080128e9, (2 * M, 2 * M), 1.2e-4, 1.2e-5),
    "smollm3_3b": Recipe(384, 11.13588e12, (2_359_296,) * 3, 2e-4, 0.0),
    "qwen3_0_6b": Recipe(64, 36e12, (4 * M, 4 * M, 4 * M), 1e-3, 1e-4),
    "qwen3_1_7b": Recipe(64, 36e12, (4 * M, 4 * M, 4 * M), 6e-4, 6e-5),
    "qwen3_4b": Recipe(128, 36e12, (4 * M, 4 * M, 4 * M), 4e-4, 4e-5),
    "qwen3_8b": Recipe(128, 36e12, (4 * M, 4 * M, 4 * M), 3e-4, 3e-5),
    "qwen3_14b": Recipe(256, 36e12, (8 * M, 8 * M, 8 * M), 2e-4, 2e-5),
    "qwen3_32b": Recipe(512, 36e12, (8 * M, 8 * M, 8 * M), 1.5e-4, 1.5e-5),
    "qwen3_30b_a3b": Recipe(128, 36e12, (4 * M, 4 * M, 4 * M), 4e-4, 4e-5),
    "qwen3_235b_a22b": Recipe(512, 36e12, (8 * M, 8 * M, 8 * M), 2e-4, 2e-5),
    "olmoe_1b_7b": Recipe(256, 5.133e12, (4 * M, 4 * M), 4e-4, 0.0),
}
_REFERENCES = ("bloom", "llama", "moe", "muon", "sft")
OWN = {"demo", "dial", "first", "moe_demo", "sft", *(f"reference_{name}" for name in _REFERENCES)}
"""Experiments of megads' own, not from a publication."""


@pytest.mark.quick("bloom_3b", "gpt3_175b", "llama3_8b", "megascale_175b", "olmo2_7b", "qwen3_32b")
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_the_published_run(name: str) -> None:
    """Catches a recipe whose length, batch, ramp, learning rate, last learning rate or number of GPUs is wrong."""
    recipe, config = RECIPES[name], compose_train(f"experiment={name}")
    batches, spans, rate = batch_size_schedule(config), run_spans(config), learning_rate(config)
    samples = batches.samples_after(planned_steps(config))
    if spans:
        found = [span.global_batch_size * span.seq_len for span in spans]
        tokens = spans[-1].first_token + (samples - spans[-1].first_sample) * spans[-1].seq_len
    else:
        found = [batches.at(0) * config.train.seq_len, config.train.global_batch_size * config.train.seq_len]
        tokens = samples * config.train.seq_len
    assert found == list(recipe.batches)
    assert tokens == pytest.approx(recipe.tokens, rel=2e-3)
    assert config.optim.lr == recipe.lr
    assert rate(samples) == pytest.approx(recipe.last_lr, rel=0.01, abs=1e-15)
    assert config.parallel.world_size == recipe.gpus


def test_every_published_preset_has_its_recipe() -> None:
    """Catches a preset without a published run, and a recipe that is not compared with the published values."""
    assert set(EXPERIMENTS) - OWN == set(RECIPES) == (set(PUBLISHED) | set(EXACT)) - NO_RECIPE


@pytest.mark.parametrize(("name", "published"), [("olmo2_1b", 7.4487e-5), ("olmo2_7b", 6.1499e-5)])
def test_olmo2_anneals_from_where_its_first_phase_ends(name: str, published: float) -> None:
    """Catches a cosine of the wrong length: the learning rate that Ai2 gives for the second phase is that of the first
    phase's last step, which follows from warmup, decay and tokens."""
    config = compose_train(f"experiment={name}")
    last = run_spans(config)[1].first_sample
    assert learning_rate(config)(last) == pytest.approx(published, rel=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_its_gpus(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a layout that cannot be planned, or that does not fit into its GPUs' memory, in any phase."""
    config = compose_train(f"experiment={name}")
    memory_gib = config.cluster.gpu_memory_gib
    a100 = "a100_40gb" if memory_gib is not None and memory_gib < 40 else "a100_80gb"
    device = "h100" if name.startswith(("llama3", "olmo", "qwen3", "smollm3")) else a100
    assert run(["plan", f"experiment={name}", f"device={device}", "json=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    # Small experts, one GEMM each, and all-to-alls that nothing hides: the plan of Qwen3-235B-A22B is 7%.
    least = 0.05 if config.model.moe.enabled else 0.2
    assert plan["machine"]["fits"] and least < plan["mfu"] < 0.7
    assert len(plan.get("training_phases") or ()) == len(run_spans(config))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_is_a_small_delta_that_checks(experiment: str) -> None:
    """Catches an experiment that copies a whole config, and one that check_config rejects."""
    lines = (CONF / "experiment" / f"{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert len(lines) <= 20
    check_config(compose_train(f"experiment={experiment}"))


def test_the_demo_fits_a_laptop() -> None:
    """Catches a demo that is too large for a laptop."""
    config = compose_train("experiment=demo")
    assert 5e6 < parameter_count(config.model) < 7e6
    assert config.parallel.world_size == config.parallel.dp == 2


def test_command_line_wins_over_experiment_and_model() -> None:
    """Catches an experiment that overrides the command line, or is overridden by the primary config."""
    config = compose_train("experiment=demo", "model.num_layers=3", "train.seed=7")
    assert (config.model.num_layers, config.train.seed, config.train.seq_len) == (3, 7, 256)


def test_wheel_carries_conf() -> None:
    """Catches a wheel without the configs."""
    pyproject = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 'conf = "megads/conf"' in pyproject


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_every_yaml_explains_itself(path: Path) -> None:
    """Catches a file without the first comment, which --help and tab completion show, and two files with the same."""
    explanation = summary(path)
    assert 10 <= len(explanation) <= 100
    assert [other for other in CONF.rglob("*.yaml") if summary(other) == explanation] == [path]
