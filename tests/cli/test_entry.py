"""The command line with real Hydra in forked processes; text values arrive as they were typed."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from megads.cli.composition import quote_texts, text_keys
from megads.cli.entry import require_values
from megads.cli.main import run
from megads.cli.values import as_text, expand_home
from megads.errors import ConfigError, exit_codes_text
from megads.tools.sweep.config import TrainCommandConfig
from tests.fork_server import ForkServer, Outcome, left_by_commands

REPOSITORY = Path(__file__).parents[2]
DATA = "data.train=[{path: x}]"


Run = Callable[..., Outcome]


@pytest.fixture
def megads(tmp_path: Path, fork_server: ForkServer) -> Run:
    """Runs a command line in tmp_path."""
    return lambda *arguments: fork_server(tmp_path, arguments)


def test_help_lists_every_verb_and_version_is_printed(megads: Run, tmp_path: Path) -> None:
    """Catches a command that the help does not list."""
    help_text = megads("--help")
    assert help_text.code == 0
    assert all(verb in help_text.out for verb in ("train", "preprocess", "tokenizer"))
    assert megads("--version").out.startswith("megads 0.") and megads("train", "--version").out.startswith("megads 0.")


def test_unknown_verb_names_the_nearest(megads: Run, tmp_path: Path) -> None:
    """Catches a typo in the command that ends in a traceback."""
    result = megads("trian")
    assert result.code == 2
    assert "did you mean train?" in result.err


def test_verb_help_says_keys_examples_and_exit_codes(megads: Run, tmp_path: Path) -> None:
    """Catches Hydra's default help: the config without examples and exit codes."""
    result = megads("train", "--help")
    assert result.code == 0
    for part in ("parallel.tp", "experiment=<option>", "Examples:"):
        assert part in result.out
    assert exit_codes_text() in " ".join(result.out.split())


def test_cfg_job_prints_the_config_and_leaves_no_files(megads: Run, tmp_path: Path) -> None:
    """Catches stray outputs/ folders."""
    result = megads("train", "experiment=demo", "--cfg", "job", "--resolve")
    assert result.code == 0
    assert "hidden_size: 256" in result.out
    assert left_by_commands(tmp_path) == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.num_layer=3", "did you mean model.num_layers?"),
        ("lr=3", "did you mean optim.lr?"),
        ("+model.depth=3", "unknown key model.depth"),
        ("schedule.warmup_ratio=0.1", "unknown key schedule.warmup_ratio: did you mean schedule.warmup_share?"),
        ("optim.lr=abc", "optim.lr: Value 'abc'"),
        ("model=bloom176b", "did you mean bloom_176b?"),
        ("experiment=dmeo", "did you mean demo?"),
        ("model.position=absolute", "expected one of [alibi, learned, rope, none]"),
        ("data.train=[{}]", "data.train[0].path has no value"),
        ("data.train=[{pth: x}]", "did you mean path?"),
        ("data.train=[{", "cannot read the override"),
        ("train.steps=1,2", "for a list write 'train.steps=[1,2]', for a text \"train.steps='1,2'\" with both"),
        ("train.steps=1,2", "--multirun"),
        ("train.steps=${nope}", "'nope' not found"),
        ("optim=adam", "optim is a section, not a config group: did you mean optim.name=adam?"),
        ("train=1", "train is a section, not a config group; it has global_batch_size,"),
        ("train.seq_len=4k", "train.seq_len = 4k: is 4000 or 4096 meant? Write the number, or 4Ki"),
        ("train.tokens=1.5", "train.tokens: Value '1.5'"),
        ("hydra.run.dir=x", "hydra.run.dir has no effect here: run.dir=<folder> sets the directory of a run"),
        ("hydra/sweeper=basic", "hydra/sweeper has no effect here: hparams_search=grid|random|bayes"),
        ("~hydra", "the only Hydra setting that can be changed is hydra.searchpath"),
        ("--config-path=nowhere", "there is no train.yaml in it"),
        ("cluster.srun_options.a.b=1", "do not compose (TypeError"),
        ("parallel.layer_costs.parallel.layer_costs=/dev/null", "do not compose (AssertionError"),
    ],
)
def test_composition_errors_are_one_readable_message(megads: Run, tmp_path: Path, override: str, expected: str) -> None:
    """Catches exit 1 and tracebacks for a user's typo, and suggestions of keys that do not exist."""
    result = megads("train", override)
    assert result.code == 2
    assert expected in result.err
    assert "Traceback" not in result.err
    assert left_by_commands(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["tokenizer", "input=[{path: t.txt, weight: -1}]", "output=x"],
            "{'path': 't.txt', 'weight': -1} is not a text",
        ),
        (
            ["preprocess", "input=[{}]", "tokenizer=x", "output=x"],
            "input: {} is not a text; expected a list of texts",
        ),
        (["preprocess", "input=[t.txt]", "tokenizer=x", f"output={'a' * 300}"], "File name too long: choose another"),
    ],
)
def test_values_of_no_use_are_refused_readably(
    megads: Run, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    """Catches a traceback for values that Hydra accepts but that no command can use."""
    (tmp_path / "t.txt").write_text("text\n")
    result = megads(*arguments)
    assert result.code == 2 and expected in result.err and "Traceback" not in result.err


def test_an_error_in_a_config_file_names_the_file(megads: Run, tmp_path: Path) -> None:
    """Catches a message that does not name the file of a wrong key."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nmodel: {num_layer: 3}\n")
    result = megads("train", "--config-dir", str(tmp_path), "experiment=mine")
    assert result.code == 2
    assert "experiment/mine.yaml: unknown key model.num_layer: did you mean model.num_layers?" in result.err


def composed(result: Outcome) -> Any:
    assert result.code == 0, result.err
    return OmegaConf.create(result.out)


def test_users_configs_in_a_conf_folder_are_explained(megads: Run, tmp_path: Path) -> None:
    """Catches a message to Hydra users that their file does not exist, or that the section experiment is unknown."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ntrain: {steps: 7}\n")
    (folder / "bare.yaml").write_text("train: {steps: 7}\n")
    assert (
        "conf/experiment/mine.yaml is not in the search path: add --config-dir conf"
        in megads("train", "experiment=mine").err
    )
    own = ("--config-dir", "conf", "--cfg", "job")
    assert composed(megads("train", "experiment=mine", *own)).train.steps == 7
    refused = megads("train", "experiment=bare", *own)
    assert refused.code == 2 and "its first line must be `# @package _global_`" in refused.err


def test_a_users_primary_config_composes_with_megads_groups(megads: Run, tmp_path: Path) -> None:
    """Catches --config-path resolved against Hydra's own folder, megads' groups lost, or outputs/ created."""
    (tmp_path / "mine").mkdir()
    text = "defaults: [train_schema, {model: tiny}, {experiment: null}, _self_]\ntrain: {tokens: 1e6}\n"
    (tmp_path / "mine" / "train.yaml").write_text(text)
    (tmp_path / "mine" / "other.yaml").write_text("defaults: [train, _self_]\ntrain: {seq_len: 64}\n")
    config = composed(megads("train", "--config-path", "mine", "experiment=demo", "--cfg", "job"))
    assert (config.train.tokens, config.model.hidden_size) == (1_000_000, 256)
    config = composed(megads("train", "--config-path=mine", "--config-name=other", "--cfg", "job"))
    assert (config.train.tokens, config.train.seq_len, config.model.num_layers) == (1_000_000, 64, 2)
    refused = megads("train", "--config-path=mine", "train.steps=1", "data.raw=nowhere")
    assert refused.code == 2 and "exactly one of steps, samples, tokens, epochs and minutes" in refused.err
    assert left_by_commands(tmp_path) == ["mine"]


def test_counts_may_be_written_in_short_form(megads: Run, tmp_path: Path) -> None:
    """Catches 1e9 rejected as a float, and a suffix k accepted although it may mean 1000 or 1024."""
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrain: {samples: 2k, global_batch_size: 1_024}\nmodel: {max_seq_len: 8Ki}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    words = ("--config-dir", ".", "--cfg", "job")
    config = composed(megads("train", "experiment=mine", *words))
    assert (config.train.samples, config.train.global_batch_size, config.model.max_seq_len) == (2000, 1024, 8192)
    for written, value in {"1e9": 10**9, "1.5M": 1_500_000, "3T": 3 * 10**12, "2B": 2 * 10**9, "7": 7}.items():
        assert composed(megads("train", f"train.tokens={written}", *words)).train.tokens == value
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain: {seq_len: 4k}\n")
    refused = megads("train", "experiment=mine", *words)
    assert refused.code == 2 and "4000 or 4096" in refused.err and "mine.yaml" in refused.err


def test_a_command_without_flags_composes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second composition of the config, as by hydra.main: a tenth of a second in every command."""
    composed = []
    compose = Hydra.compose_config
    monkeypatch.setattr(Hydra, "compose_config", lambda *args, **given: composed.append(1) or compose(*args, **given))
    assert run(["plan", "model=bloom_560m"]) == 0
    assert composed == [1]


def test_a_dry_run_of_a_huge_batch_stays_short(megads: Run, tmp_path: Path) -> None:
    """Catches a memory plan that lists every micro-batch of a step."""
    size = (
        "run.check_memory=false",
        "train.global_batch_size=4000000000",
        "train.micro_batch_size=2",
        "train.steps=1000000000",
    )
    result = megads("train", "experiment=demo", "parallel.pp=2", "parallel.dp=1", "run.dry_run=true", *size)
    assert result.code == 0 and "2000000000 micro-batches" in result.out and "is not simulated" in result.out


def test_text_beside_its_runs_is_read_without_the_runs(megads: Run, tmp_path: Path) -> None:
    """Catches data.raw=. reading the runs/ of its first start: other files, another hash, and a new run from step 0."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"A line of text, of number {number}.\n" * 400)
    train = ("train", "data.raw=.", "train.steps=2", "ops.impl=torch")
    first = megads(*train, "run.prepare_only=true")
    # A run directory as a start leaves it, and a copy that a user has moved.
    for run_dir in (tmp_path / "runs" / "tiny-1", tmp_path / "moved"):
        run_dir.mkdir()
        for name in ("config.yaml", "events.jsonl", "notes.txt"):
            (run_dir / name).write_text("train: {}\n")
    second = megads(*train, "run.prepare_only=true")
    assert (first.code, second.code) == (0, 0), second.err
    [named, again_named] = [
        [line for line in run.out.splitlines() if line.startswith("run ")] for run in (first, second)
    ]
    assert named == again_named and "runs/tiny-" in named[0]
    again = megads(*train, "run.dry_run=true")
    said = re.search(r"made before: .*skipped: (.*)", again.out)
    assert said is not None and "run directories" in said[1] and "runs" in said[1].split(", "), again.out


def test_text_alone_starts_a_run_of_a_chosen_length(megads: Run, tmp_path: Path) -> None:
    """Catches `megads train data.raw=notes` refused for want of a length, and a length that replaces a given one."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("A line of text.\n" * 400)
    told = megads("train", "data.raw=notes", "run.dry_run=true")
    assert told.code == 0 and "length     not known before the data is there" in told.out, told.err
    told = megads("train", "data.raw=notes", "train.steps=7", "run.dry_run=true")
    assert told.code == 0 and "7 steps" in told.out, told.err
    told = megads("train", "train.seq_len=64", DATA, "run.dry_run=true")
    assert told.code == 2 and "exactly one of steps" in told.err


@pytest.mark.parametrize("value", ["~/notes", "[~/notes]", "[none.txt, ~/notes]"])
def test_home_is_expanded_in_a_value(megads: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Catches data.raw=~/notes, in which no shell expands ~ after a key with a dot, and which Hydra cannot parse."""
    result = megads("train", f"data.raw={value}", "train.steps=2", "run.dry_run=true")
    assert result.code == 3 and "Lexer" not in result.err
    assert ("none.txt" in result.err) or re.search(r"data.raw /.*/notes: matches no file", result.err)


def test_ids_and_names_stay_what_was_typed(megads: Run) -> None:
    """Catches the short commit 3e12345 as the name of a run, which Hydra parses as the number infinity, a folder named
    by a number, and numbers of other keys that become texts."""
    given = ("run.id=3e12345", "run.name=1_000", "data.raw=[1e5, b, 1.50]", "optim.lr=1e-4", "train.steps=1_0")
    shown = megads("train", "--cfg", "job", *given)
    assert shown.code == 0, shown.err
    config = OmegaConf.create(shown.out)
    assert (config.run.id, config.run.name, config.data.raw) == ("3e12345", "1_000", ["1e5", "b", "1.50"])
    assert (config.optim.lr, config.train.steps) == (1e-4, 10)
    texts = text_keys(TrainCommandConfig)
    for argument in ("run.id='1e5'", "run.id=${run.name}", "run.id=null", "run.id=a,b", "data.train=[{path: 1}]"):
        assert quote_texts(argument, texts) == argument


def test_home_is_not_expanded_in_prompts_or_deletions() -> None:
    """Catches ~ expanded in a prompt or in a Hydra deletion."""
    for argument in ("~model", "prompt='a, ~/b'", 'data.raw="~/x"', "data.raw=a~/b", "a=b~", "--config-dir=x"):
        assert expand_home(argument) == argument
    home = str(Path("~").expanduser())
    assert expand_home("data.train=[{path: ~/x}]") == f"data.train=[{{path: {home}/x}}]"
    assert expand_home("a=~") == f"a={home}"


def test_dry_run_starts_and_writes_nothing(megads: Run, tmp_path: Path) -> None:
    """Catches a dry run that creates the run directory."""
    result = megads("train", "experiment=demo", "run.dry_run=true")
    assert result.code == 0
    for part in ("2 = tp 1 x cp 1 x pp 1 x dp 2", "5,257,216 parameters", "writes to  runs/demo-"):
        assert part in result.out
    assert left_by_commands(tmp_path) == []


def test_a_sweep_goes_on_after_a_failed_point(megads: Run, tmp_path: Path) -> None:
    """Catches Hydra's sweeper, which stops at the first failure and reports nothing."""
    result = megads("train", "-m", "optim.lr=1e-3,-1,2e-3", "train.steps=1", DATA, "run.dry_run=true")
    assert result.code == 2
    assert result.out.count("dry run") == 2
    table = result.out[result.out.index("=== sweep") :].splitlines()[1:]
    assert [line.split()[2] for line in table] == ["0", "2", "0"]
    assert left_by_commands(tmp_path) == ["runs"]


def test_a_sweep_over_one_run_id_is_refused(megads: Run, tmp_path: Path) -> None:
    """Catches a second point that silently continues the first one's checkpoint."""
    result = megads("train", "-m", "optim.lr=1e-3,2e-3", "run.id=same", "train.steps=1", DATA, "run.dry_run=true")
    assert result.code == 2
    assert "shared by several points" in result.err


def received(argument: str) -> object:
    """Value in the composed config."""
    override = OverridesParser.create().parse_override(as_text(argument, ("prompt",)))
    assert not override.is_sweep_override()
    return OmegaConf.to_container(OmegaConf.create({"prompt": override.value()}), resolve=True)["prompt"]


def test_any_text_reaches_the_verb_unchanged() -> None:
    """Catches commas that start a sweep, brackets that are parsed, quotes that end the text, ${...} resolved."""
    draw = random.Random(0)
    alphabet = [*"ab \\\"'${}()[],=:~+-#%@!?\n\té🚀*&^|<>;/.", "${", "null", "\\"]
    texts = ["".join(draw.choices(alphabet, k=draw.randrange(15))) for _ in range(1500)]
    quoted = [text for text in texts if text.strip()[:1] in "\"'" and text.strip()[-1:] == text.strip()[:1]]
    for text in (text for text in texts if text not in (*quoted, "null")):
        assert received(f"prompt={text}") == text


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("prompt='Once, upon'", "Once, upon"),
        ('prompt="Once, upon"', "Once, upon"),
        ('prompt="No," she said, "never"', '"No," she said, "never"'),
        ("prompt=null", None),
        ("prompt=", ""),
        ("prompt=1", "1"),
    ],
)
def test_quotes_are_removed_and_null_is_none(argument: str, expected: object) -> None:
    """Catches quotes, which Hydra's users type from habit, kept in the text, and numbers in place of text."""
    assert received(argument) == expected


def test_keys_that_are_no_texts_keep_hydras_grammar() -> None:
    """Catches sweeps over other keys that no longer sweep."""
    assert as_text("top_p=0.5,0.9", ("prompt",)) == "top_p=0.5,0.9"
    assert as_text("--help", ("prompt",)) == "--help"


@dataclass
class PartConfig:
    size: int = 3


@dataclass
class ExampleConfig:
    part: PartConfig = field(default_factory=PartConfig)
    other: PartConfig | None = None
    parts: list[PartConfig] = field(default_factory=list)
    share: float | None = None
    names: list[str] | None = None
    rates: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    anything: Any = None


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"other": PartConfig(), "parts": [PartConfig(1), PartConfig(2)]},
        {"share": 0.5, "names": [], "rates": [1, 2.5], "counts": [2**63 - 1, -(2**63) + 1], "weights": {"a": 1}},
        {"names": ["a", ""], "anything": {"a": [1, "x", None, {"b": 2.5}]}},
    ],
)
def test_values_at_the_limits_of_their_range_are_accepted(given: dict[str, Any]) -> None:
    """Catches a value at the limit of its range refused, and null refused where it is allowed."""
    require_values(ExampleConfig(**given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"part": [1]}, r"^part: \[1\] is not a section of the expected type"),
        ({"part": None}, "^part: None is not a section"),
        ({"other": ExampleConfig()}, "^other: .* is not a section"),
        ({"parts": [PartConfig(), {"size": 1}]}, r"^parts\[1\]: {'size': 1} is not a section"),
        ({"parts": PartConfig()}, "^parts: .* is not a list"),
        ({"part": PartConfig(2**63)}, r"^part.size = 9223372036854775808: must fit in a signed integer of 64 bits"),
        ({"part": PartConfig(-(2**63))}, "^part.size = -9223372036854775808: must fit"),
        ({"part": PartConfig(2**126)}, f"^part.size = {2**126}: must fit"),
        ({"part": PartConfig(2**127)}, "^part.size = an integer of 128 bits: must fit"),
        ({"share": math.nan}, "^share = nan: must be a finite number"),
        ({"rates": [1.0, -math.inf]}, r"^rates\[1\] = -inf: must be a finite number"),
        ({"rates": [True]}, r"^rates\[0\]: True is not a number"),
        ({"rates": ["1"]}, r"^rates\[0\]: '1' is not a number"),
        ({"counts": [1.5]}, r"^counts\[0\]: 1.5 is not a number"),
        ({"names": ["a", 3]}, r"^names: 3 is not a text; expected a list of texts: names=\[a,b\]"),
        ({"names": "a"}, "^names: 'a' is not a list"),
        ({"weights": [1.0]}, r"^weights: \[1.0\] is not a mapping; expected weights={a: 1}"),
        ({"anything": {"a": [1, {"b": math.inf}]}}, "^anything = inf: must be a finite number"),
    ],
)
def test_values_of_a_wrong_kind_that_omegaconf_accepts_are_refused(given: dict[str, Any], said: str) -> None:
    """Catches a section in place of a list, a list in place of a mapping, and numbers out of range."""
    with pytest.raises(ConfigError, match=said):
        require_values(ExampleConfig(**given))
