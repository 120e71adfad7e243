"""Hypothesis strategies of valid and invalid `megads` command lines, for every verb, config group and key."""

from __future__ import annotations

import importlib
import os
import random
import shutil
from pathlib import Path

from hypothesis import strategies as st

from megads.cli.main import COMMANDS, VERBS
from megads.cli.verb import Key, Verb, group_names, group_options, keys
from tests.small_run import TEXTS, hot_model, model_config, write_dataset, write_run

COMPLETE = "__complete"
EVERY_VERB = (*VERBS, *COMMANDS, COMPLETE)

# Last on the line, so that a command with a valid config exits at once.
_TAIL = {"train": ["run.dry_run=true"], "chaos": ["dry_run=true"], "generate": ["max_new_tokens=2"]}
_NUMBERS = ["0", "-1", "1", "2", "7", "-7", "1.5", "-0.0", "1e300", "-1e300", "1e400", "nan", "inf", "-inf",
            "1e-320", "2147483648", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "0x10", "1_000",
            "0b1"]  # fmt: skip
_WORDS = ["", "null", "true", "False", "???", "~", "''", '""', "' '", "a", "a b", "ä漢🚀", "\u202e", "\x1b[2J",
          "\x07", "\r", "\t", "\n", "\x7f", "%s%n", "{", "}", "[", "]", "(", ")", "'", '"', "\\", "=", ",", ":",
          "@", "a=b=c", "../../x", "~/x", "\udcff", "x" * 300, "y" * 20_000, "[" * 400 + "]" * 400,
          "{a: " * 60 + "1" + "}" * 60, "auto", "none", "-"]  # fmt: skip
_NESTED = ["[]", "{}", "[[]]", "[{}]", "[null]", "[1,2]", "[a,[b,{c: d}]]", "{a: 1}", "{a: {b: {c: []}}}",
           "{path: x}", "[{path: x}]", "[{path: text.jsonl, weight: -1}]", "[{path: corpus}]",
           "[{path: corpus},{path: corpus}]", "[{steps: [3,1]}]", "[{samples: [0, 1e99]}]", "{1: 2}", "{true: 1}",
           "{null: 1}", "{a: 1, a: 2}", "[1,-1]", "[0,0]", "[nan,nan]", "[1e308,1e308]"]  # fmt: skip
_INTERPOLATED = ["${nope}", "${", "${}", "${.}", "${..}", "${a.${b}}", "${oc.env:NO_SUCH_VARIABLE}",
                 "${oc.env:HOME}", "${oc.decode:'[1,'}", "${oc.create:{a: 1}}", "${oc.select:a,${oc.env:HOME}}",
                 "${megads.keys:}", "${now:%Y}", "${hydra:runtime.cwd}", "${hydra.job.name}", "\\${x}",
                 "${oc.dict.keys:model}", "${model}", "${run}", "${" * 60 + "a" + "}" * 60]  # fmt: skip
_SWEPT = ["1,2", "a,b", "range(1,3)", "range(3,1)", "range(0,1,0)", "choice(1,2)", "choice()", "interval(0,1)",
          "interval(1,0)", "tag(log,interval(1e-5,1e-2))", "glob(*)", "glob(nothing*)", "shuffle(1,2,3)",
          "sort(3,1)", "int(interval(1,8))", "int(1.5)", "str(1)", "float(x)", "bool(2)", "json_str({a: 1})",
          "extend_list(1)", "nosuch(1)", "choice(1", "1,", ",", ",,", "range(1)", "tag(a,b,c)"]  # fmt: skip
_PATHS = ["corpus", "corpus.bin", "corpus.idx", "text.jsonl", "text.txt", "corpus.tokenizer.json", "run",
          "run/checkpoints", "run/config.yaml", "empty", "empty.jsonl", "missing", "missing/x", "folder",
          "text.jsonl/x", "loop", "pipe", "pipe.jsonl", "/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem",
          "/proc/self/cmdline", ".", "..", "/", "binary", "binary.jsonl", "binary.json", "deep.json", "out/put",
          "dangling"]  # fmt: skip
_FLAGS = ["--help", "-h", "--hydra-help", "--version", "--cfg", "--cfg=job", "--cfg=all", "-c", "job", "--resolve",
          "--info", "--info=defaults", "-i", "-p", "--package=model", "-m", "--multirun", "--json", "json", "check",
          "inspect", "merge", "split", "stats", "--config-dir", "--config-dir=folder", "--config-dir=missing",
          "--config-dir=pipe", "--config-name=train", "--config-name=nope", "--config-path=folder", "-cn", "-cd",
          "--shell-completion", "-sc", "--experimental-rerun", "--experimental-rerun=run", "--run", "-r", "--", "-",
          "--no-such-flag", "-x"]  # fmt: skip
_HYDRA = ["hydra.run.dir=out", "hydra.run.dir=text.jsonl", "hydra.output_subdir=x", "hydra.job.chdir=true",
          "hydra.verbose=true", "hydra.verbose=[a]", "hydra.searchpath=[folder]", "hydra.searchpath=[file://pipe]",
          "hydra.searchpath=[pkg://nope]", "hydra.searchpath=1", "hydra.mode=MULTIRUN", "hydra.mode=x",
          "hydra/launcher=basic", "hydra/launcher=nope", "hydra.job.name=null", "hydra.job.env_set={A: 1}",
          "hydra.job_logging=null", "hydra/job_logging=default", "hydra.callbacks={a: {_target_: os.abort}}",
          "hydra.sweeper._target_=os.abort", "hydra.sweeper.max_batch_size=0", "hydra=null", "hydra.help=null",
          "hydra.sweep.dir=out", "hydra.sweep.subdir=../../x", "~hydra", "hydra.nope=1", "hydra.run.dir=${nope}",
          "hydra.help.template=${nope}", "hydra.launcher._target_=nope"]  # fmt: skip
_REHEARSE = ["--", "sbatch", "/usr/bin/sbatch", "script.sbatch", "missing.sbatch", "folder", "pipe", "binary",
             "--nodes=8", "--nodes=0", "--nodes=x", "-N", "2-4", "--gpus-per-node=8", "--gres=gpu:a100:8",
             "--gres=x:", "--wrap=ls", "--signal=B:USR1@600", "--signal=@", "--time=1-00:00:00", "--time=x",
             "--array=1-10", "--elsewhere", "--ranks", "4", "3", "--gpu-memory-gib=80", "--gpu-memory-gib=x",
             "--without", "module", "--keep", "kept", "--keep=text.jsonl/x", "--help", "--no-such",
             "-x"]  # fmt: skip


def _texts() -> st.SearchStrategy[str]:
    """Text that a shell can pass: no NUL, and only surrogates that stand for bytes that are not UTF-8."""
    characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    return st.text(characters | st.sampled_from("=[]{}(),:${}+~@/.'\"\\\udc80"), max_size=40)


def _fitting(key: Key) -> st.SearchStrategy[str]:
    """Likely and unlikely values of a key's own type."""
    small = st.integers(-3, 40).map(str)
    wide = st.sampled_from([1000, 4096, 65536, 10**6, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**64, 10**30]).map(str)
    fractions = st.floats().map(str) | st.floats(-0.5, 2).map(str) | st.sampled_from(_NUMBERS)
    texts = st.sampled_from(_PATHS) | st.sampled_from(_WORDS) | _texts()
    items = {"integer": small | wide, "number": fractions, "text": texts}
    kind = key.kind
    own = [*key.choices, *([key.default] if key.default else []), *(["null"] if "null" in kind else [])]
    choices: list[st.SearchStrategy[str]] = [st.sampled_from(own)] if own else []
    for name, item in items.items():
        if kind.startswith(f"list of {name}"):
            choices.append(st.lists(item, max_size=4).map(lambda items: f"[{','.join(items)}]"))
        elif kind.startswith(name):
            choices += [item, item]
    if "{" in kind:
        names = kind.partition("{")[2].partition("}")[0].split(", ")
        value = st.one_of(small, wide, fractions, texts, st.sampled_from(_NESTED))
        entry = st.lists(st.tuples(st.sampled_from(names), value), max_size=3)
        shown = entry.map(lambda pairs: "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}")
        choices += [st.lists(shown, max_size=3).map(lambda items: f"[{','.join(items)}]")] * 2
    if kind == "any":
        choices += [texts, st.sampled_from(_NESTED), small]
    return st.one_of(*choices)


def _values(key: Key, known: list[Key]) -> st.SearchStrategy[str]:
    """Values of a key: of its own type, of other types, and values that no key accepts."""
    interpolated = st.sampled_from([f"${{{other.name}}}" for other in known] + [f"${{{key.name}}}"])
    fixed = st.sampled_from([*_NUMBERS, *_WORDS, *_NESTED, *_INTERPOLATED, *_SWEPT, *_PATHS])
    wrong = st.one_of(fixed, fixed, interpolated, _texts())
    return wrong if key.is_section else st.one_of(*[_fitting(key)] * 3, wrong)


def _overrides(verb: Verb) -> st.SearchStrategy[str]:
    """Strategy of one override."""
    known = [key for key in keys(verb.schema) if "[]" not in key.name]
    groups = {group: list(group_options(group)) for group in group_names(verb.name)}
    sign = st.sampled_from([""] * 12 + ["+", "++", "~"])

    def of_key(key: Key) -> st.SearchStrategy[str]:
        return st.builds(lambda sign, value: f"{sign}{key.name}={value}", sign, _values(key, known))

    of_keys = st.sampled_from(known).flatmap(of_key)
    misspelt = st.builds(
        lambda key, letter, value: f"{key.name[:-1]}{letter}={value}",
        st.sampled_from(known), st.sampled_from(["", "x", ".", ".x", "[0]", "@a", "/"]), _values(known[0], known),
    )  # fmt: skip
    of_groups = [
        st.builds(lambda sign, group, option: f"{sign}{group}={option}", sign, st.just(group),
                  st.sampled_from([*options, *options, "null", "nope", "../x", "[a]", "a,b", "pipe"]))
        for group, options in groups.items()
    ]  # fmt: skip
    rare = [st.sampled_from(_FLAGS), st.sampled_from(_HYDRA), _texts(), misspelt]
    return st.one_of(*[of_keys] * 12, *of_groups, *rare)


def command_lines(verb: str) -> st.SearchStrategy[list[str]]:
    """Returns a strategy of command lines of a verb, the verb included."""
    if verb == "rehearse":
        words = st.sampled_from(_REHEARSE) | _texts()
        return st.lists(words, max_size=8).map(lambda rest: [verb, *rest])
    if verb in ("completion", COMPLETE):
        before = st.sampled_from([*VERBS, *COMMANDS, "bash", "--config-dir", "folder", "pipe", ""])
        known = [key.name for name in VERBS for key in keys(_verb(name).schema)]
        word = st.one_of(before, st.sampled_from(known), st.sampled_from([f"{key}=" for key in known]), _texts())
        return st.lists(word, max_size=4).map(lambda rest: [verb, *rest])
    lines = st.integers(0, 3).flatmap(
        lambda more: st.lists(_overrides(_verb(verb)), min_size=1, max_size=1 + more * (more > 1))
    )
    demanded = [key.name for key in keys(_verb(verb).schema) if key.default == "required" and "[]" not in key.name]
    required = [f"{name}={_SOUND.get(name, '1')}" for name in demanded]
    # Most lines have the required keys, so that a wrong value is the only error.
    sound = [*required, *_START.get(verb, [])]
    start = st.sampled_from([[], sound, sound, sound])
    return st.builds(lambda start, line: [verb, *start, *line, *_TAIL.get(verb, [])], start, lines)


_SOUND = {"run": "run", "tokenizer": "corpus.tokenizer.json", "output": "made", "input": "corpus", "action": "check"}
_RUNNABLE = ["model.vocab_size=302", "train.steps=3"]  # fmt: skip
_START = {
    "train": ["train.steps=3", "data.train=[{path: corpus}]"],
    "plan": _RUNNABLE,
    "verify_layout": _RUNNABLE,
    "tokenizer": ["input=[text.jsonl]"],
    "preprocess": ["input=[text.jsonl]", "workers=1"],
    "generate": ["prompt=def", "device=cpu"],
}


def _verb(name: str) -> Verb:
    verb: Verb = importlib.import_module(f"megads.cli.{name}").VERB
    return verb


def write_template(folder: Path) -> None:
    """Writes the files that `_PATHS` names: valid data and a run, and files of unexpected kinds."""
    prefix = write_dataset(folder)
    write_run(folder / "run", prefix, hot_model(model_config()))
    (folder / "run" / "config.yaml").write_text("data:\n  train:\n  - path: corpus\n")
    (folder / "text.txt").write_text(TEXTS[0])
    (folder / "folder").mkdir()
    for name in ("empty", "empty.jsonl"):
        (folder / name).touch()
    for name in ("binary", "binary.jsonl", "binary.json"):
        (folder / name).write_bytes(random.Random(0).randbytes(2000))
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "script.sbatch").write_text('#!/bin/bash\n#SBATCH --nodes=2\nsrun megads train cluster=slurm "$@"\n')
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    for name in ("pipe", "pipe.jsonl"):
        os.mkfifo(folder / name)


def copy_template(template: Path, folder: Path) -> Path:
    """Replaces `folder` by a copy of the template, pipes and links included; returns it."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(template, folder, symlinks=True, copy_function=_copy)
    return folder


def _copy(source: str, target: str) -> None:
    if Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
