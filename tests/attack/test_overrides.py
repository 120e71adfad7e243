"""Tests that any command line ends at once with a documented exit code and a message; Hypothesis generates them."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.attack.command_lines import EVERY_VERB, command_lines, copy_template, write_template
from tests.fork_server import ForkServer

QUICK_EXAMPLES = 3
"""Per verb, in `make test`."""

# Fixed seed: a failure is reproducible, and a run of the tests does not depend on the one before.
SEEDED = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck), print_blob=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("overrides")


@pytest.fixture(scope="module")
def template(root: Path) -> Path:
    folder = root / "template"
    folder.mkdir()
    write_template(folder)
    return folder


def try_lines(verb: str, examples: int, server: ForkServer, template: Path) -> collections.Counter[int]:
    """Runs that many command lines of a verb; returns their exit codes."""
    codes: collections.Counter[int] = collections.Counter()

    @settings(SEEDED, max_examples=examples)
    @given(command_lines(verb))
    def ends_well(line: list[str]) -> None:
        outcome = server(copy_template(template, template.parent / "folder"), line, stub=True)
        codes[outcome.code] += 1
        assert not outcome.defect(), f"megads {line}: {outcome.defect()}\n{outcome.err[-3000:]}"

    ends_well()
    return codes


@pytest.mark.quick("plan")
@pytest.mark.parametrize("verb", EVERY_VERB)
def test_any_command_line(verb: str, fork_server: ForkServer, template: Path) -> None:
    """Catches exit code 1, a traceback, no message, a hang, unbounded memory, or a file written elsewhere, for any
    value of any key."""
    try_lines(verb, QUICK_EXAMPLES, fork_server, template)


@pytest.mark.attack
@pytest.mark.parametrize("verb", EVERY_VERB)
def test_many_command_lines(verb: str, fork_server: ForkServer, template: Path, pytestconfig: pytest.Config) -> None:
    """Catches the same as test_any_command_line, with more examples."""
    codes = try_lines(verb, pytestconfig.getoption("--attack-examples"), fork_server, template)
    print(f"{verb}: {dict(sorted(codes.items()))}")


@pytest.mark.parametrize(
    "line",
    [
        ["plan", "ops=${model}", "model.vocab_size=302"],
        ["verify_layout", "verify=${logging.tensorboard}", "model.vocab_size=302"],
        ["tokenizer", "input=${vocab_size}"],
        ["train", "model.num_layers=9223372036854775807"],
        ["train", "parallel.pp=9223372036854775807"],
        ["train", "train.seed=1000000000000000000000000000000"],
        ["train", "cluster.timeout_s=1e300"],
        ["train", "optim.eps=nan"],
        ["doctor", "timeout_s=inf"],
        ["check_nodes", "checkers=2147483647"],
        ["generate", "run=run", "prompt=def", "top_k=1000000000000000000000000000000"],
    ],
    ids=" ".join,
)
def test_values_that_were_found(line: list[str], fork_server: ForkServer, template: Path) -> None:
    """Catches what Hypothesis once found: a section in the place of another, and numbers that pass a dry run and end
    the ranks in a traceback."""
    tail = ["train.steps=3", "data.train=[{path: corpus}]", "run.dry_run=true"] if line[0] == "train" else []
    outcome = fork_server(copy_template(template, template.parent / "folder"), [*line, *tail], stub=True)
    key = line[1].partition("=")[0] if line[0] != "generate" else "top_k"
    assert outcome.code == 2 and not outcome.defect() and key in outcome.err, outcome


def bomb(levels: int) -> str:
    """Returns a YAML file of that many lines, each ten times the expanded size of the one before."""
    lines = ["x0: &x0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


CONFIG_FILES = {
    "aliases of aliases": bomb(9),
    "an alias of itself": "a: &a [*a]",
    "more than any config": "x: 1\n" * 300_000,
    "depth without end": "a: " + "[" * 100_000,
    "depth": "a: " + "[" * 300 + "]" * 300,
    "bytes that are no text": "\0\1\2\udcff",
    "a number": "3",
    "code": "a: !!python/object/apply:os.system ['true']",
    "digits without end": "train: {steps: 1" + "0" * 5000 + "}",
    "an unfinished line": "train: {steps: ",
}


@pytest.mark.quick(*(f"{name}-one" for name in CONFIG_FILES), "depth without end-sweep", "a number-sweep")
@pytest.mark.parametrize("sweep", [[], ["-m"]], ids=["one", "sweep"])
@pytest.mark.parametrize("name", CONFIG_FILES)
def test_config_files_of_ones_own(name: str, sweep: list[str], fork_server: ForkServer, template: Path) -> None:
    """Catches a file in --config-dir whose ten lines fill the memory, that is executed as a program, or that ends in a
    traceback; the message names the file."""
    folder = copy_template(template, template.parent / "folder")
    (folder / "mine" / "experiment").mkdir(parents=True)
    content = CONFIG_FILES[name].encode(errors="surrogateescape")
    (folder / "mine" / "experiment" / "hostile.yaml").write_bytes(b"# @package _global_\n" + content)
    line = ["train", *sweep, "--config-dir", "mine", "experiment=hostile", "run.dry_run=true"]
    outcome = fork_server(folder, line)
    assert outcome.code == 2 and not outcome.defect() and "hostile.yaml" in outcome.err, outcome


def test_a_config_file_with_modest_aliases(fork_server: ForkServer, template: Path) -> None:
    """Catches a limit that refuses the normal use of aliases."""
    folder = copy_template(template, template.parent / "folder")
    (folder / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\ntrain: {steps: &n 3, seed: *n}\ndata: {train: [{path: corpus}]}\n"
    (folder / "mine" / "experiment" / "sound.yaml").write_text(text)
    outcome = fork_server(folder, ["train", "--config-dir", "mine", "experiment=sound", "run.dry_run=true"])
    assert outcome.code == 0 and "3 steps" in outcome.out, outcome


@given(command_lines("train"))
@settings(SEEDED, max_examples=5)
def test_the_strategy_draws_overrides(line: list[str]) -> None:
    """Catches a strategy that draws no overrides, with which every command line passes."""
    assert len(line) > 2 and line[0] == "train" and line[-1] == "run.dry_run=true"


def test_the_server_sees_what_is_wrong(fork_server: ForkServer, template: Path) -> None:
    """Catches a server that never reports a defect."""
    folder = copy_template(template, template.parent / "folder")
    outcome = fork_server(folder, ["tokenizer", "input=[text.jsonl]", "output=../elsewhere", "vocab_size=300"])
    assert outcome.outside and outcome.defect().startswith("wrote to"), outcome
