"""Every family in and out against transformers: logits, greedy tokens, and the files that leave."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.errors import ConfigError
from megads.evaluate.generation import Limits, Sampling, generate
from megads.model.config import LayerKind, ModelConfig, Position
from megads.model.gpt import GPT
from megads.model.kv_cache import with_cache
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
    odd_case,
    our_logits,
    reloaded,
    their_greedy,
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
    made = their_greedy(theirs, tokens(), 8)
    assert torch.equal(greedy(ours, tokens(), 8), made)

    options: dict[str, Any] = {"format": ExportFormat(name), "precision": ExportPrecision.fp32}
    out = export.export_checkpoint(ExportConfig(str(tmp_path / "in"), str(tmp_path / "out"), **options)).folder
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again, loading = reloaded(out)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    assert torch.equal(their_logits(again, tokens()), wanted)


# CTranslate2 has no softcaps in attention and no other scale than 1 / sqrt(head size); it reads a prompt that is longer
# than a window wrongly, that of the original model too, but generates beyond a window.
_AS_CTRANSLATE2: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 10, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text": {"query_pre_attn_scalar": 10, "sliding_window": 10},
    "mistral": {"sliding_window": 10},
}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("falcon", 0), ("falcon", 1), ("gemma", 0), ("gptj", 0), ("llama", 1), ("qwen2", 0)),
        *(("gemma2", 0), ("gemma3_text", 0), ("mistral", 0)),
    ],
)
def test_another_engine_continues_text_as_transformers_does(name: str, number: int, tmp_path: Path) -> None:
    """Catches an export that only transformers reads as it is meant: CTranslate2 has its own converters and kernels."""
    engines = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    settings = CASES[name][number] | _AS_CTRANSLATE2.get(name, {})
    # Its Gemma 2 has no windows at all.
    theirs = their_model(name, settings | ({"sliding_window": 64} if name == "gemma2" else {}))
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


@pytest.mark.always("bloom", "opt")
# The grouped GEMM of transformers takes no experts of odd sizes; tests/tools/convert/test_experts.py has their files.
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("mixtral", "olmoe", "qwen2_moe")])
def test_odd_heads_shards_and_files_without_a_head_are_read_and_written(name: str, tmp_path: Path) -> None:
    """Catches a number of heads or tokens that is taken for a round one, a tied head where the family's are not, and
    the reverse, shards that are read or written incompletely, and names of a file that was saved without its head."""
    architecture = ARCHITECTURES[name]
    tied = not architecture.tied and not architecture.has.get("head_bias", False)
    theirs = their_model(name, odd_case(name, tied, vocab_size=4001))
    folder = write_folder(theirs, tmp_path / "theirs", max_shard_size="400KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for file in ("config.json", "tokenizer.json"):
        shutil.copyfile(folder / file, pickled / file)
    state = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}
    short = {key.removeprefix(f"{theirs.base_model_prefix}."): value for key, value in state.items()}
    if tied:
        torch.save(short, pickled / "pytorch_model.bin")
    else:
        files = {key: f"pytorch_model-{1 + number % 2:05d}-of-00002.bin" for number, key in enumerate(short)}
        for file in set(files.values()):
            torch.save({key: value for key, value in short.items() if files[key] == file}, pickled / file)
        (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    ours, wanted = imported(folder, tmp_path / "in"), their_logits(theirs, tokens())
    assert ours.config.tie_embeddings is tied and ours.config.num_heads == 3
    torch.testing.assert_close(our_logits(ours, tokens()), wanted, atol=BOUND, rtol=0)
    again = imported(pickled, tmp_path / "pickled-in").parameters_by_name()
    assert all(torch.equal(again[key], weight) for key, weight in ours.parameters_by_name().items())
    options: dict[str, Any] = {"precision": ExportPrecision.fp32, "shard_mib": 1}
    out = export.export_checkpoint(ExportConfig(str(tmp_path / "in"), str(tmp_path / "out"), **options)).folder
    assert len(list(out.glob("*.safetensors"))) > 1
    written = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert torch.equal(their_logits(written, tokens()), wanted)


WINDOWS = [(name, number) for name, number in EVERY if "sliding_window" in CASES[name][number]]


@pytest.mark.parametrize(("name", "number"), WINDOWS, ids=[f"{name}-{number}" for name, number in WINDOWS])
def test_a_window_ends_at_the_same_token(name: str, number: int, tmp_path: Path) -> None:
    """Catches a window that is one token too long or short: the sequence is shorter, as long, and longer than it."""
    theirs = their_model(name, CASES[name][number])
    window = theirs.config.sliding_window
    ours = imported(write_folder(theirs, tmp_path / "theirs"), tmp_path / "in")
    for seq_len in (window - 1, window, window + 1, 2 * window):
        wanted = their_logits(theirs, tokens(seq_len))
        torch.testing.assert_close(our_logits(ours, tokens(seq_len)), wanted, atol=BOUND, rtol=0)


SCALED = [("llama", 3, 12), ("llama", 4, 16), ("phi3", 2, 16)]


@pytest.mark.parametrize(("name", "number", "original"), SCALED)
def test_rope_scaling_by_length_changes_at_the_same_length(
    name: str, number: int, original: int, tmp_path: Path
) -> None:
    """Catches longrope's factors or dynamic's base of another length, and factors of the wrong pairs: sequences
    shorter than the original length, as long, longer by one token and by many."""
    theirs = their_model(name, CASES[name][number])
    ours = imported(write_folder(theirs, tmp_path / "theirs"), tmp_path / "in")
    for seq_len in (original - 5, original, original + 1, 2 * original):
        fresh = their_model(name, CASES[name][number])  # transformers keeps the base of the longest sequence so far
        wanted = their_logits(fresh, tokens(seq_len))
        torch.testing.assert_close(our_logits(ours, tokens(seq_len)), wanted, atol=BOUND, rtol=0)


@pytest.mark.parametrize(("name", "number", "original"), [SCALED[0], SCALED[2]])
def test_generation_passes_the_original_length_as_in_transformers(
    name: str, number: int, original: int, tmp_path: Path
) -> None:
    """Catches keys in the KV cache that stay rotated by the frequencies of a shorter sequence: Phi-3 of transformers
    reads the text again where its factors change, and dynamic scaling is compared without its cache."""
    theirs = their_model(name, CASES[name][number])
    ours = imported(write_folder(theirs, tmp_path / "theirs"), tmp_path / "in")
    prompts = tokens(original - 4)
    made = their_greedy(theirs, prompts, 16)
    new = {row: list[int]() for row in range(len(prompts))}
    for token in generate(with_cache(ours), prompts.tolist(), range(len(prompts)), Sampling(0.0), Limits(16)):
        new[token.row].append(token.token)
    assert list(new.values()) == made[:, original - 4 :].tolist()


@pytest.mark.parametrize(
    ("name", "number", "drops", "adds"),
    [
        ("gemma3_text", 0, ("layer_types", "rope_parameters"), {"sliding_window_pattern": 6, "rope_theta": 1e6,
            "rope_local_base_freq": 1e4, "rope_scaling": None}),
        ("gemma2", 0, ("layer_types", "rope_parameters"), {"rope_theta": 1e4}),
        ("olmo3", 0, ("layer_types", "rope_parameters"), {"rope_theta": 5e5, "rope_scaling": None}),
        ("smollm3", 0, ("layer_types", "no_rope_layers", "rope_parameters"), {"no_rope_layer_interval": 4,
            "rope_theta": 2e6}),
        ("qwen2", 0, ("layer_types", "rope_parameters"), {"rope_theta": 1e4}),
        ("phi", 0, ("rope_parameters",), {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("gpt_neox", 0, ("rope_parameters",), {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
        ("bloom", 0, ("hidden_size", "n_head"), {"n_embed": 48, "num_attention_heads": 6, "offset_alibi": 100}),
        ("gpt2", 0, ("n_inner",), {"n_ctx": 64, "summary_type": "cls_index"}),
        ("gptj", 0, ("n_inner", "rope_parameters"), {"rotary": True, "scale_attn_weights": True}),
        ("opt", 0, ("do_layer_norm_before", "rope_parameters"), {"activation_dropout": 0.0, "prefix": "</s>"}),
        ("mpt", 0, ("norm_type",), {"embedding_fraction": 1.0, "learned_pos_emb": True, "init_device": "cpu"}),
        ("falcon", 0, ("num_attention_heads", "num_hidden_layers", "num_kv_heads", "new_decoder_architecture",
            "rope_parameters"), {"model_type": "RefinedWebModel", "n_head": 6, "n_layer": 4}),
        ("falcon", 1, ("num_attention_heads", "num_hidden_layers", "num_kv_heads", "new_decoder_architecture",
            "multi_query", "rope_parameters"), {"model_type": "RefinedWeb", "n_head": 6, "n_layer": 4, "n_head_kv": 2}),
        ("stablelm", 0, ("layer_norm_eps", "rope_parameters"), {"model_type": "stablelm_epoch", "norm_eps": 1e-5,
            "rope_pct": 0.25, "rope_theta": 10000, "num_heads": 6}),
    ],
)  # fmt: skip
def test_files_of_older_versions_give_the_same_model(
    name: str, number: int, drops: tuple[str, ...], adds: dict[str, Any]
) -> None:
    """Catches a config.json of transformers 4, or of a model's first publication, that is refused, or whose layers,
    heads or frequencies are taken for other ones."""
    content = json.loads(their_model(name, CASES[name][number]).config.to_json_string(use_diff=False))
    older = {key: value for key, value in content.items() if key not in drops} | adds
    assert architecture_of(older).model_of(older) == ARCHITECTURES[name].model_of(content)


def test_phi3_of_128k_is_read_from_its_first_files() -> None:
    """Catches longrope that is read only where transformers 5 writes it: Phi-3's files of 2024 call it su, and have the
    original length, from which its factor follows, beside it."""
    content = json.loads(their_model("phi3", CASES["phi3"][2]).config.to_json_string(use_diff=False))
    now = content.pop("rope_parameters")
    scaling = {"type": "su", "short_factor": now["short_factor"], "long_factor": now["long_factor"]}
    older = {**content, "rope_theta": 500.0, "original_max_position_embeddings": 16, "rope_scaling": scaling}
    model = ARCHITECTURES["phi3"].model_of(older)
    assert model == ARCHITECTURES["phi3"].model_of(content | {"rope_parameters": now})
    assert model.rope_scaling.factor == 4.0 and model.rope_scaling.original_max_seq_len == 16


def test_a_pattern_is_the_shortest_that_repeats() -> None:
    """Catches a pattern of as many kinds as layers, and one whose last repetition is not cut off."""
    sliding, full = LayerKind(window=4), LayerKind()
    assert pattern_of([sliding, sliding, full, sliding, sliding]) == [LayerKind(2, window=4), full]
    assert pattern_of([full] * 3) == []
    assert pattern_of([sliding, full, full, full]) == [sliding, LayerKind(3)]
    no_positions = LayerKind(position=Position.none)
    config = ModelConfig(num_layers=5, layer_pattern=pattern_of([full, no_positions] * 2 + [full]))
    assert [config.layer(index).position for index in (3, 4)] == [Position.none, Position.alibi]


_PUBLIC = {
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "vocab_size": 32000, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            _PUBLIC | {"model_type": "deepseek_v3", "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
                "kv_lora_rank": 512, "n_routed_experts": 256, "q_lora_rank": 1536},
            "megads does not compute its multi-head latent attention (kv_lora_rank); of models with experts it knows ",
        ),
        (
            {"model_type": "cohere2", "cache_implementation": "hybrid", "head_dim": 128, "hidden_act": "silu",
                "hidden_size": 4096, "layer_norm_eps": 1e-5, "layer_switch": 4, "logit_scale": 0.25,
                "num_attention_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4, "vocab_size": 256000},
            "is cohere, which does not have head_dim = 128, layer_switch = 4, sliding_window = 4096 and 1 more",
        ),
        (
            {"model_type": "mamba", "conv_kernel": 4, "hidden_size": 768, "layer_norm_epsilon": 1e-5, "n_layer": 24,
                "state_size": 16, "use_bias": False, "vocab_size": 50280},
            "does not have conv_kernel = 4, ",
        ),
        (
            {"model_type": "t5", "d_ff": 3072, "d_kv": 64, "d_model": 768, "is_encoder_decoder": True,
                "layer_norm_epsilon": 1e-6, "n_positions": 512, "num_heads": 12, "vocab_size": 32128},
            "(an encoder with a decoder; megads has decoders only)",
        ),
        (
            {"model_type": "gemma3n", "audio_config": {}, "vision_config": {}, "text_config": {
                "model_type": "gemma3n_text", "activation_sparsity_pattern": [0.95] * 30, "altup_num_inputs": 4,
                "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048,
                "layer_types": ["sliding_attention"], "rope_local_base_freq": 1e4, "sliding_window": 512}},
            "(it consists of several models; that of text has model_type = 'gemma3n_text'); the nearest by name and "
            "keys is gemma3_text, which does not have activation_sparsity_pattern = [0.95, 0.95, 0.95, 0.95, 0.95, "
            "0.95, ...], altup_num_inputs = 4. megads",
        ),
        (_PUBLIC, "model_type is missing; the nearest by name and keys is llama, which has all of them. megads knows"),
        ({}, "config.json: model_type is missing. megads knows bloom, "),
        ({"model_type": ["llama"]}, "model_type = ['llama']: megads has no such family. megads knows bloom, "),
    ],
    ids=["deepseek_v3", "cohere2", "mamba", "t5", "gemma3n", "no type", "nothing", "a list"],
)  # fmt: skip
def test_an_unknown_family_is_told_its_nearest(content: dict[str, Any], told: str) -> None:
    """Catches a refusal that leaves the user without the family to compare with and the keys that differ, or that
    names keys without a meaning for the architecture."""
    with pytest.raises(ConfigError) as caught:
        architecture_of(content)
    assert told in str(caught.value)


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
    capacity = {"moe.capacity_factor", "moe.overflow"}
    of_training = losses | capacity
    assert of_experts - set(_USUAL) - set(_USUAL_EXPERTS) == {"moe.top_k", "moe.expert_ffn_size"} | of_training


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
