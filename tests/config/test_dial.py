"""The dial: a recipe that follows from the number of layers, each value of which can be set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megads.cli.main import run
from megads.config.dial import FORMULAS, INPUTS, derive_recipe, explain_dial
from megads.config.frozen import load_frozen
from megads.config.root import RootConfig, check_config
from megads.errors import ConfigError
from tests.command import StartCommand, events_of, steps_of
from tests.corpus import VOCAB_SIZE
from tests.fork_server import ForkServer
from tests.test_minutes import composed
from tests.test_resume import last_step

_INPUTS: dict[str, Any] = dict.fromkeys(INPUTS) | {
    "dial.aspect_ratio": 64,
    "dial.tokens_per_parameter": 20.0,
    "dial.tflops": 0.1,
    "model.mlp": "gelu",
    "parallel.dp": 1,
    "parallel.pp": 1,
}


def recipe(depth: int, given: dict[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    """Values of a recipe by key; `__` in the name of an input means a dot."""
    changed = {name.replace("__", "."): value for name, value in inputs.items()}
    found = derive_recipe(_INPUTS | {"dial.depth": depth} | changed, given or {})
    return {key: item.value for key, item in found.items()}


def test_a_deeper_recipe_is_larger_in_every_respect_and_divides() -> None:
    """Catches a width that heads do not divide, a batch that micro-batches or ranks do not divide, and a size, batch or
    length that shrinks with the depth."""
    grows = ("num_layers", "hidden_size", "num_heads", "ffn_size", "seq_len", "tokens", "batch")
    last = dict.fromkeys(grows, 0)
    for depth in range(1, 65):
        for dp in (1, 2, 3, 8):
            found = {key.partition(".")[2]: value for key, value in recipe(depth, parallel__dp=dp).items()}
            assert found["hidden_size"] % found["num_heads"] == 0
            assert found["hidden_size"] // found["num_heads"] == 64
            assert found["global_batch_size"] % (found["micro_batch_size"] * dp) == 0
            assert 0.005 < found["weight_decay"] < 1.0 and found["lr"] == 0.012
            if dp == 1:
                found["batch"] = found["global_batch_size"] * found["seq_len"]
                assert all(found[name] >= last[name] for name in grows)
                assert found["tokens"] // found["batch"] > 100
                assert found["global_batch_size"] <= found["warmup_samples"] < found["tokens"] / found["seq_len"] / 20
                last = found


def test_known_recipes() -> None:
    """Catches a changed formula: the batch of DeepSeek's law, and that of GPT-2's size at 20 tokens a parameter."""
    twelve = recipe(12)
    assert (twelve["model.hidden_size"], twelve["model.num_heads"], twelve["train.seq_len"]) == (768, 12, 1024)
    assert twelve["train.tokens"] == 20 * 12 * 12 * 768**2
    assert twelve["train.global_batch_size"] * 1024 == 2**18
    assert recipe(12, dial__tokens_per_parameter=160.0)["train.global_batch_size"] == 512
    # 64 times the compute: 64^0.3271 is 3.9 times the batch.
    short, long = (recipe(4, dial__minutes=minutes)["train.global_batch_size"] for minutes in (1.0, 64.0))
    assert long == 4 * short


@pytest.mark.parametrize("key", FORMULAS)
def test_a_given_value_wins_and_leaves_earlier_ones(key: str) -> None:
    """Catches an override that a formula replaces, and one that changes values it does not follow from."""
    before = recipe(6)
    value = 2 * (before[key] or 3)
    after = recipe(6, {key: value})
    assert after[key] == value
    earlier = list(FORMULAS)[: list(FORMULAS).index(key)]
    assert all(after[other] == before[other] for other in earlier)


def test_later_values_follow_from_a_given_one() -> None:
    """Catches formulas that read the dial where the user has set a value."""
    found = recipe(6, {"model.hidden_size": 512})
    assert (found["model.num_heads"], found["model.ffn_size"]) == (8, 2048)
    assert found["train.tokens"] == 20 * 6 * 12 * 512**2
    quadruple = recipe(6, {"train.global_batch_size": 4 * recipe(6)["train.global_batch_size"]})
    assert quadruple["optim.lr"] == pytest.approx(2 * 0.012)
    # Batches of an eighth in as many steps are an eighth of the tokens: 1 / sqrt(8) for the batch, 2 for the tokens.
    eighth = recipe(
        6, {"train.global_batch_size": recipe(6, train__steps=5000)["train.global_batch_size"] // 8}, train__steps=5000
    )
    assert eighth["optim.lr"] == pytest.approx(0.012 * 2 / 8**0.5, rel=1e-3)
    assert recipe(6, train__steps=10)["train.tokens"] is None
    steps = recipe(6)["train.tokens"] // recipe(6)["train.global_batch_size"] // recipe(6)["train.seq_len"]
    for key in ("train.global_batch_size", "optim.lr", "optim.weight_decay", "schedule.warmup_samples"):
        assert recipe(6, train__steps=steps)[key] == pytest.approx(recipe(6)[key], rel=0.03)
    ten = recipe(6, train__steps=10)
    assert ten["train.global_batch_size"] < recipe(6)["train.global_batch_size"] // 4
    assert ten["schedule.warmup_samples"] == ten["train.global_batch_size"]
    assert recipe(6, model__mlp="swiglu")["model.ffn_size"] == 1024


def test_the_composed_config_has_the_recipe_and_overrides() -> None:
    """Catches interpolations that are not resolved, and reasons that name an override as derived or the reverse."""
    config = composed("experiment=dial", "dial.depth=12", "data.raw=x.txt", "model.hidden_size=512", "parallel.dp=2")
    check_config(config)
    assert (config.model.num_layers, config.model.num_heads, config.train.seq_len) == (12, 8, 1024)
    values = {item.key: item for item in explain_dial(config)}
    assert list(values) == list(FORMULAS)
    assert [key for key, item in values.items() if not item.is_derived] == ["model.hidden_size"]
    assert values["model.hidden_size"].why == "set by you"
    for key, item in values.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(config, section), name) == item.value


def test_files_of_the_user_override_the_recipe_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a dial that only gives way to the command line."""
    (tmp_path / "experiment").mkdir()
    own = tmp_path / "experiment" / "own.yaml"
    own.write_text(
        "# @package _global_\n# My own recipe.\ndefaults: [dial]\ndial: {depth: 6}\nmodel: {num_layers: 5}\n"
    )
    config = composed("experiment=own", f"hydra.searchpath=[file://{tmp_path}]")
    assert (config.model.num_layers, config.model.hidden_size, config.dial.depth) == (5, 320, 6)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["experiment=dial", "dial.depth=0"], "dial.depth = 0: must be from 1 to"),
        (["experiment=dial", "dial.depth=300"], "dial.depth = 300: must be from 1 to"),
        (["experiment=dial", "dial.depth=null"], "needs a number of layers"),
        (["experiment=dial", "dial.depth=2.5"], "dial.depth: .*2.5.*expected an integer"),
        (["experiment=dial", "dial.depth=deep"], "dial.depth: .*deep.*expected an integer"),
        (["experiment=dial", "dial.minutes=0"], "dial.minutes = 0.0: must be above 0"),
        (["experiment=dial", "dial.minutes=1", "train.tokens=5000"], "train.tokens = 5000 both set the length"),
        (["experiment=dial", "dial.minutes=1", "train.steps=5"], "train.steps = 5 both set the length"),
        (["dial.depth=4"], "dial.depth = 4 only applies with experiment=dial"),
        (["dial.minutes=4"], "dial.minutes = 4.0 only applies with experiment=dial"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(overrides: list[str], said: str) -> None:
    """Catches a traceback or an unreadable error of an interpolation, and a value that is silently ignored."""
    with pytest.raises(ConfigError, match=said):
        composed(*overrides)


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ([], (62_914_560, None, None)),
        (["dial.minutes=2"], (None, None, 2.0)),
        (["dial.minutes=2", "train.steps=auto"], (None, "auto", 2.0)),
        (["train.steps=50"], (None, 50, None)),
        (["train.tokens=1000000"], (1_000_000, None, None)),
        (["train.steps=auto"], (None, "auto", None)),
    ],
)  # fmt: skip
def test_one_length_is_set(overrides: list[str], length: tuple[object, ...]) -> None:
    """Catches a length that stays beside the one that the user gives, which every run would refuse."""
    config = composed("experiment=dial", *overrides)
    check_config(config)
    assert (config.train.tokens, config.train.steps, config.train.minutes) == length


def test_a_run_without_a_dial_has_no_recipe() -> None:
    """Catches reasons printed for runs that have no dial."""
    assert explain_dial(RootConfig()) == []


def test_a_plan_explains_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan of other values, or without their reasons."""
    assert run(["plan", "experiment=dial", "dial.depth=3", "model.vocab_size=512", "optim.lr=0.02", "device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "model.hidden_size=192" in out and "optim.lr=0.02 " in out and "set by you" in out


def test_a_dry_run_explains_the_recipe(corpus: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    """Catches a dry run without the reasons, and a bad depth that does not end with exit code 2."""
    arguments = ("train", "experiment=dial", "data.raw=null", f"data.train=[{{path: {corpus}}}]", "run.dry_run=true")
    found = fork_server(tmp_path, (*arguments, "dial.depth=2", "train.seq_len=64"))
    assert found.code == 0, found.err
    lines = [line.split() for line in found.out.splitlines()]
    assert ["train.seq_len=64", "set", "by", "you"] in lines
    assert [line[1] for line in lines if line and line[0] == "model.num_layers=2"] == ["dial.depth"]
    refused = fork_server(tmp_path, (*arguments, "dial.depth=0"))
    assert refused.code == 2 and "dial.depth = 0: must be from 1" in refused.err


@pytest.mark.distributed
def test_a_run_at_depth_2_resumes_with_the_same_values(corpus: Path, megads: StartCommand) -> None:
    """Catches interpolations in the frozen config, which ranks would read, and values that move at a resume."""
    run_dir = megads.folder / "run"
    command = (
        "train", "experiment=dial", "dial.depth=2", "dial.aspect_ratio=32", "data.raw=null",
        f"data.train=[{{path: {corpus}}}]", "data.split=[0.9,0.1]", f"model.vocab_size={VOCAB_SIZE}",
        "train.seq_len=16", "train.global_batch_size=4",
        "cluster.peak_tflops=1", "cluster.threads_per_rank=1", f"run.dir={run_dir}",
    )  # fmt: skip
    started = megads(*command, "train.steps=12", "checkpoint.every_steps=4")
    started.wait_for(lambda: last_step(run_dir) >= 5)
    started.kill_everything()
    first = load_frozen(run_dir / "config.yaml")
    assert "${" not in (run_dir / "config.yaml").read_text()
    ended = megads(*command, "train.steps=12", "checkpoint.every_steps=4").end()
    assert ended.code == 0, ended.err
    assert "experiment=dial: each value" in ended.out and "changed since the last start" not in ended.out
    assert ["train.global_batch_size=4", "set", "by", "you"] in [line.split() for line in ended.out.splitlines()]
    assert load_frozen(run_dir / "config.yaml") == first and first.model.num_layers == 2
    assert events_of(run_dir, "resume")[-1]["step"] == 4 and len(steps_of(run_dir)) == 12
