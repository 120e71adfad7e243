"""The dial: a whole recipe as a function of the number of layers (docs/dial.md).

conf/experiment/dial.yaml gives each key of the recipe the value `${dial:<key>}`, an interpolation that this module
resolves. A value that is set elsewhere, on the command line or in a file, takes its place, and the formulas of all
later keys use it. The frozen config has plain values; `explain_dial` tells from them which ones follow from the depth.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omegaconf import DictConfig, Node, OmegaConf

from megads.config.train import AUTO, DialConfig
from megads.errors import ConfigError

HEAD_SIZE = 64
BASE_WIDTH = 256
"""Width at which the learning rate was tuned, as model.mup.base_width of the experiment says."""
BASE_LR = 1.2e-2
"""Best peak rate of Muon at the base width, see docs/dial.md."""
_SHORTEST, _LONGEST = 256, 2048
_MICRO_BATCH_TOKENS = 8192
"""Tokens of a micro-batch, which fill a GPU; more only take memory."""
_WARMUP_SHARE, _WARMUP_STEPS, _WARMUP_MOST = 0.02, 5, 0.1
_GATED = ("swiglu", "geglu", "geglu_exact")

Values = Mapping[str, Any]
Formula = Callable[[Values], tuple[Any, str]]
"""Function from the values of earlier keys to a value and its reason."""


def _num_layers(of: Values) -> tuple[Any, str]:
    return of["dial.depth"], "dial.depth"


def _hidden_size(of: Values) -> tuple[Any, str]:
    width = of["model.num_layers"] * of["dial.aspect_ratio"]
    # A width that heads of 64 features divide.
    width = max(1, round(width / HEAD_SIZE)) * HEAD_SIZE
    return width, f"num_layers x dial.aspect_ratio = {of['dial.aspect_ratio']}, a multiple of {HEAD_SIZE}"


def _num_heads(of: Values) -> tuple[Any, str]:
    width = of["model.hidden_size"]
    # Rotary embedding rotates pairs of features.
    numbers = [number for number in range(1, width // 2 + 1) if width % (2 * number) == 0] or [1]
    heads = min(numbers, key=lambda number: abs(math.log(width / number / HEAD_SIZE)))
    return heads, f"hidden_size / {width // heads}, the size of a head at all depths if it divides"


def _ffn_size(of: Values) -> tuple[Any, str]:
    if of["model.mlp"] in _GATED:
        width = max(1, round(of["model.hidden_size"] * 8 / 3 / HEAD_SIZE)) * HEAD_SIZE
        return width, f"8/3 x hidden_size, as model.mlp={of['model.mlp']} has a third matrix"
    return 4 * of["model.hidden_size"], "4 x hidden_size"


def _seq_len(of: Values) -> tuple[Any, str]:
    wanted = 64 * of["model.num_layers"]
    length = min(max(2 ** math.ceil(math.log2(wanted)), _SHORTEST), _LONGEST)
    return length, f"64 x num_layers, rounded up to a power of two, from {_SHORTEST} to {_LONGEST}"


def _max_seq_len(of: Values) -> tuple[Any, str]:
    return of["train.seq_len"], "train.seq_len"


def _minutes(of: Values) -> tuple[Any, str]:
    return of["dial.minutes"], "dial.minutes"


def _tokens(of: Values) -> tuple[Any, str]:
    other = next((key for key in _OTHER_LENGTHS if of[key] is not None), None)
    if other is not None:
        return None, f"{other} sets the length"
    parameters, each = _block_parameters(of), of["dial.tokens_per_parameter"]
    why = f"dial.tokens_per_parameter = {each:g} x {parameters:,} parameters of the blocks' matrices"
    return round(each * parameters), f"{why} (Hoffmann et al. 2022)"


_OTHER_LENGTHS = ("train.minutes", "train.samples", "train.steps", "train.epochs")


def _block_parameters(of: Values) -> int:
    """Number of parameters of the blocks' matrices: the embedding has most of a small model's, and learns from fewer
    tokens."""
    width, heads = of["model.hidden_size"], of["model.num_heads"]
    size = of["model.head_size"] or width / heads
    attention = (2 * heads + 2 * (of["model.num_kv_heads"] or heads)) * size * width
    matrices = 3 if of["model.mlp"] in _GATED else 2
    ffn_size = of["model.ffn_size"] or 4 * width
    return max(1, round(of["model.num_layers"] * (attention + matrices * ffn_size * width)))


def _flops_per_token(of: Values) -> float:
    """FLOPs of training on a token, without embedding and head, as DeepSeek counts them."""
    attention = 12 * of["model.num_layers"] * of["model.hidden_size"] * of["train.seq_len"]
    return float(6 * _block_parameters(of) + attention)


_BATCH_FACTOR, _BATCH_EXPONENT = 0.2920, 0.3271
"""Best tokens per step for the FLOPs of a run: 0.292 C^0.3271 (DeepSeek LLM 2024, arXiv:2401.02954)."""


def _planned_tokens(of: Values) -> float:
    """Tokens of the run at the recipe's batch size; the compute-optimal ones if the length depends on the text."""
    flops = _flops_per_token(of)
    if of["train.tokens"] is not None:
        return float(max(1, of["train.tokens"]))
    if of["train.samples"] is not None:
        return float(max(1, of["train.samples"] * of["train.seq_len"]))
    if of["train.minutes"] is not None:
        return max(1.0, of["dial.tflops"] * 1e12 * 60 * of["train.minutes"] / flops)
    if isinstance(of["train.steps"], int):
        # The batch size B that solves B = factor (FLOPs per token x steps x B)^exponent.
        steps = max(1, of["train.steps"])
        batch = (_BATCH_FACTOR * (flops * steps) ** _BATCH_EXPONENT) ** (1.0 / (1.0 - _BATCH_EXPONENT))
        return batch * steps
    return float(of["dial.tokens_per_parameter"] * _block_parameters(of))


def _recipe_batch(of: Values) -> int:
    """The recipe's samples per step: a power of two per data-parallel rank."""
    tokens = _BATCH_FACTOR * (_flops_per_token(of) * _planned_tokens(of)) ** _BATCH_EXPONENT
    each = tokens / of["train.seq_len"] / of["parallel.dp"]
    return int(of["parallel.dp"] * 2 ** max(0, round(math.log2(each))))


def _global_batch_size(of: Values) -> tuple[Any, str]:
    flops, batch = _flops_per_token(of) * _planned_tokens(of), _recipe_batch(of)
    by = f" ({of['train.minutes']:g} min at dial.tflops = {of['dial.tflops']:g})" if of["train.minutes"] else ""
    formula = f"0.292 C^0.3271 tokens for C = {flops:.3g} FLOPs{by}, rounded to a power of two (DeepSeek 2024)"
    return batch, f"{batch * of['train.seq_len']:,} tokens: {formula}"


def _micro_batch_size(of: Values) -> tuple[Any, str]:
    each = max(1, of["train.global_batch_size"] // of["parallel.dp"])
    most = max(1, min(_MICRO_BATCH_TOKENS // of["train.seq_len"], each // of["parallel.pp"]))
    size = max(number for number in range(1, most + 1) if each % number == 0)
    return size, f"at most {_MICRO_BATCH_TOKENS:,} tokens, a divisor of a rank's {each} samples"


def _lr(of: Values) -> tuple[Any, str]:
    ratio, width = of["train.global_batch_size"] / _recipe_batch(of), of["model.hidden_size"] / BASE_WIDTH
    why = f"best at a width of {BASE_WIDTH}; muP scales it by 1/sqrt({width:g}) for the blocks' matrices"
    # The best rate grows as the square root of the batch size and falls as the cube root of the tokens (Bjorck et al.
    # 2024), and a given number of steps has fewer tokens in smaller batches.
    root = 6 if isinstance(of["train.steps"], int) else 2
    rate = float(f"{BASE_LR * ratio ** (1 / root):.3g}")
    return rate, why if ratio == 1 else f"{why}; x {ratio:g}^(1/{root}) for the batch that you set"


def _steps(of: Values) -> float:
    """Steps of the run, at least one; estimated for minutes."""
    if isinstance(of["train.steps"], int):
        return float(max(1, of["train.steps"]))
    return max(1.0, _planned_tokens(of) / of["train.global_batch_size"] / of["train.seq_len"])


def _weight_decay(of: Values) -> tuple[Any, str]:
    steps = _steps(of)
    tokens = steps * of["train.global_batch_size"] * of["train.seq_len"]
    share = 1.084 * (tokens / _block_parameters(of)) ** -0.527
    decay = 1.0 / (share * of["optim.lr"] * steps)
    law = f"share = {share:.2g} = 1.084 (tokens per parameter)^-0.527 (Bergsma et al. 2025)"
    return float(f"{decay:.2g}"), f"1 / (share x lr x {steps:,.0f} steps), {law}"


def _warmup_samples(of: Values) -> tuple[Any, str]:
    batch, steps = of["train.global_batch_size"], _steps(of)
    warmup = max(min(_WARMUP_STEPS, int(_WARMUP_MOST * steps)), round(_WARMUP_SHARE * steps))
    least = f"at least {_WARMUP_STEPS} or {_WARMUP_MOST:.0%}"
    return warmup * batch, f"{warmup} steps: {_WARMUP_SHARE:.0%} of the run, {least}"


FORMULAS: Mapping[str, Formula] = {
    "model.num_layers": _num_layers,
    "model.hidden_size": _hidden_size,
    "model.num_heads": _num_heads,
    "model.ffn_size": _ffn_size,
    "train.seq_len": _seq_len,
    "model.max_seq_len": _max_seq_len,
    "train.minutes": _minutes,
    "train.tokens": _tokens,
    "train.global_batch_size": _global_batch_size,
    "train.micro_batch_size": _micro_batch_size,
    "optim.lr": _lr,
    "optim.weight_decay": _weight_decay,
    "schedule.warmup_samples": _warmup_samples,
}
"""Formula of each key of the recipe; each reads earlier keys and those of `INPUTS` only."""

INPUTS = (
    *("dial.depth", "dial.aspect_ratio", "dial.tokens_per_parameter", "dial.minutes", "dial.tflops"),
    *("model.mlp", "model.head_size", "model.num_kv_heads", "parallel.dp", "parallel.pp"),
    *("train.samples", "train.steps", "train.epochs"),
)
"""Keys outside of the recipe that formulas read."""


@dataclass(frozen=True)
class DialValue:
    """A value of the recipe.

    Attributes:
        key: config key; overriding it replaces the value.
        value: the value in force.
        why: the formula, or "set by you".
        is_derived: whether it follows from the dial.
    """

    key: str
    value: Any
    why: str
    is_derived: bool


def derive_recipe(inputs: Values, given: Values) -> dict[str, DialValue]:
    """Returns the recipe of a dial, by key.

    Args:
        inputs: value of each key of `INPUTS`.
        given: values of keys of the recipe that are set by the user; later keys follow from these.
    """
    values, found = dict(inputs), dict[str, DialValue]()
    for key, formula in FORMULAS.items():
        is_derived = key not in given
        value, why = formula(values) if is_derived else (given[key], "set by you")
        values[key] = value
        found[key] = DialValue(key, value, why, is_derived)
    return found


class WithDial(Protocol):
    """The root config, as far as the dial is about it; its other sections are read by name."""

    dial: DialConfig


def explain_dial(config: WithDial) -> list[DialValue]:
    """Returns the recipe of a run with its reasons; empty without a dial.

    A value that differs from what the dial derives from the others was set by the user.

    Args:
        config: config of a run, which may be frozen.
    """
    if config.dial.depth is None:
        return []
    values = {key: _value_at(config, key) for key in (*INPUTS, *FORMULAS)}
    given = dict[str, Any]()
    for key, formula in FORMULAS.items():
        # Of earlier keys a formula reads the values in force, whoever set them.
        if formula(values)[0] != values[key]:
            given[key] = values[key]
    return list(derive_recipe({key: values[key] for key in INPUTS}, given).values())


def _value_at(config: WithDial, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def dial_text(values: Sequence[DialValue]) -> str:
    """Returns a heading and a line per value for the console: the override that sets it, and its reason."""
    shown = [(f"{item.key}={'null' if item.value is None else item.value}", item.why) for item in values]
    width = max(len(text) for text, _ in shown)
    heading = "experiment=dial: each value, why it is so; another one as an override replaces it (docs/dial.md)"
    return "\n".join([heading, *(f"  {text:<{width}}  {why}" for text, why in shown)])


def _is_derived(raw: Any, key: str) -> bool:
    return bool(raw == f"${{dial:{key.partition('.')[2]}}}")


def _raw_values(root: DictConfig) -> dict[str, Any]:
    """Values of the recipe's keys as written, interpolations unresolved."""
    found = {}
    for key in FORMULAS:
        section, _, name = key.partition(".")
        # `in` and [] would resolve the interpolation.
        node = root[section]._get_node(name)
        found[key] = node._value() if isinstance(node, Node) else None
    return found


def _resolve(name: str, *, _root_: DictConfig) -> Any:
    """Resolves `${dial:<name>}`, with the last part of a key of the recipe as its name."""
    given = {
        key: OmegaConf.select(_root_, key) for key, raw in _raw_values(_root_).items() if not _is_derived(raw, key)
    }
    inputs = {key: OmegaConf.select(_root_, key) for key in INPUTS}
    return next(item.value for key, item in derive_recipe(inputs, given).items() if key.partition(".")[2] == name)


OmegaConf.register_new_resolver("dial", _resolve, replace=True)


def check_dial(config: DictConfig) -> None:
    """Checks the dial before its interpolations are resolved.

    Args:
        config: composed config of a verb, which may have no dial.

    Raises:
        ConfigError: a value is invalid, two lengths are given, or the experiment is missing.
    """
    if not isinstance(config.get("dial"), DictConfig):
        return
    dial: DialConfig = OmegaConf.to_object(config.dial)  # type: ignore[assignment]
    dial.check()
    raw = _raw_values(config)
    if not any(_is_derived(value, key) for key, value in raw.items()):
        if dial.depth is not None or dial.minutes is not None:
            given = "depth" if dial.depth is not None else "minutes"
            raise ConfigError(
                f"dial.{given} = {getattr(dial, given)} only applies with experiment=dial, whose values follow from "
                "it: add experiment=dial, or remove it"
            )
        return
    if dial.depth is None:
        raise ConfigError("dial.depth = null: experiment=dial needs a number of layers, for example dial.depth=4")
    lengths = {f"train.{name}": OmegaConf.select(config, f"train.{name}") for name in ("samples", "steps", "epochs")}
    lengths["train.tokens"] = None if _is_derived(raw["train.tokens"], "train.tokens") else raw["train.tokens"]
    for key, value in lengths.items():
        # As everywhere, steps=auto may be combined with minutes.
        if dial.minutes is not None and value is not None and value != AUTO:
            raise ConfigError(f"dial.minutes = {dial.minutes:g} and {key} = {value} both set the length: remove one")
