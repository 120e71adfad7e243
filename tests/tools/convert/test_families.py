"""Every family in and out against transformers: logits, greedy tokens, and the files that leave."""

from __future__ import annotations

import dataclasses
import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.errors import ConfigError
from megads.model.config import LayerKind, ModelConfig, Position
from megads.model.gpt import GPT
from megads.model.moe_config import MoEConfig
from megads.tools.convert import export, load
from megads.tools.convert.architecture import _USUAL, _USUAL_EXPERTS, BIASES
from megads.tools.convert.architectures import ARCHITECTURES, architecture_of
from megads.tools.convert.export_config import ExportConfig, ExportFormat, ExportPrecision
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.layer_maps import pattern_of
from tests.tools.convert.families import (
    BOUND,
    CASES,
    greedy,
    our_logits,
    reloaded,
    their_logits,
    their_model,
    tokens,
    write_folder,
)

transformers = pytest.importorskip("transformers")

EVERY = [(name, number) for name, cases in CASES.items() for number in range(len(cases))]


def imported(folder: Path, output: Path) -> GPT:
    found = load.import_folder(ImportConfig(str(folder), str(output)))
    return load_unsharded(open_checkpoint(found.folder), torch.device("cpu"), torch.float32).eval()


@pytest.mark.always("llama-0", "gemma3_text-0")
@pytest.mark.parametrize(("name", "number"), EVERY, ids=[f"{name}-{number}" for name, number in EVERY])
def test_a_family_computes_and_writes_the_same_in_and_out(name: str, number: int, tmp_path: Path) -> None:
    """Catches a key of config.json that is misread, dropped or written wrongly, a projection with other rows, and a
    tensor that leaves with other values than it came with."""
    theirs = their_model(name, CASES[name][number])
    folder = write_folder(theirs, tmp_path / "theirs")
    ours = imported(folder, tmp_path / "in")
    wanted = their_logits(theirs, tokens())
    assert wanted.std() < 2.0
    torch.testing.assert_close(our_logits(ours, tokens()), wanted, atol=BOUND, rtol=0)
    made = theirs.generate(tokens(), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(greedy(ours, tokens(), 8), made)

    options: dict[str, Any] = {"format": ExportFormat(name), "precision": ExportPrecision.fp32}
    out = export.export_checkpoint(ExportConfig(str(tmp_path / "in"), str(tmp_path / "out"), **options)).folder
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again, loading = reloaded(out)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    assert torch.equal(their_logits(again, tokens()), wanted)


@pytest.mark.parametrize(
    ("name", "number"), [("falcon", 0), ("falcon", 1), ("gemma", 0), ("gptj", 0), ("llama", 1), ("qwen2", 0)]
)
def test_another_engine_continues_text_as_transformers_does(name: str, number: int, tmp_path: Path) -> None:
    """Catches an export that only transformers reads as it is meant: CTranslate2 has its own converters and kernels."""
    engines = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    theirs = their_model(name, CASES[name][number])
    imported(write_folder(theirs, tmp_path / "theirs"), tmp_path / "in")
    config = ExportConfig(str(tmp_path / "in"), str(tmp_path / "out"), ExportFormat(name), ExportPrecision.fp32)
    out = export.export_checkpoint(config).folder
    converter = engines.converters.TransformersConverter(str(out))
    engine = engines.Generator(converter.convert(str(tmp_path / "engine")), compute_type="float32", intra_threads=1)
    ids_bs = tokens(9)[:1]
    prompt = transformers.AutoTokenizer.from_pretrained(out).convert_ids_to_tokens(ids_bs[0].tolist())
    [made] = engine.generate_batch([prompt], max_length=8, sampling_topk=1, include_prompt_in_result=False)
    wanted = theirs.generate(ids_bs, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 9:].tolist()
    [found] = made.sequences_ids
    assert found == wanted[: len(found)] and len(found) >= min(8, len(wanted) - 1)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text", "olmo3", "starcoder2"])
def test_a_window_ends_at_the_same_token(name: str, tmp_path: Path) -> None:
    """Catches a window that is one token too long or short: the sequence is shorter, as long, and longer than it."""
    theirs = their_model(name, CASES[name][0])
    window = theirs.config.sliding_window
    ours = imported(write_folder(theirs, tmp_path / "theirs"), tmp_path / "in")
    for seq_len in (window - 1, window, window + 1, 2 * window):
        wanted = their_logits(theirs, tokens(seq_len))
        torch.testing.assert_close(our_logits(ours, tokens(seq_len)), wanted, atol=BOUND, rtol=0)


@pytest.mark.parametrize(
    ("name", "drops", "adds"),
    [
        ("gemma3_text", ("layer_types", "rope_parameters"), {"sliding_window_pattern": 6, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "rope_scaling": None}),
        ("gemma2", ("layer_types", "rope_parameters"), {"rope_theta": 1e4}),
        ("olmo3", ("layer_types", "rope_parameters"), {"rope_theta": 5e5, "rope_scaling": None}),
        ("smollm3", ("layer_types", "no_rope_layers", "rope_parameters"), {"no_rope_layer_interval": 4,
            "rope_theta": 2e6}),
        ("qwen2", ("layer_types", "rope_parameters"), {"rope_theta": 1e4}),
        ("phi", ("rope_parameters",), {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("gpt_neox", ("rope_parameters",), {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
    ],
)  # fmt: skip
def test_files_of_older_versions_give_the_same_model(name: str, drops: tuple[str, ...], adds: dict[str, Any]) -> None:
    """Catches a config.json of transformers 4 whose layers or frequencies are taken for other ones."""
    content = json.loads(their_model(name, CASES[name][0]).config.to_json_string(use_diff=False))
    older = {key: value for key, value in content.items() if key not in drops} | adds
    assert ARCHITECTURES[name].model_of(older) == ARCHITECTURES[name].model_of(content)


def test_a_pattern_is_the_shortest_that_repeats() -> None:
    """Catches a pattern of as many kinds as layers, and one whose last repetition is not cut off."""
    sliding, full = LayerKind(window=4), LayerKind()
    assert pattern_of([sliding, sliding, full, sliding, sliding]) == [LayerKind(2, window=4), full]
    assert pattern_of([full] * 3) == []
    assert pattern_of([sliding, full, full, full]) == [sliding, LayerKind(3)]
    no_positions = LayerKind(position=Position.none)
    config = ModelConfig(num_layers=5, layer_pattern=pattern_of([full, no_positions] * 2 + [full]))
    assert [config.layer(index).position for index in (3, 4)] == [Position.none, Position.alibi]


def test_an_unknown_family_is_told_its_nearest() -> None:
    """Catches a refusal that leaves the user without the family to compare with, and the key that differs."""
    config = transformers.AutoConfig.for_model("glm4", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"model_type = 'glm4': megads knows .*; by its keys the nearest is .*"):
        architecture_of(json.loads(config.to_json_string(use_diff=False)))


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_family_refuses_what_it_cannot_express(name: str) -> None:
    """Catches an export that drops a field of the model silently: every family refuses several softcaps and sinks."""
    architecture = ARCHITECTURES[name]
    content = json.loads(their_model(name, CASES[name][0]).config.to_json_string(use_diff=False))
    model = architecture.model_of(content)
    assert architecture.refusals(model) == []
    for field, value in (
        ("attention_sinks", True), ("qkv_clip", 3.5), ("residual_multiplier", 0.5), ("logit_scale", 0.3),
        ("norm_zero_centered", True), ("rotary_interleaved", True), ("rotary_fraction", 0.5), ("window", 3),
        ("embedding_multiplier", 2.0), ("attention_multiplier", 0.7), ("parallel_block", True), ("head_bias", True),
        ("embedding_norm", True), ("scale_embedding", True), ("final_logit_softcap", 3.0),
    ):  # fmt: skip
        if getattr(model, field) == value:
            continue
        changed = ModelConfig(**{**vars(model), field: value})
        if not architecture.refusals(changed):
            assert architecture.model_of(architecture.config_json(changed)) == changed, field


def test_no_option_of_the_model_is_unknown_to_exports() -> None:
    """Catches a new field of ModelConfig that exports drop silently, because it is not in the table of usual values."""
    sizes = {
        "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "ffn_size", "vocab_size", "max_seq_len",
        "norm_eps", "rope_theta",
    }  # fmt: skip
    handled = {"bias", "mlp", "block", "tie_embeddings", "mup", "moe"}
    only_in_training = {"hidden_dropout", "attention_dropout", "attention", "init_std"}
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields - set(_USUAL) - set(BIASES) == sizes | handled | only_in_training
    of_experts = {f"moe.{field.name}" for field in dataclasses.fields(MoEConfig)}
    losses = {"moe.global_loss", "moe.sequence_loss", "moe.z_loss"}
    assert of_experts - set(_USUAL) - set(_USUAL_EXPERTS) == {"moe.top_k", "moe.expert_ffn_size"} | losses


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_any_content_is_read_or_refused(name: str) -> None:
    """Catches a config.json that causes a traceback: each key is tried with values of every other type."""
    architecture = ARCHITECTURES[name]
    content = json.loads(their_model(name, CASES[name][-1]).config.to_json_string(use_diff=False))
    odd = (None, "x", [], {}, -1, 0, True, 1e300, float("nan"), [1], {"a": 1})
    scaled = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 16}
    for base in (content, content | {"rope_parameters": scaled}):
        for key, value in itertools.product(base, odd):
            with suppress(ConfigError):
                architecture.model_of(base | {key: value})
    for key, value in itertools.product(scaled, odd):
        with suppress(ConfigError):
            architecture.model_of(content | {"rope_parameters": scaled | {key: value}})
    for outer, inner in content.items():
        if isinstance(inner, dict):
            for key, value in itertools.product(inner, odd):
                with suppress(ConfigError):
                    architecture.model_of(content | {outer: inner | {key: value}})
