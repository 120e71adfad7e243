"""How megads extends Hydra's composition of configs.

Config files have a size limit, integers may be written in short form (1e9, 1M, 4Ki), and the composition errors of
Hydra and OmegaConf become one message that names the nearest key.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from megads.cli.verb import Key, config_dir, keys
from megads.config.train import AUTO, RENAMED, rename_keys, rename_overrides
from megads.errors import ConfigError
from megads.runtime.files import read_regular, require_bounded_yaml

_UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
_QUOTED = re.compile(r"'([^']+)'")
_SEVERAL_VALUES = re.compile(r"Ambiguous value for argument '([^=]+)=(.*)'")
_CHOSEN_TWICE = re.compile(r"Multiple values for ([\w/]+)|^([\w/]+) appears more than once")


def schema_keys(schema: type) -> list[str]:
    """Returns all dotted keys of a config dataclass, sections included, keys of list items excluded."""
    return list(_walk(schema, ""))


def _walk(schema: Any, prefix: str) -> Iterator[str]:
    types = get_type_hints(schema)
    for item in fields(schema):
        key = f"{prefix}{item.name}"
        yield key
        kind = types[item.name]
        if get_origin(kind) is None and is_dataclass(kind):
            yield from _walk(kind, f"{key}.")


def explain_added_key(content: Any, schema: type) -> str:
    """Returns an error message for the first key that is not in the schema, or an empty string.

    Hydra's `+key=value` adds keys even to a typed config, and they would be dropped silently.

    Args:
        content: the config as plain dicts.
        schema: dataclass of the config.
    """
    key = next(_added_keys(content, schema, ""), None)
    return "" if key is None else _unknown_key(key, schema)


def added_key_fault(key: str, schema: type) -> str:
    """Returns an error message for `+key=value` if the key is not in the schema, or an empty string.

    Args:
        key: dotted key, which may lie within one that takes any values by name.
        schema: dataclass of the config.
    """
    kinds = {item.name: item.kind for item in keys(schema)}
    parts = key.split(".")
    above = (kinds.get(".".join(parts[:length]), "") for length in range(1, len(parts)))
    is_free = any("by name" in kind or kind.startswith(("any", "list of any")) for kind in above)
    return "" if is_free or key in kinds else _unknown_key(key, schema)


def _added_keys(content: Any, schema: type, prefix: str) -> Iterator[str]:
    types = get_type_hints(schema)
    for name, value in content.items():
        if name not in types:
            yield f"{prefix}{name}"
        elif isinstance(value, dict) and is_dataclass(types[name]):
            yield from _added_keys(value, types[name], f"{prefix}{name}.")


def explain(error: Exception, schema: type) -> str:
    """Returns an error message for a command line or config file: what is wrong, the value, and the remedy.

    Args:
        error: exception raised by Hydra or OmegaConf during composition.
        schema: dataclass of the config.
    """
    if isinstance(error, MissingConfigException):
        return _explain_choice(error)
    if isinstance(error, OverrideParseException):
        return f"cannot read the override {error.override}: write key=value, and quote the value: \"key='value'\""
    cause = _innermost(error)
    unknown = _UNKNOWN_KEY.search(str(error))
    if unknown and unknown.group(1) not in schema_keys(schema):
        return _unknown_key(unknown.group(1), schema)
    if isinstance(cause, MissingMandatoryValue):
        key = _full_key(cause)
        choices = next((item.choices for item in keys(schema) if item.name == key), ())
        return f"{key} has no value: it must be set, for example {key}={'|'.join(choices) or '<value>'}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and _full_key(cause) not in ("", *schema_keys(schema)):
        # An item of a list (data.train[0]) is a separate dataclass, whose keys `schema_keys` does not contain.
        owner: Any = cause.object_type
        in_item = "." not in _full_key(cause) and is_dataclass(owner)
        return _place(error) + _unknown_key(_full_key(cause), owner if in_item else schema)
    if isinstance(cause, OmegaConfBaseException):
        return _place(error) + _wrong_value(cause, schema)
    several = _SEVERAL_VALUES.search(str(error))
    if several:
        key, values = several.groups()
        return (
            f"{key}={values} has several values: for a list write '{key}=[{values}]', for a text "
            f"\"{key}='{values}'\" with both quotes; to sweep over them add --multirun"
        )
    twice = _CHOSEN_TWICE.search(str(error))
    if twice:
        group = twice.group(1) or twice.group(2)
        return f"{group} is chosen twice: write {group}=<option>, without a leading +"
    if isinstance(error, HydraException | OmegaConfBaseException | YAMLError | ValueError):
        return str(error).strip()
    # Not an error message for users: Hydra crashed on the overrides.
    return f"the overrides do not compose ({type(error).__name__}: {error})"


def _explain_choice(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    group, _, option = missing.rpartition("/")
    options = sorted(error.options or ())
    if not group:
        return str(error).strip()
    if Path("conf", f"{missing}.yaml").is_file():
        return f"{group}={option}: conf/{missing}.yaml is not in the search path: add --config-dir conf"
    return f"{group}={option}: there is no such option{_nearest(option, options)}; {group} has {', '.join(options)}"


def _unknown_key(key: str, schema: type) -> str:
    keys = schema_keys(schema)
    if key not in keys and (config_dir() / key).is_dir():
        return (
            f"the keys of this file are put into a section {key}, which does not exist: "
            "its first line must be `# @package _global_`"
        )
    section, _, leaf = key.rpartition(".")
    siblings = [known for known in keys if section and known.rpartition(".")[0] == section]
    # `lr=1e-4` for `optim.lr=1e-4`: the last part is right, the section is missing.
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    # The section is right, and the name that of another trainer.
    same_leaf = same_leaf or [known for known in siblings if leaf in _OTHER_NAMES.get(known, "").split()]
    same_leaf = same_leaf or ([] if section else suggested_keys(key, schema))
    if same_leaf:
        hint = f": did you mean {' or '.join(same_leaf[:3])}?"
    else:
        hint = _nearest(key, siblings or keys)
    if not hint and not siblings:
        hint = _nearest(key.partition(".")[0], [known for known in keys if "." not in known])
    if not hint and siblings:
        hint = f"; {section} has {', '.join(known.rpartition('.')[2] for known in siblings)}"
    return f"unknown key {key}{hint or '; --help lists the main keys, --cfg job all of them'}"


_OTHER_NAMES = {
    "optim.lr": "learning_rate max_lr",
    "train.global_batch_size": "batch_size bs train_batch_size total_batch_size gradient_accumulation_steps",
    "train.micro_batch_size": "batch_size micro_batch per_device_train_batch_size train_micro_batch_size_per_gpu",
    "train.steps": "iters max_iters train_iters iterations max_steps num_steps",
    "train.epochs": "num_train_epochs num_epochs",
    "train.seq_len": "block_size context_length sequence_length seq_length max_length",
    "train.precision": "dtype mixed_precision bf16 fp16",
    "precision": "dtype bf16 fp16",
    "data.raw": "data data_path dataset dataset_path train_file train_data text corpus files file path input",
    "input": "data data_path dataset dataset_path train_file text corpus files file path inputs",
    "run.dir": "output_dir out_dir save_dir save logdir output out",
    "run": "checkpoint ckpt model model_path checkpoint_path model_name_or_path load run_dir run_id path",
    "output": "output_dir out_dir out save output_file output_path",
    "checkpoint.load": "resume resume_from_checkpoint load ckpt",
    "checkpoint.every_steps": "save_steps save_interval save_every",
    "evaluation.every_steps": "eval_steps eval_interval eval_every",
    "model.num_layers": "n_layer n_layers layers num_hidden_layers",
    "model.num_heads": "n_head n_heads heads num_attention_heads",
    "model.hidden_size": "n_embd d_model dim embed_dim",
    "model.ffn_size": "ffn_hidden_size intermediate_size d_ff",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel",
    "parallel.cp": "context_parallel_size context_parallel",
    "parallel.cp_ulysses": "hierarchical_context_parallel_sizes ulysses_degree ulysses_size",
    "parallel.dp": "data_parallel_size data_parallel num_gpus gpus nproc_per_node",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_iters",
    "schedule.warmup_share": "warmup_ratio warmup_fraction lr_warmup_fraction",
    "max_new_tokens": "max_tokens max_length length n_predict",
    "temperature": "temp",
    "vocab_size": "vocab",
    "workers": "num_workers num_proc jobs",
    "logging.level": "verbose debug",
    "tasks": "task",
}
"""Names of keys in other tools, by our key."""


def suggested_keys(word: str, schema: type) -> list[str]:
    """Returns the keys that a word of another tool, or a key without its section, may mean; at most three.

    Args:
        word: a key, or a flag without its dashes.
        schema: dataclass of the config.
    """
    name = word.replace("-", "_").lower()
    known = [key.name for key in keys(schema) if not key.is_section and "[]" not in key.name]
    if name in known:
        return [name]
    others = [key for key in known if name in _OTHER_NAMES.get(key, "").split()]
    same_leaf = sorted((key for key in known if key.rpartition(".")[2] == name), key=lambda key: key[:6] != "train.")
    if others or same_leaf:
        return [*same_leaf, *others][:3]
    leaves = {key.rpartition(".")[2]: key for key in reversed(known)}
    return [leaves[near] for near in difflib.get_close_matches(name, leaves, n=1, cutoff=0.8)]


def _nearest(word: str, known: Sequence[str]) -> str:
    """Returns `: did you mean ...?`, or an empty string if no known word is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""


def _wrong_value(cause: OmegaConfBaseException, schema: type) -> str:
    key = _full_key(cause)
    message = _first_line(cause)
    if not key:
        return message
    kind = _type_of(schema, key)
    if is_dataclass(kind):
        return _explain_section(key, kind, message)
    if get_origin(kind) is list:
        item = get_args(kind)[0]
        example = "{path: <prefix>}" if is_dataclass(item) and hasattr(item, "path") else "a, b"
        return f"{key}: must be a list, even of one: [{example}]"
    if get_origin(kind) is dict:
        return f"{key}: must be values by name: {key}={{a: 1, b: 2}}"
    value = _QUOTED.search(message)
    if value and hasattr(kind, "refused") and value.group(1) in kind.refused():
        return f"{key}: {message}; {kind.refused()[value.group(1)]}"
    expected = _in_words(kind)
    return f"{key}: {message}" + (f" (expected {expected})" if expected else "")


def _explain_section(section: str, kind: Any, message: str) -> str:
    """Returns an error message for a section that is given a value or used as a config group."""
    keys = [item.name for item in fields(kind)]
    value = message.rpartition("value: ")[2]
    likely = next((key for key in ("name", "raw") if key in keys), None)
    example = f": did you mean {section}.{likely}={value}?" if likely else ""
    return f"{section}={value}: {section} is a section, not a config group{example}; it has {', '.join(keys)}"


def _type_of(schema: type, key: str) -> Any:
    """Returns the type of a dotted key; None if it is not in the schema."""
    kind: Any = schema
    for part in key.split("."):
        if not is_dataclass(kind) or not isinstance(kind, type):
            return None
        kind = get_type_hints(kind).get(part)
    return kind


def _in_words(kind: Any) -> str:
    """Returns a description of a type, or an empty string for other types than scalars."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    options = [names.get(option, "") for option in (get_args(kind) or (kind,))]
    return " or ".join(options) if all(options) else ""


def _place(error: Exception) -> str:
    """Returns `<file>.yaml: ` if the error is in a config file, not on the command line."""
    found = re.match(r"In '([^']+)'", str(error))
    return f"{found.group(1)}.yaml: " if found else ""


def _innermost(error: BaseException) -> BaseException:
    """Returns the innermost cause; Hydra wraps OmegaConf's errors, sometimes without setting __cause__."""
    while True:
        inner = error.__cause__ or error.__context__
        if inner is None or isinstance(error, OmegaConfBaseException):
            return error
        error = inner


def _full_key(error: BaseException) -> str:
    return str(getattr(error, "full_key", None) or "")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


_LENGTHS = tuple(f"train.{name}" for name in ("steps", "samples", "tokens", "epochs"))
_WARMUPS = tuple(f"schedule.warmup_{unit}" for unit in ("samples", "tokens", "steps", "share"))


def drop_replaced_settings(config: DictConfig, overrides: Sequence[str]) -> None:
    """Sets train.minutes, and the warmup, of an experiment to null if the command line gives them in another unit.

    So `experiment=demo train.steps=50` takes 50 steps, and `schedule.warmup_steps=3` warms up for 3. steps=auto is no
    other length: it may be combined with minutes.

    Args:
        config: composed config of a verb.
        overrides: the overrides that it was composed of.
    """
    given = dict(text.lstrip("+").partition("=")[::2] for text in overrides)

    def drop(keys: Sequence[str], replacements: Sequence[str]) -> None:
        if not any(given.get(key, "null") not in ("null", AUTO) for key in replacements):
            return
        for key in keys:
            if key not in given and OmegaConf.select(config, key) is not None:
                OmegaConf.update(config, key, None)

    drop(["train.minutes"], _LENGTHS)
    # Samples, which cannot be null, count only if nothing else is given.
    drop([key for key in _WARMUPS if key != "schedule.warmup_samples"], _WARMUPS)


def set_length_of_text(config: DictConfig) -> None:
    """Sets train.steps=auto if text is given and no length, as in `megads train data.raw=notes`.

    Args:
        config: composed config of a verb.
    """
    data = config.get("data")
    # Of another command, data is a list.
    if not isinstance(data, DictConfig) or data.get("raw") is None or not isinstance(config.get("train"), DictConfig):
        return
    if not any(OmegaConf.select(config, key) for key in (*_LENGTHS, "train.minutes", "train.phases")):
        config.train.steps = AUTO


_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)([kKMBGT]|[KMG]i)?")
_UNITS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_OF_A_SEQUENCE = ("seq_len", "max_seq_len")
"""Keys for which 4k may mean 4000 or 4096."""


def integer_keys(schema: type) -> frozenset[str]:
    """Returns the dotted keys of a config dataclass that take an integer, or an integer, auto or null."""
    return frozenset(key.name for key in keys(schema) if _is_count(key))


def _is_count(key: Key) -> bool:
    return key.kind.startswith("integer")


def expand_count(key: str, text: str) -> str:
    """Expands 1e9, 1_000, 4k, 1.5M, 2B, 3T or 4Ki to digits; returns any other text unchanged.

    Args:
        key: key of the value.
        text: value as written.

    Raises:
        ConfigError: a sequence length such as 4k, which may mean 4000 or 4096.
    """
    found = _COUNT.fullmatch(text)
    if found is None:
        return text
    number, unit = Decimal(found[1].replace("_", "")), found[2] or ""
    if unit in _UNITS and key.rpartition(".")[2] in _OF_A_SEQUENCE:
        binary = number * 1024 ** (len(str(_UNITS[unit])) // 3)
        raise ConfigError(
            f"{key} = {text}: is {number * _UNITS[unit]:f} or {binary:f} meant? Write the number, "
            f"or {found[1]}Ki for multiples of 1024"
        )
    value = number * {**_UNITS, **_BINARY_UNITS}.get(unit, 1)
    return f"{value:f}".partition(".")[0] if value == value.to_integral_value() else text


def expand_counts(argument: str, integers: Collection[str]) -> str:
    """Expands the integers of an override of an integer key, those of a sweep included.

    Args:
        argument: an argument of the command line.
        integers: keys that take an integer.
    """
    key, equals, values = argument.partition("=")
    if not equals or key.lstrip("+") not in integers:
        return argument
    return f"{key}={','.join(expand_count(key, value) for value in values.split(','))}"


def text_keys(schema: type) -> frozenset[str]:
    """Returns the dotted keys of a config dataclass whose values, or whose items' values, are texts."""
    return frozenset(key.name for key in keys(schema) if key.kind.startswith(("text", "list of texts", "any")))


_LIKE_A_NUMBER = re.compile(r"[+-]?(?:[\d_]*\.?[\d_]+\.?(?:e[+-]?[\d_]+)?|inf|nan)|true|false", re.IGNORECASE)
_NOT_PLAIN = re.compile(r"[\"'{}()$\\]")


def quote_texts(argument: str, texts: Collection[str]) -> str:
    """Quotes the texts of an override that Hydra would parse as numbers or truth values: `run.id=3e12345` as inf.

    Args:
        argument: an argument of the command line.
        texts: keys that take a text or several.
    """
    key, equals, value = argument.partition("=")
    if not equals or key.lstrip("+") not in texts or _NOT_PLAIN.search(value):
        return argument
    parts = re.split(r"(\s*[\[\],]\s*)", value)
    quoted = (f'"{part}"' if _LIKE_A_NUMBER.fullmatch(part) else part for part in parts)
    return f"{key}={''.join(quoted)}"


_MOST_CHARACTERS = 1 << 18
_MOST_VALUES = 10_000
"""Most values in one file with its aliases expanded; the largest config of a run has some 200."""


class BoundedFileSource(FileConfigSource):
    """Hydra's file source, with limits on the size of a file, and values as on the command line: short integers, and
    texts that YAML would read as numbers or truth values.

    Attributes:
        count_names: last parts of the keys that take an integer.
        text_paths: keys that take a text, or several, see `_with_texts`.
    """

    count_names: frozenset[str] = frozenset()
    text_paths: frozenset[str] = frozenset()

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads a file; raises ConfigLoadError if it is missing, not a config, or too large once aliases are
        expanded."""
        path = Path(self.path) / self._normalize_file_name(config_path)
        if path.is_file():
            _require_bounded(path)
        try:
            result = super().load_config(config_path)
            content = _with_counts(OmegaConf.to_container(result.config, resolve=False), self.count_names)
            if not path.is_relative_to(config_dir()):
                content = _with_texts(content, yaml.compose(path.read_text("utf-8"), yaml.SafeLoader), self.text_paths)
                if isinstance(content, dict):
                    package = _package_of(config_path, result.header.get("package"))
                    for former in rename_keys(content, str(path), package):
                        print_renamed_key(former)
            result.config = OmegaConf.create(content)
            return result
        except RecursionError:
            raise ConfigLoadError(f"{path}: is nested too deeply") from None
        except ConfigError as error:
            raise ConfigLoadError(f"{path}: {error}") from error
        except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ConfigLoadError(f"{path}: cannot be read as a config: {said}") from error


def with_current_keys(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides with former keys replaced, see `rename_overrides`, and prints a line about each."""
    renamed, found = rename_overrides(overrides)
    for former in found:
        print_renamed_key(former)
    return renamed


@cache
def print_renamed_key(former: str) -> None:
    """Prints a line about a key that is given under its former name, once per process."""
    print(f"megads: {former} is now called {RENAMED[former]}, which takes its value", file=sys.stderr, flush=True)


def _package_of(config_path: str, header: str | None) -> str:
    """Returns the section of a file's keys, by its first line or else its folder; empty for the root."""
    if header in (None, "_group_"):
        return config_path.rpartition("/")[0].replace("/", ".")
    return header.replace("_global_", "").lstrip(".")


def use_bounded_file_source(schema: type) -> None:
    """Makes Hydra read files with BoundedFileSource; to be called after Hydra has loaded its plugins.

    Args:
        schema: dataclass of the config to compose.
    """
    integers, others = set[str](), set[str]()
    texts = text_keys(schema)
    suffixes = dict[str, set[bool]]()
    for key in keys(schema):
        if key.is_section:
            continue
        if not key.kind.startswith("list of"):
            (integers if _is_count(key) else others).add(key.name.rpartition(".")[2])
        parts = key.name.split(".")
        for first in range(len(parts)):
            suffixes.setdefault(".".join(parts[first:]), set()).add(key.name in texts)
    BoundedFileSource.count_names = frozenset(integers - others)
    BoundedFileSource.text_paths = frozenset(path for path, is_text in suffixes.items() if is_text == {True})
    # `register` does not replace Hydra's own source of a scheme.
    SourcesRegistry.instance().types["file"] = BoundedFileSource


def _with_counts(content: Any, names: frozenset[str]) -> Any:
    """Expands the integers under these names in nested dicts and lists.

    A file does not say in which section Hydra puts it, so keys are matched by their last part.
    """
    if isinstance(content, list):
        return [_with_counts(item, names) for item in content]
    if not isinstance(content, dict):
        return content
    made = {}
    for name, value in content.items():
        if name in names and isinstance(value, str | float):
            text = expand_count(name, str(value))
            made[name] = int(text) if text.isdecimal() else value
        else:
            made[name] = _with_counts(value, names)
    return made


def _with_texts(content: Any, node: yaml.Node | None, paths: frozenset[str], path: str = "") -> Any:
    """Replaces numbers and truth values of keys that take texts by what the file says.

    Args:
        content: nested dicts and lists.
        node: the same as YAML nodes.
        paths: dotted keys, or their ends where no other key has the same: a file does not say in which section it is.
        path: dotted key of the content in the file.
    """
    if isinstance(content, dict) and isinstance(node, yaml.MappingNode):
        nodes = {key.value: value for key, value in node.value}
        return {
            name: _with_texts(value, nodes.get(str(name)), paths, f"{path}.{name}" if path else str(name))
            for name, value in content.items()
        }
    if isinstance(content, list) and isinstance(node, yaml.SequenceNode):
        return [_with_texts(item, child, paths, path) for item, child in zip(content, node.value, strict=True)]
    is_typed = path in paths and isinstance(content, bool | int | float)
    return node.value if is_typed and isinstance(node, yaml.ScalarNode) else content


def _require_bounded(path: Path) -> None:
    try:
        text = read_regular(path).decode()
        if text.startswith("\ufeff"):
            raise ValueError(
                "it begins with a byte order mark, which hides its first line: save it as UTF-8 without one"
            )
        require_bounded_yaml(text, _MOST_CHARACTERS)
    except (OSError, ValueError) as error:
        raise ConfigLoadError(f"{path}: cannot be read as a config: {error}") from error
    # Files without aliases, that is most, are not parsed twice.
    if "&" not in text or "*" not in text:
        return
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = 0 if root is None else _values(root, {})
    except RecursionError:
        raise ConfigLoadError(f"{path}: is nested too deeply, or an alias contains itself") from None
    except YAMLError:
        # Loading the file reports the error.
        return
    if values > _MOST_VALUES:
        raise ConfigLoadError(
            f"{path}: its aliases expand to more than {_MOST_VALUES:,} values: write the values without aliases"
        )


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Counts the values below a node, those of an alias once per use."""
    if id(node) not in known:
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        else:
            children = node.value if isinstance(node, yaml.SequenceNode) else []
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    return known[id(node)]
