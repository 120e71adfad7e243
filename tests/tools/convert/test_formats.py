"""Tests export and import against transformers, through `from_pretrained` and `save_pretrained`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from megads.batch import BatchInfo
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.checkpoint.store import save_parts
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.data.indexed.sidecar import tokenizer_sha256
from megads.engine.interface import Shard
from megads.errors import CheckpointError, ConfigError, DataError, MegadsError
from megads.model.config import (
    BlockConfig,
    LayerKind,
    MLPKind,
    ModelConfig,
    MupConfig,
    NormKind,
    NormPlacement,
    Position,
    QKNormWidth,
)
from megads.model.gpt import GPT, parameter_generator
from megads.model.moe import EXPERT_LOAD
from megads.model.moe_config import MoEConfig
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.tools.convert import export, load
from megads.tools.convert.export_config import ExportConfig, ExportFormat, ExportPrecision
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.universal import export_universal
from tests.small_run import TOKENS, write_dataset

transformers = pytest.importorskip("transformers")

# Absolute, for logits of magnitude up to 10.
TOLERANCE = 1e-5
BASE: dict[str, Any] = {"num_layers": 2, "hidden_size": 48, "num_heads": 6, "vocab_size": TOKENS + 3, "max_seq_len": 32}
GPT_LIKE: dict[str, Any] = {"embedding_norm": False}
LLAMA_LIKE: dict[str, Any] = {
    "position": Position.rope, "norm": NormKind.rmsnorm, "mlp": MLPKind.swiglu, "embedding_norm": False,
}  # fmt: skip
OLMO2_LIKE: dict[str, Any] = {
    "norm_placement": NormPlacement.output, "qk_norm": True, "qk_norm_width": QKNormWidth.full, "bias": False,
}  # fmt: skip


SCALINGS = (
    RopeScalingConfig(RopeScaling.linear, factor=3.0),
    RopeScalingConfig(RopeScaling.llama3, factor=8.0, original_max_seq_len=16, high_freq_factor=3.0),
    RopeScalingConfig(RopeScaling.yarn, factor=4.0, original_max_seq_len=16, beta_fast=3.0, beta_slow=0.5),
)


def _cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for heads, tied, bias in itertools.product((1, 3, 4, 6, 12), (True, False), (True, False)):
        yield "bloom", {"num_heads": heads, "tie_embeddings": tied, "bias": bias}
    for kv, tied, bias in itertools.product((1, 2, 3, 6), (True, False), (True, False)):
        yield "llama", {**LLAMA_LIKE, "num_kv_heads": kv, "tie_embeddings": tied, "bias": bias}
    yield "llama", {**LLAMA_LIKE, "ffn_size": 35, "rope_theta": 500000.0, "bias": False, "norm_eps": 1e-3}
    for scaling in SCALINGS:
        yield "llama", {**LLAMA_LIKE, "rope_scaling": scaling, "num_kv_heads": 3, "rope_theta": 50.0}
    yield "gpt_neox", {**GPT_LIKE, "position": Position.rope, "rope_scaling": SCALINGS[0]}
    for kv, tied, size in itertools.product((1, 3, 6), (True, False), (8, 10)):
        shape = {"num_kv_heads": kv, "tie_embeddings": tied, "head_size": size}
        yield "qwen3", {**LLAMA_LIKE, "bias": False, "qk_norm": True, **shape}
    yield "qwen3", {**LLAMA_LIKE, "bias": False, "qk_norm": True, "num_kv_heads": 3, "rope_scaling": SCALINGS[2]}
    for kv, tied, size in ((2, False, None), (6, True, 10)):
        yield "olmo2", {**LLAMA_LIKE, **OLMO2_LIKE, "num_kv_heads": kv, "tie_embeddings": tied, "head_size": size}
    for name, bias, size in (("llama", True, 6), ("llama", False, 12), ("mistral", False, 10)):
        window = 7 if name == "mistral" else None
        yield name, {**LLAMA_LIKE, "bias": bias, "head_size": size, "num_kv_heads": 2, "window": window}
    for window, kv in itertools.product((1, 5, 32), (2, 6)):
        yield "mistral", {**LLAMA_LIKE, "window": window, "num_kv_heads": kv, "bias": False}
    for tied, bias, theta in itertools.product((True, False), (True, False), (10000.0, 77.0)):
        shape = {"tie_embeddings": tied, "bias": bias, "rope_theta": theta}
        yield "gpt_neox", {**GPT_LIKE, "position": Position.rope, **shape}
    for tied, bias, ffn in itertools.product((True, False), (True, False), (None, 35)):
        shape = {"tie_embeddings": tied, "bias": bias, "ffn_size": ffn}
        yield "gpt2", {**GPT_LIKE, "position": Position.learned, **shape}


EXPERTS = MoEConfig(num_experts=6, top_k=2, expert_ffn_size=20)
_LLAMA_MOE = {**LLAMA_LIKE, "bias": False, "num_kv_heads": 2, "tie_embeddings": False}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**_LLAMA_MOE, "window": 7, "moe": EXPERTS},
    "olmoe": {
        **_LLAMA_MOE, "num_kv_heads": 6, "qk_norm": True, "qk_norm_width": QKNormWidth.full,
        "moe": replace(EXPERTS, top_k=3, normalize_weights=False, global_loss=0.01, z_loss=0.001),
    },
    "qwen2_moe": {
        **_LLAMA_MOE, "qkv_bias": True, "moe": replace(EXPERTS, shared_ffn_size=28, shared_gate=True, interval=2),
    },
    "qwen3_moe": {**_LLAMA_MOE, "qk_norm": True, "head_size": 10, "moe": replace(EXPERTS, top_k=3, first_dense=1)},
}  # fmt: skip
"""A mixture of experts of each family that has them."""
CASES = [*_cases(), *MIXTURES.items()]
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(CASES)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a trained tokenizer that has an end-of-document token."""
    return Path(f"{write_dataset(tmp_path_factory.mktemp('data'))}.tokenizer.json")


def hot_model(config: ModelConfig) -> GPT:
    """A model in which every parameter matters: weights of std 0.2, norms and biases not at their initial values."""

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(EXPERT_LOAD):  # not exported
            return torch.ones(shape)
        noise = torch.empty(shape).normal_(0.0, 0.2, generator=parameter_generator(0, name))
        return noise + 1.0 if name.endswith("norm.weight") else noise

    return GPT(config, 0, value).eval()


def write_run(run_dir: Path, tokenizer: Path, model: GPT, average: GPT | None = None) -> Path:
    """Writes a run with one checkpoint, whose tensors are split by rows as with tp=2."""
    shards = []
    kinds = {"weight": model} | ({} if average is None else {"average": average})
    named = ((kind, *item) for kind, of in kinds.items() for item in of.parameters_by_name().items())
    for kind, name, weight in named:
        half = max(1, weight.shape[0] // 2)
        for start, part in ((0, weight[:half]), (half, weight[half:])):
            offset = (start, *(0 for _ in weight.shape[1:]))
            shards.append(Shard(f"{kind}/{name}", tuple(weight.shape), offset, part.detach().contiguous()))
    path = Tokenizer.from_file(str(tokenizer))
    record = RunRecord(
        state={"step": 3, "samples": 24, "tokens": 300}, optimizer_steps=3, config_digest="digest",
        model=json.loads(json.dumps(dataclasses.asdict(model.config))), layout={"tp": 2, "cp": 1, "pp": 1, "dp": 1},
        tokenizer=TokenizerRecord(tokenizer_sha256(tokenizer), TOKENS, path.token_to_id("<|endoftext|>"), "ignore"),
    )  # fmt: skip
    save_parts(run_dir, (shards[0::2], shards[1::2]), record)
    shutil.copyfile(tokenizer, run_dir / "tokenizer.json")
    return run_dir


def exported(tmp_path: Path, tokenizer: Path, model: GPT, **options: Any) -> Path:
    """Exports a model; returns the folder."""
    run_dir = write_run(tmp_path / "run", tokenizer, model)
    config = {"run": str(run_dir), "output": str(tmp_path / "exported"), "precision": ExportPrecision.fp32} | options
    return export.export_checkpoint(ExportConfig(**config)).folder


def ids() -> Tensor:
    return torch.randint(0, TOKENS, (2, 17), generator=torch.Generator().manual_seed(3))


def their_logits(folder: Path, **options: Any) -> Tensor:
    """Logits that transformers computes with the model in a folder."""
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    model, loading = found
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    with torch.no_grad():
        return model.eval()(ids()).logits  # type: ignore[no-any-return]


@torch.no_grad()
def our_logits(model: GPT) -> Tensor:
    return model(ids(), BatchInfo(torch.arange(2)))


@pytest.mark.always("bloom-0", "llama-20")
@pytest.mark.parametrize(("name", "changes"), CASES, ids=IDS)
def test_logits_are_transformers_own(name: str, changes: dict[str, Any], tmp_path: Path, tokenizer: Path) -> None:
    """Catches a transposed or misordered projection, ALiBi slopes for another head count, interleaved rotary pairs, a
    dropped bias, wrong tying of the head, epsilon, theta or window; and weights changed by export and import."""
    model = hot_model(ModelConfig(**(BASE | changes)))
    folder = exported(tmp_path, tokenizer, model)
    assert json.loads((folder / "config.json").read_text())["model_type"] == name
    torch.testing.assert_close(their_logits(folder), our_logits(model), atol=TOLERANCE, rtol=0)
    found = load.import_folder(ImportConfig(str(folder), str(tmp_path / "back")))
    back = load_unsharded(open_checkpoint(found.folder), torch.device("cpu"), torch.float32)
    weights, before = back.parameters_by_name(), model.parameters_by_name()
    assert all(torch.equal(weights[key], weight) for key, weight in before.items())
    # A model without biases comes back with biases of 0 where the architecture always has them.
    assert not any(weights[key].any() for key in weights.keys() - before)
    torch.testing.assert_close(our_logits(back), our_logits(model), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bloom", {}),
        ("llama", {**LLAMA_LIKE, "num_kv_heads": 2, "tie_embeddings": False}),
        ("qwen3", {**LLAMA_LIKE, "bias": False, "qk_norm": True, "num_kv_heads": 3}),
        ("olmo2", {**LLAMA_LIKE, **OLMO2_LIKE, "num_kv_heads": 2}),
    ],
)
def test_multipliers_of_mup_are_in_the_weights(
    name: str, changes: dict[str, Any], tmp_path: Path, tokenizer: Path
) -> None:
    """Catches an export without the muP multipliers: no architecture has them, so the weights must include them."""
    mup = MupConfig(base_width=32, output_multiplier=1.7, base_head_size=20)
    model = hot_model(ModelConfig(**(BASE | changes), mup=mup))
    folder = exported(tmp_path, tokenizer, model)
    assert json.loads((folder / "config.json").read_text())["model_type"] == name
    torch.testing.assert_close(their_logits(folder), our_logits(model), atol=TOLERANCE, rtol=0)
    universal = ExportConfig(run=str(tmp_path / "run"), output=str(tmp_path / "other"), format=ExportFormat.universal)
    with pytest.raises(ConfigError, match=r"model\.mup\.base_width = 32"):
        export_universal(universal)


def their_model(name: str, **changes: Any) -> Any:
    """A transformers model with weights of std 0.2."""
    sizes = {"vocab_size": TOKENS + 3, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    config: dict[str, Any] = {
        "bloom": {**sizes, "pad_token_id": None},
        "llama": {**sizes, "num_key_value_heads": 3, "intermediate_size": 80, "pad_token_id": None},
        "mistral": {**sizes, "num_key_value_heads": 2, "intermediate_size": 80, "sliding_window": 5},
        "qwen3": {**sizes, "num_key_value_heads": 3, "intermediate_size": 80, "head_dim": 10},
        "olmo2": {**sizes, "num_key_value_heads": 3, "intermediate_size": 80, "pad_token_id": None},
        "gpt_neox": {
            **sizes, "intermediate_size": 80, "use_parallel_residual": False, "rotary_pct": 1.0,
            "hidden_act": "gelu_new",
        },
        "gpt2": {"vocab_size": TOKENS + 3, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 32},
    }[name]  # fmt: skip
    config |= {"bos_token_id": 0, "eos_token_id": 0} | changes
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **config)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model


def their_folder(folder: Path, tokenizer: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder


def test_shards_precision_and_tokenizer(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches shards that transformers cannot load, weights of another dtype than config.json says, an embedding with
    row blocks out of order, and a tokenizer without its end-of-document token."""
    monkeypatch.setattr(export, "_BLOCK_ELEMENTS", 192 * 300)
    model = hot_model(ModelConfig(**(BASE | {"hidden_size": 192, "vocab_size": 2000, "num_layers": 3})))
    whole = exported(tmp_path, tokenizer, model, precision=ExportPrecision.bf16)
    shards = exported(tmp_path / "more", tokenizer, model, shard_mib=1)
    assert len(list(shards.glob("model-*.safetensors"))) > 2 and not (shards / "model.safetensors").exists()
    torch.testing.assert_close(their_logits(shards), our_logits(model), atol=1e-4, rtol=0)
    rounded = load_file(whole / "model.safetensors")
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    assert their_logits(whole, dtype="auto").dtype == torch.bfloat16
    theirs = transformers.AutoTokenizer.from_pretrained(whole)
    assert theirs.eos_token == "<|endoftext|>"
    text = "def attention(query): return softmax  # 漢字"
    assert theirs(text).input_ids == Tokenizer.from_file(str(tokenizer)).encode(text).ids
    assert transformers.GenerationConfig.from_pretrained(whole).eos_token_id == theirs.eos_token_id


def test_the_running_average_is_exported(tmp_path: Path, tokenizer: Path) -> None:
    """Catches an export of the weights as their running average, an embedding that is not averaged, and an export that
    succeeds although the run has no running average."""
    config = ModelConfig(**(BASE | {"tie_embeddings": False}))
    model, average = hot_model(config), hot_model(config)
    with torch.no_grad():
        for weight in average.parameters():
            weight.mul_(0.9)
    run_dir = write_run(tmp_path / "run", tokenizer, model, average)
    options: dict[str, Any] = {"average": True, "precision": ExportPrecision.fp32}
    folder = export.export_checkpoint(ExportConfig(str(run_dir), str(tmp_path / "averaged"), **options)).folder
    torch.testing.assert_close(their_logits(folder), our_logits(average), atol=TOLERANCE, rtol=0)
    assert "running average" in (folder / "README.md").read_text()
    without = write_run(tmp_path / "without", tokenizer, model)
    with pytest.raises(ConfigError, match="holds no running average"):
        export.export_checkpoint(ExportConfig(str(without), str(tmp_path / "none"), **options))


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}))
def test_greedy_text_is_theirs(name: str, tmp_path: Path, tokenizer: Path) -> None:
    """Catches generation, from a run or an imported model, that stops elsewhere or uses other positions than
    transformers with its KV cache."""
    from megads import load_model

    changes = next(shape for some, shape in CASES if some == name)
    model = hot_model(ModelConfig(**(BASE | changes | {"tie_embeddings": False})))
    words = Tokenizer.from_file(str(tokenizer))
    with torch.no_grad():
        for number, row in enumerate(model.parameters_by_name()["head.weight"]):
            # Partial characters may be decoded differently, and megads generates no ids beyond the tokenizer's.
            if not (words.id_to_token(number) or "é").isascii():
                row.zero_()
    folder = exported(tmp_path, tokenizer, model)
    theirs, words = (some.from_pretrained(folder) for some in (
        transformers.AutoModelForCausalLM, transformers.AutoTokenizer,
    ))  # fmt: skip
    prompt = "def attention_1"
    made = theirs.generate(**words(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False)
    text = words.decode(made[0], skip_special_tokens=True)
    ours = load_model(tmp_path / "run", dtype=torch.float32).generate(prompt, max_new_tokens=12, temperature=0.0)
    assert ours == text.removeprefix(prompt)
    imported = load.import_folder(ImportConfig(str(folder), str(tmp_path / "back"))).folder
    again = load_model(imported, dtype=torch.float32).generate(prompt, max_new_tokens=12, temperature=0.0)
    assert again == ours


@pytest.mark.parametrize(
    ("changes", "format_", "told"),
    [
        ({"parallel_block": True}, "auto", "the nearest is bloom: model.parallel_block = true where bloom has false"),
        ({"num_kv_heads": 2}, "bloom", "model.num_kv_heads = 2 where bloom has 6"),
        ({"ffn_size": 64}, "auto", "model.ffn_size = 64 where bloom has 192"),
        ({**LLAMA_LIKE}, "bloom", "model.position = rope where bloom has alibi; .*; format=llama can"),
        ({"window": 3}, "auto", "model.window = 3 where bloom has null"),
        ({"qk_norm": True}, "auto", "model.qk_norm = true where bloom has false"),
        (
            {
                **LLAMA_LIKE,
                "layer_pattern": [LayerKind(window=3), LayerKind(rope_theta=9.0)],
                "rope_scaling": SCALINGS[0],
            },
            "gpt_neox",
            r"model\.layer_pattern = \[\{window: 3\}, \{rope_theta: 9\.0\}\] where gpt_neox has \[\]",
        ),
        ({"head_size": 7}, "auto", "model.head_size = 7 where bloom has 8"),
        ({**LLAMA_LIKE, **OLMO2_LIKE}, "qwen3", "model.qk_norm_width = full where .*; format=olmo2 can"),
        ({**LLAMA_LIKE, **OLMO2_LIKE}, "llama", "model.norm_placement = output where .*; format=olmo2 can"),
        ({**LLAMA_LIKE, "bias": False, "qk_norm": True}, "llama", "model.qk_norm = true where .*; format=qwen3 can"),
        ({**LLAMA_LIKE, "window": 3}, "auto", "model.bias = true where mistral has false|model.window = 3 where llama"),
    ],
)
def test_refused_before_a_file_is_written(
    changes: dict[str, Any], format_: str, told: str, tmp_path: Path, tokenizer: Path
) -> None:
    """Catches an export to a format that cannot represent the model, and one that leaves a partial folder."""
    with pytest.raises(ConfigError, match=told):
        exported(tmp_path, tokenizer, hot_model(ModelConfig(**(BASE | changes))), format=ExportFormat(format_))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_plugins_block_is_refused() -> None:
    """Catches the export of a plugin's block, which no other library implements."""
    from megads.tools.convert.architectures import choose_architecture

    with pytest.raises(ConfigError, match=r"block\.name = mine"):
        choose_architecture(ModelConfig(block=BlockConfig("mine")), "auto")


def test_what_is_there_stays(tmp_path: Path, tokenizer: Path) -> None:
    """Catches an export that overwrites the user's files, and a failed export that deletes an earlier one."""
    model = hot_model(ModelConfig(**BASE))
    folder = exported(tmp_path, tokenizer, model)
    before = (folder / "model.safetensors").read_bytes()
    config = ExportConfig(str(tmp_path / "run"), str(folder), precision=ExportPrecision.bf16)
    with pytest.raises(ConfigError, match="exists"):
        export.export_checkpoint(config)
    shutil.copytree(tmp_path / "run", tmp_path / "damaged")
    (shard,) = (tmp_path / "damaged" / "checkpoints" / "step_00000003").glob("rank_00001.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="checksum"):
        export.export_checkpoint(dataclasses.replace(config, run=str(tmp_path / "damaged"), overwrite=True))
    assert (folder / "model.safetensors").read_bytes() == before
    export.export_checkpoint(dataclasses.replace(config, overwrite=True))
    assert len((folder / "model.safetensors").read_bytes()) < len(before)
    other = tmp_path / "mine"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"was not created by megads export"):
        export.export_checkpoint(dataclasses.replace(config, output=str(other), overwrite=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "exported", "mine", "run"]


def test_overwrite_replaces_its_own_kind_only(tmp_path: Path, tokenizer: Path) -> None:
    """Catches overwrite=true that deletes a trained run, which has a tokenizer too, or a downloaded model."""
    model = hot_model(ModelConfig(**BASE))
    folder, run_dir = exported(tmp_path, tokenizer, model), tmp_path / "run"
    theirs = their_folder(tmp_path / "theirs", tokenizer, their_model("bloom"))
    imported = str(tmp_path / "imported")
    load.import_folder(ImportConfig(str(folder), imported))
    load.import_folder(ImportConfig(str(folder), imported, overwrite=True))
    (tmp_path / "imported" / "events.jsonl").write_text("the events of a run that was trained here")
    for output in (run_dir, theirs, folder, Path(imported)):
        with pytest.raises(ConfigError, match="was not created by megads import"):
            load.import_folder(ImportConfig(str(folder), str(output), overwrite=True))
    for output in (run_dir, theirs, Path(imported)):
        with pytest.raises(ConfigError, match="was not created by megads export"):
            export.export_checkpoint(ExportConfig(str(run_dir), str(output), overwrite=True))
    assert open_checkpoint(run_dir) and (theirs / "model.safetensors").is_file()


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("run.by.a.pickle"),))


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        ("no config", ConfigError, r"config\.json cannot be read"),
        ("no JSON", ConfigError, r"config\.json: is not JSON"),
        ("a list", ConfigError, "holds no JSON object"),
        ("unknown architecture", ConfigError, "model_type = 'mamba': megads has no such family; .* bloom"),
        ("more layers", CheckpointError, r"h\.2.*missing, which BloomForCausalLM has by config\.json"),
        ("fewer layers", CheckpointError, r"h\.1.*left over"),
        ("another width", CheckpointError, "has shape .*, by config.json it has"),
        ("a width in words", ConfigError, "hidden_size = 'wide': want an integer"),
        ("no heads", ConfigError, "n_head is missing: want an integer"),
        ("post-norm", ConfigError, "apply_residual_connection_post_layernorm = True: megads computes False only"),
        ("quantized", ConfigError, "quantization_config has quant_method = 'fp8': megads reads weights in float32"),
        ("an adapter", ConfigError, "this is an adapter without its model; .* merge_and_unload"),
        ("truncated", CheckpointError, "model.safetensors cannot be read"),
        ("integers", CheckpointError, "is torch.int8: want float32"),
        ("tied, it says", CheckpointError, "lm_head.weight differs from .*: it is wrong"),
        ("no weights", CheckpointError, "has no weights"),
        ("no tokenizer", DataError, "tokenizer.json is missing"),
        ("a larger tokenizer", DataError, "has 300 tokens, by config.json the model has 299"),
        ("no such end", DataError, "eos_token_id = 100000"),
        ("a pickle that runs", CheckpointError, "nothing was run"),
        ("an index elsewhere", CheckpointError, "is not a file of this folder"),
        ("an index of nothing", CheckpointError, "has no weight_map"),
    ],
)
def test_bad_folders(
    damage: str, error: type[MegadsError], told: str, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an import of a damaged folder, a pickle whose code is run, and an import that leaves a partial run."""
    monkeypatch.chdir(tmp_path)
    folder = exported(tmp_path, tokenizer, hot_model(ModelConfig(**BASE)))
    weights, config = folder / "model.safetensors", folder / "config.json"
    content = json.loads(config.read_text())
    changes: dict[str, dict[str, Any]] = {
        "unknown architecture": {"model_type": "mamba"}, "more layers": {"n_layer": 3}, "fewer layers": {"n_layer": 1},
        "another width": {"hidden_size": 96}, "a width in words": {"hidden_size": "wide"}, "no heads": {"n_head": None},
        "post-norm": {"apply_residual_connection_post_layernorm": True}, "no such end": {"eos_token_id": 100000},
        "a larger tokenizer": {"vocab_size": 299}, "quantized": {"quantization_config": {"quant_method": "fp8"}},
    }  # fmt: skip
    if damage in changes:
        config.write_text(json.dumps(content | changes[damage]))
    elif damage in ("no config", "an adapter"):
        config.rename(folder / "adapter_config.json" if damage == "an adapter" else folder / "elsewhere.json")
    elif damage in ("no JSON", "a list"):
        config.write_text("{" if damage == "no JSON" else "[]")
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage in ("integers", "tied, it says"):
        tensors = load_file(weights)
        name = "transformer.ln_f.weight" if damage == "integers" else "lm_head.weight"
        tensors[name] = (
            torch.zeros(BASE["vocab_size"], 48) if name.startswith("lm") else torch.ones(48, dtype=torch.int8)
        )
        save_file(tensors, weights)
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    else:
        weights.unlink()
    if damage == "a pickle that runs":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"word_embeddings.weight": _Runs()}))
    if damage.startswith("an index"):
        found = {"weight_map": {"x": "../run/model.safetensors"}} if damage == "an index elsewhere" else {}
        (folder / "model.safetensors.index.json").write_text(json.dumps(found))
    with pytest.raises(error, match=told):
        load.import_folder(ImportConfig(str(folder), str(tmp_path / "in")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exported", "run"]


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "llama",
            {"rope_scaling": {"rope_type": "proportional", "factor": 8.0}},
            "rope_type = 'proportional': megads computes",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "longrope", "factor": 8.0, "short_factor": [1.0], "long_factor": [2.0]}},
            "short_factor has 1 numbers: want one number for each of the 4 pairs",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "longrope", "factor": 8.0, "short_factor": "1,1,1,1", "long_factor": [2.0]}},
            "short_factor = '1,1,1,1': want a list of numbers",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 8.0, "mscale": 2.0}},
            "rope_parameters has {'mscale': 2.0}",
        ),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, r"factor = 0\.5"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types = \[.*sliding_attention"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "chunked_attention"]},
            r"layer_types = .*want sliding_attention",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu': megads computes silu only"),
        ("gpt2", {"activation_function": "silu"}, "activation_function = 'silu': megads computes"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    ],
)
def test_what_megads_does_not_compute(name: str, changes: dict[str, Any], told: str) -> None:
    """Catches an import that ignores a feature which megads does not compute."""
    from megads.tools.convert.architectures import ARCHITECTURES

    content = json.loads(their_model(name).config.to_json_string(use_diff=False))
    if "rope_scaling" in changes:
        content.pop("rope_parameters", None)
    assert ARCHITECTURES[name].model_of(content)
    with pytest.raises(ConfigError, match=told):
        ARCHITECTURES[name].model_of(content | changes)


def _as_one_stack(tensors: dict[str, Tensor]) -> None:
    name = "transformer.h.0.self_attention.query_key_value.weight"
    tensors[name] = tensors[name].view(6, 3, 8, 48).transpose(0, 1).reshape(144, 48).contiguous()


def _slopes_of_eight(tensors: dict[str, Tensor]) -> None:
    name = "transformer.h.0.self_attention.query_key_value.weight"
    tensors[name] = tensors[name].view(6, 3, 8, 48)[[1, 0, 2, 3, 4, 5]].reshape(144, 48).contiguous()


def _interleaved_pairs(tensors: dict[str, Tensor]) -> None:
    for kind in ("q_proj", "k_proj"):
        name = f"model.layers.0.self_attn.{kind}.weight"
        tensors[name] = tensors[name].view(6, 2, 4, 48).transpose(1, 2).reshape(48, 48).contiguous()


def _gates_and_ups_swapped(tensors: dict[str, Tensor]) -> None:
    gate, up = (f"model.layers.1.mlp.{kind}_proj.weight" for kind in ("gate", "up"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def _a_bias_dropped(tensors: dict[str, Tensor]) -> None:
    tensors["transformer.h.1.mlp.dense_4h_to_h.bias"].zero_()


def _a_head_that_is_the_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["transformer.word_embeddings.weight"].clone()


@pytest.mark.parametrize(
    ("defect", "changes"),
    [
        (_as_one_stack, {}),
        (_slopes_of_eight, {}),
        (_interleaved_pairs, LLAMA_LIKE),
        (_gates_and_ups_swapped, LLAMA_LIKE),
        (_a_bias_dropped, {}),
        (_a_head_that_is_the_embedding, {"tie_embeddings": False}),
    ],
)
def test_a_defect_shows(
    defect: Callable[[dict[str, Tensor]], None], changes: dict[str, Any], tmp_path: Path, tokenizer: Path
) -> None:
    """Catches a comparison of logits that does not detect typical bugs of exporters."""
    model = hot_model(ModelConfig(**(BASE | changes)))
    folder = exported(tmp_path, tokenizer, model)
    tensors = load_file(folder / "model.safetensors")
    defect(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert (their_logits(folder) - our_logits(model)).abs().max() > 1e4 * TOLERANCE
