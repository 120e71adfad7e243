"""Tests the import of Megatron-DeepSpeed checkpoints against transformers models with the same weights."""

from __future__ import annotations

import enum
import itertools
import os
import shutil
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.errors import CheckpointError, ConfigError, DataError, MegadsError
from megads.tools.convert.export import export_checkpoint
from megads.tools.convert.export_config import ExportConfig, ExportFormat, ExportPrecision
from megads.tools.convert.import_config import ImportConfig, ImportFormat
from megads.tools.convert.load import import_folder
from megads.tools.convert.pickles import Record
from megads.tools.convert.source import Arguments
from tests.small_run import TOKENS, write_dataset
from tests.tools.convert import megatron_files as files

transformers = pytest.importorskip("transformers")
PADDED = 360
TOLERANCE = 2e-5
"""Absolute, for logits of magnitude up to 10."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a trained tokenizer."""
    return Path(f"{write_dataset(tmp_path_factory.mktemp('data'))}.tokenizer.json")


def ids() -> Tensor:
    return torch.randint(0, TOKENS, (2, 17), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def our_logits(run: Path) -> Tensor:
    model = load_unsharded(open_checkpoint(run), torch.device("cpu"), torch.float32)
    return model(ids(), BatchInfo(torch.arange(2)))


@torch.no_grad()
def their_logits(model: Any) -> Tensor:
    return model(ids()).logits  # type: ignore[no-any-return]


def write_bloom(folder: Path, model: Any, tp: int = 2, pp: int = 1, **changes: Any) -> Path:
    return files.write(
        folder, files.bloom_layers(model), files.bloom_arguments(model, tp, pp, **changes), TOKENS, lambdas=1
    )


def imported(folder: Path, output: Path, **options: Any) -> Path:
    return import_folder(ImportConfig(str(folder), str(output), **options)).folder


@pytest.mark.always("3-2")
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2), (2, 1), (3, 2), (12, 1), (12, 2)])
def test_bloom(tp: int, pp: int, tmp_path: Path) -> None:
    """Catches tp shards in the wrong order (10 before 2), a merge along the wrong dimension, blocks that are off by one
    layer, and vocabulary padding that is not removed."""
    model = files.bloom(PADDED)
    folder = write_bloom(tmp_path / "theirs", model, tp, pp)
    run = imported(folder, tmp_path / "run")
    torch.testing.assert_close(our_logits(run), their_logits(model)[..., :TOKENS], atol=TOLERANCE, rtol=0)
    whole = imported(folder / "global_step10", tmp_path / "whole", vocab_size=PADDED)
    torch.testing.assert_close(our_logits(whole), their_logits(model), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("by_name", [True, False])
def test_enums_however_python_pickles_them(by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches refusing, as code to be run, an enum member pickled as an attribute of its class, as early releases of
    Python 3.11 do."""

    def reduced(member: enum.Enum, _protocol: int) -> tuple[Any, ...]:
        return (getattr, (type(member), member.name)) if by_name else (type(member), (member.value,))

    monkeypatch.setattr(enum.Enum, "__reduce_ex__", reduced)
    model = files.bloom(PADDED)
    folder = write_bloom(tmp_path / "theirs", model)
    state = next(folder.glob("global_step10/mp_rank_00*"))
    assert (b"getattr" in state.read_bytes()) is by_name
    run = imported(folder, tmp_path / "run")
    torch.testing.assert_close(our_logits(run), their_logits(model)[..., :TOKENS], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("tp", "kv"), [(1, 12), (2, 6), (3, 3), (12, 12)])
def test_microsofts_llama(tp: int, kv: int, tmp_path: Path) -> None:
    """Catches gate and up shards of several ranks merged in the wrong order, GQA groups read as single heads, and a
    dropped output head; here no lambda layer precedes the blocks in the layer numbers."""
    model = files.llama(PADDED, kv)
    arguments = files.llama_arguments(model, tp, 1)
    folder = files.write(tmp_path / "theirs", files.llama_layers(model), arguments, TOKENS, lambdas=0)
    run = imported(folder, tmp_path / "run", vocab_size=PADDED)
    torch.testing.assert_close(our_logits(run), their_logits(model), atol=TOLERANCE, rtol=0)


# bias_gelu_fusion is on by default and applies to GELU only.
ACTIVATIONS: list[tuple[str, float, dict[str, Any]]] = [
    ("gelu", 0.5, {"bias_gelu_fusion": False}),
    ("gelu_new", 1.0, {"bias_gelu_fusion": True}),
    ("gelu_new", 0.5, {"bias_gelu_fusion": False, "openai_gelu": True}),
    ("relu2", 0.5, {"bias_gelu_fusion": True, "squared_relu": True}),
]


@pytest.mark.parametrize(("activation", "rotary", "changes"), ACTIVATIONS)
def test_activations_and_partial_rotary_embedding(
    activation: str, rotary: float, changes: dict[str, Any], tmp_path: Path, tokenizer: Path
) -> None:
    """Catches the exact GELU taken for its tanh approximation or the reverse, a squared ReLU taken for GELU, and
    frequencies of all features of a head where only some are rotated."""
    model = files.neox(PADDED, activation, rotary)
    arguments = files.neox_arguments(model, 2, 1, rotary_percent=rotary, **changes)
    folder = files.write(tmp_path / "theirs", files.neox_layers(model), arguments, TOKENS, lambdas=0)
    run = imported(folder, tmp_path / "run", tokenizer=str(tokenizer))
    wanted = their_logits(model)[..., :TOKENS]
    torch.testing.assert_close(our_logits(run), wanted, atol=TOLERANCE, rtol=0)
    # In and out: the exported weights are those of transformers' model.
    config = ExportConfig(str(run), str(tmp_path / "out"), ExportFormat.gpt_neox, ExportPrecision.fp32)
    again = transformers.AutoModelForCausalLM.from_pretrained(export_checkpoint(config).folder).eval()
    assert torch.equal(their_logits(again), wanted)


def test_the_tokenizer_tells_the_vocabulary(tmp_path: Path, tokenizer: Path) -> None:
    """Catches a vocabulary size other than the tokenizer's, and one below it or above the model's that is accepted."""
    folder = write_bloom(tmp_path / "theirs", files.bloom(PADDED))
    run = imported(folder, tmp_path / "run", tokenizer=str(tokenizer))
    handle = open_checkpoint(run)
    assert handle.manifest.run.model["vocab_size"] == TOKENS and handle.manifest.run.tokenizer is not None
    assert (run / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    with pytest.raises(ConfigError, match=rf"vocab_size = {TOKENS - 1}"):
        imported(folder, tmp_path / "more", tokenizer=str(tokenizer), vocab_size=TOKENS - 1)
    with pytest.raises(ConfigError, match=r"vocab_size = 361: the model has 360 rows"):
        imported(folder, tmp_path / "more", vocab_size=361)


def test_norms_that_drifted_apart(tmp_path: Path) -> None:
    """Catches norms read from one rank only: BLOOM's differ between ranks, and its release has the mean."""
    model = files.bloom(PADDED)
    folder = write_bloom(tmp_path / "theirs", model)
    for rank, shift in ((0, 0.5), (1, -0.5)):
        path = folder / "global_step10" / f"layer_04-model_{rank:02d}-model_states.pt"
        state = torch.load(path)
        state["input_layernorm.weight"] += shift
        torch.save(state, path)
    run = imported(folder, tmp_path / "run", vocab_size=PADDED)
    torch.testing.assert_close(our_logits(run), their_logits(model), atol=TOLERANCE, rtol=0)


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("run.by.a.pickle",))


BLOCK, FIRST = "layer_04-model_01-model_states.pt", "mp_rank_00_model_states.pt"


def _change(path: Path, changes: dict[str, Any]) -> None:
    state = torch.load(path, weights_only=False)
    torch.save({name: value for name, value in (state | changes).items() if value is not None}, path)


def _without_layer(step: Path, layer: int) -> None:
    for path in step.glob(f"layer_{layer:02d}-*"):
        path.unlink()


def _with_an_extra(step: Path) -> None:
    for rank in (0, 1):
        _change(step / f"layer_04-model_{rank:02d}-model_states.pt", {"mlp.gate_bias": torch.zeros(4)})


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no shard": lambda step: (step / BLOCK).unlink(),
    "a shard more": lambda step: shutil.copyfile(step / BLOCK, step / BLOCK.replace("01-", "02-")),
    "no layer": lambda step: _without_layer(step, 4),
    "no last layer": lambda step: _without_layer(step, 5),
    "no norm": lambda step: _without_layer(step, 7),
    "no tensor": lambda step: _change(step / BLOCK, {"mlp.dense_4h_to_h.bias": None}),
    "a shard of another shape": lambda step: _change(step / BLOCK, {"mlp.dense_4h_to_h.weight": torch.zeros(47, 96)}),
    "an extra tensor": _with_an_extra,
    "truncated": lambda step: (step / BLOCK).write_bytes((step / BLOCK).read_bytes()[:-400]),
    "integers": lambda step: _change(step / BLOCK, {"mlp.dense_4h_to_h.weight": torch.zeros(48, 96, dtype=torch.int8)}),
    "a pickle that runs": lambda step: _change(step / BLOCK, {"mlp.dense_4h_to_h.bias": _Runs()}),
    "settings that run": lambda step: _change(step / FIRST, {"args": _Runs()}),
    "no settings": lambda step: (step / FIRST).unlink(),
    "no args": lambda step: _change(step / FIRST, {"args": None}),
    "no format": shutil.rmtree,
    "no format, it is said": shutil.rmtree,
}


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        ("no shard", CheckpointError, f"{BLOCK} is missing: .* tensor parallelism of 2"),
        ("a shard more", CheckpointError, r"model_02-model_states.pt is one too many"),
        ("no layer", CheckpointError, r"blocks without a gap.*found: 1 embedding, 3 block, 5 block, 7 final norm"),
        ("no last layer", CheckpointError, r"layers\.2.*missing, which Megatron-DeepSpeed.* has by args of mp_rank_00"),
        ("no norm", CheckpointError, "blocks without a gap"),
        ("no tensor", CheckpointError, f"{BLOCK} and .*: mlp.dense_4h_to_h.bias is in one of them only"),
        ("another shape", CheckpointError, "has shape .*, by args of mp_rank_00_model_states.pt it has"),
        ("a shard of another shape", CheckpointError, "does not fit"),
        ("an extra tensor", CheckpointError, r"layers\.1\.mlp\.gate_bias is left over"),
        ("truncated", CheckpointError, f"{BLOCK} cannot be read"),
        ("integers", CheckpointError, "is torch.int8: want float32"),
        ("a pickle that runs", CheckpointError, r"nothing was run \(posix.mkdir"),
        ("settings that run", CheckpointError, r"mp_rank_00.*nothing was run \(posix.mkdir"),
        ("no settings", CheckpointError, "mp_rank_00_model_states.pt cannot be read: No such file"),
        ("no args", CheckpointError, "holds no args"),
        ("a width in words", ConfigError, "hidden_size = 'wide': want an integer"),
        ("two activations", ConfigError, "swiglu and openai_gelu are both set"),
        ("a gated unit", ConfigError, "glu_activation = 'geglu'"),
        ("another position", ConfigError, "position_embedding_type = 'relative'"),
        ("a larger tokenizer", DataError, "tokens, by args of mp_rank_00"),
        ("no format", ConfigError, "config.json cannot be read"),
        ("no format, it is said", ConfigError, "has no files of format=megatron_deepspeed"),
    ],
)
def test_bad_folders(
    damage: str, error: type[MegadsError], told: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an import of a damaged folder, a pickle whose code is run, and an import that leaves a partial run."""
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, dict[str, Any]] = {
        "a width in words": {"hidden_size": "wide"}, "two activations": {"swiglu": True, "openai_gelu": True},
        "a gated unit": {"glu_activation": "geglu"},
        "another position": {"position_embedding_type": "relative"}, "another shape": {"ffn_hidden_size": 96},
    }  # fmt: skip
    model = files.bloom(PADDED if damage != "a larger tokenizer" else 288)
    step = write_bloom(tmp_path / "theirs", model, **arguments.get(damage, {})) / "global_step10"
    DAMAGES.get(damage, bool)(step)
    options: dict[str, Any] = {
        "a larger tokenizer": {"tokenizer": str(tokenizer)},
        "no format, it is said": {"format": ImportFormat.megatron_deepspeed},
    }.get(damage, {})
    with pytest.raises(error, match=told):
        imported(tmp_path / "theirs", tmp_path / "run", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def _as_one_stack(layer: dict[str, Tensor]) -> None:
    weight = layer["self_attention.query_key_value.weight"]
    layer["self_attention.query_key_value.weight"] = weight.view(12, 3, 4, 48).transpose(0, 1).reshape(144, 48)


def _as_old_versions(layer: dict[str, Tensor]) -> None:
    weight = layer["self_attention.query_key_value.weight"]
    layer["self_attention.query_key_value.weight"] = weight.view(12, 3, 4, 48).transpose(1, 2).reshape(144, 48)


def _dense_by_rows(layer: dict[str, Tensor]) -> None:
    weight = layer["self_attention.dense.weight"]
    layer["self_attention.dense.weight"] = weight.view(48, 2, 24).transpose(0, 1).reshape(48, 48)


@pytest.mark.parametrize("defect", [_as_one_stack, _as_old_versions, _dense_by_rows])
def test_a_defect_shows(defect: Any, tmp_path: Path) -> None:
    """Catches a comparison of logits that does not detect a wrong order of q, k and v, or a wrong tp split."""
    model = files.bloom(PADDED)
    layers = files.bloom_layers(model)
    defect(layers[2])
    folder = files.write(tmp_path / "theirs", layers, files.bloom_arguments(model, 2, 1), TOKENS, lambdas=1)
    run = imported(folder, tmp_path / "run", vocab_size=PADDED)
    assert (our_logits(run) - their_logits(model)).abs().max() > 1e3 * TOLERANCE


ODD = (None, "x", [], {}, -1, 0, True, False, 1e300, float("nan"), [1], {"a": 1}, 2**70, torch.bfloat16, Record(3))


def test_any_arguments_are_read_or_refused() -> None:
    """Catches training arguments that cause a traceback: each is tried with values of every other type."""
    from megads.tools.convert import gpt_neox, megatron_core, megatron_deepspeed
    from tests.tools.convert import megatron_core_peer, test_gpt_neox

    model = types.SimpleNamespace(
        config=types.SimpleNamespace(n_layer=3, vocab_size=PADDED, num_hidden_layers=3, num_key_value_heads=4)
    )
    neox = {name.replace("-", "_"): value for name, value in test_gpt_neox.SETTINGS.items()}
    neox |= {name.replace("-", "_"): value for name, value in test_gpt_neox.LLAMA_SETTINGS.items()}
    cases: list[tuple[Callable[[Arguments], object], dict[str, Any]]] = [
        (megatron_deepspeed.model_of, vars(files.bloom_arguments(model, 2, 1))),
        (megatron_deepspeed.model_of, vars(files.llama_arguments(model, 2, 1))),
        (gpt_neox.model_of, neox | {"padded_vocab_size": PADDED, "num_kv_heads": 4, "intermediate_size": 72}),
    ]
    for shape in (megatron_core_peer.LLAMA, megatron_core_peer.GPT):
        core = vars(megatron_core_peer.arguments(shape, 1, 1))
        cases.append((lambda found: megatron_deepspeed.model_of(megatron_core.to_deepspeed_names(found)), core))
    for read, values in cases:
        if "position_embedding_type" in values and not isinstance(values["position_embedding_type"], str):
            values["position_embedding_type"] = Record(values["position_embedding_type"].value)
        assert read(Arguments(values, "args"))
        for name, value in itertools.product(values, ODD):
            with suppress(ConfigError):
                read(Arguments(values | {name: value}, "args"))
