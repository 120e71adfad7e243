"""GPT-NeoX checkpoints, written after GPT-NeoX's sources, against transformers' models with the same weights."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from megads.batch import BatchInfo
from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.errors import CheckpointError, ConfigError, MegadsError
from megads.model.config import ModelConfig, Position
from megads.model.gpt import GPT, parameter_generator
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.load import import_folder
from tests.tools.convert import megatron_files as files
from tests.tools.convert.megatron_files import HEADS, HIDDEN, LAYERS

transformers = pytest.importorskip("transformers")

VOCABULARY = 360
TOLERANCE = 2e-5
SETTINGS: dict[str, Any] = {
    "num-layers": LAYERS, "hidden-size": HIDDEN, "num-attention-heads": HEADS, "max-position-embeddings": 64,
    "pos-emb": "rotary", "rotary-pct": 1, "no-weight-tying": True, "bias-gelu-fusion": True,
    "attention_config": [[["flash"], LAYERS]], "optimizer": {"type": "Adam"}, "fp16": {"enabled": True},
}  # fmt: skip
LLAMA_SETTINGS = {
    "norm": "rmsnorm", "rms-norm-epsilon": 1e-5, "activation": "swiglu", "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False, "bias-gelu-fusion": False,
}  # fmt: skip


def neox(**changes: Any) -> Any:
    """Returns transformers' GPT-NeoX, by default without parallel residual and with RoPE on whole heads."""
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN, max_position_embeddings=64,
        **{"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"} | changes,
    )  # fmt: skip
    return files.hot(transformers.GPTNeoXForCausalLM(config))


def neox_layers(model: Any) -> list[dict[str, Tensor]]:
    """Returns embedding, blocks, norm and head."""
    state = model.state_dict()
    blocks = []
    for index in range(LAYERS):
        of = f"gpt_neox.layers.{index}."
        block = {name.removeprefix(of): tensor for name, tensor in state.items() if name.startswith(of)}
        blocks.append({name: tensor for name, tensor in block.items() if ".rotary_emb" not in name})
    return [
        {"word_embeddings.weight": state["gpt_neox.embed_in.weight"]},
        *blocks,
        {f"norm.{kind}": state[f"gpt_neox.final_layer_norm.{kind}"] for kind in ("weight", "bias")},
        {"final_linear.weight": model.get_output_embeddings().weight.detach()},
    ]


def renamed(layers: list[dict[str, Tensor]], names: dict[str, str]) -> list[dict[str, Tensor]]:
    """Returns the layers with substrings of their names replaced."""
    found = []
    for layer in layers:
        made = {}
        for name, tensor in layer.items():
            for old, new in names.items():
                name = name.replace(old, new)  # noqa: PLW2901
            made[name] = tensor
        found.append(made)
    return found


def write(
    folder: Path, parts: list[list[dict[str, Tensor]]], settings: dict[str, Any], vocabulary: int = VOCABULARY
) -> Path:
    """Writes global_step10.

    Args:
        folder: folder that gets `latest`.
        parts: layers of each tensor-parallel rank.
        settings: settings of the training.
        vocabulary: padded vocabulary size.
    """
    step = folder / "global_step10"
    (step / "configs").mkdir(parents=True)
    (folder / "latest").write_text("global_step10")
    (step / "configs" / "model.yml").write_text(yaml.safe_dump(settings))
    (step / "configs" / "local.yml").write_text(yaml.safe_dump({"model_parallel_size": len(parts)}))
    indices = [0, *range(2, 2 + LAYERS), LAYERS + 3, LAYERS + 4]
    args = {"padded_vocab_size": vocabulary, "num_layers": LAYERS, "model_parallel_size": len(parts)}
    for rank, layers in enumerate(parts):
        for index, layer in zip(indices, layers, strict=False):
            kept = OrderedDict((name, tensor.clone()) for name, tensor in layer.items())
            if 2 <= index < 2 + LAYERS:
                kept["attention.rotary_emb.inv_freq"] = torch.ones(2)
            torch.save(kept, step / f"layer_{index:02d}-model_{rank:02d}-model_states.pt")
        torch.save({"args": args, "iteration": 10}, step / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


def cut(layers: list[dict[str, Tensor]], tp: int, gated: bool = False) -> list[list[dict[str, Tensor]]]:
    """Returns the layers of each rank, with the names of older versions."""
    return [
        [{name: files.cut(name, tensor, tp, rank, gated) for name, tensor in layer.items()} for layer in layers]
        for rank in range(tp)
    ]


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def require_logits(folder: Path, output: Path, wanted: Tensor) -> None:
    found = import_folder(ImportConfig(str(folder), str(output)))
    assert found.source.title.startswith("GPT-NeoX")
    model = load_unsharded(open_checkpoint(found.folder), torch.device("cpu"), torch.float32)
    torch.testing.assert_close(model(ids(), BatchInfo(torch.arange(2))), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("tp", "names"), [(1, "old"), (2, "new"), (12, "old")])
def test_serial_blocks(tp: int, names: str, tmp_path: Path) -> None:
    """Catches layers off by one, a dropped head, RoPE frequencies read as a weight, and unknown newer names."""
    model = neox()
    with torch.no_grad():
        wanted = model(ids()).logits
    parts = cut(neox_layers(model), tp)
    if names == "new":
        new = {"dense_h_to_4h": "linear1", "dense_4h_to_h": "linear2"}
        parts = [renamed(layers, new) for layers in parts]
    require_logits(write(tmp_path / "theirs", parts, SETTINGS), tmp_path / "run", wanted)


def _neox_llama(model: Any, tp: int, old: bool) -> list[list[dict[str, Tensor]]]:
    """Returns the layers of each rank: q, k, v concatenated for grouped heads; up and gate in one matrix or in two."""
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    grouped = model.config.num_key_value_heads != HEADS
    mha = files.llama_layers(model)
    parts = []
    for rank in range(tp):
        layers: list[dict[str, Tensor]] = [{"word_embeddings.weight": state["embed_tokens.weight"].chunk(tp)[rank]}]
        for index in range(LAYERS):
            of = f"layers.{index}."
            q, k, v = (state[f"{of}self_attn.{kind}_proj.weight"].chunk(tp)[rank] for kind in "qkv")
            gate, up = (state[f"{of}mlp.{kind}_proj.weight"].chunk(tp)[rank] for kind in ("gate", "up"))
            down = state[f"{of}mlp.down_proj.weight"].chunk(tp, dim=1)[rank]
            fused = mha[index + 1]["self_attention.query_key_value.weight"].chunk(tp)[rank]
            mlp = {"mlp.w1.weight": gate, "mlp.w3.weight": up, "mlp.w2.weight": down}
            layers.append(
                {
                    "input_layernorm.scale": state[f"{of}input_layernorm.weight"],
                    "attention.query_key_value.weight": torch.cat([q, k, v]) if grouped else fused,
                    "attention.dense.weight": state[f"{of}self_attn.o_proj.weight"].chunk(tp, dim=1)[rank],
                    "post_attention_layernorm.scale": state[f"{of}post_attention_layernorm.weight"],
                    **(mlp if old else {"mlp.linear1.weight": torch.cat([up, gate]), "mlp.linear2.weight": down}),
                }
            )
        layers.append({"norm.scale": state["norm.weight"]})
        layers.append({"final_linear.weight": model.lm_head.weight.detach().chunk(tp)[rank]})
        parts.append(layers)
    return parts


@pytest.mark.parametrize(("tp", "kv", "old"), [(1, 12, True), (3, 12, False), (2, 4, False), (3, 3, True)])
def test_llama(tp: int, kv: int, old: bool, tmp_path: Path) -> None:
    """Catches gate and up projections swapped, and grouped-query heads read in the layout of multi-head attention."""
    model = files.llama(VOCABULARY, kv)
    with torch.no_grad():
        wanted = model(ids()).logits
    settings = SETTINGS | LLAMA_SETTINGS | {"num_kv_heads": kv if kv != HEADS else None}
    require_logits(write(tmp_path / "theirs", _neox_llama(model, tp, old), settings), tmp_path / "run", wanted)


def test_parallel_blocks(tmp_path: Path) -> None:
    """Catches row-parallel biases read as replicas instead of summed, and an unused norm that is not ignored."""
    config = ModelConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_heads=HEADS, vocab_size=VOCABULARY, max_seq_len=64,
        position=Position.rope, parallel_block=True, embedding_norm=False, tie_embeddings=False,
    )  # fmt: skip
    model = GPT(
        config, 0, lambda name, shape: torch.empty(shape).normal_(0.0, 0.2, generator=parameter_generator(0, name))
    ).eval()
    weights = {name: tensor.detach() for name, tensor in model.parameters_by_name().items()}
    blocks = []
    for index in range(LAYERS):
        of = f"blocks.{index}."
        block = {name.removeprefix(of): tensor for name, tensor in weights.items() if name.startswith(of)}
        blocks.append(block | {f"post_attention_layernorm.{kind}": torch.ones(HIDDEN) for kind in ("weight", "bias")})
    layers = [
        {"word_embeddings.weight": weights["embedding.word.weight"]},
        *renamed(
            blocks,
            {
                "input_norm": "input_layernorm", "attention.qkv": "attention.query_key_value",
                "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
            },
        ),
        {f"norm.{kind}": weights[f"final_norm.{kind}"] for kind in ("weight", "bias")},
        {"final_linear.weight": weights["head.weight"]},
    ]  # fmt: skip
    parts = cut(layers, 3)
    for rank, share in enumerate((0.5, 0.2, 0.3)):
        for layer in parts[rank]:
            for name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias"):
                if name in layer:
                    layer[name] = layer[name] * share
    settings = SETTINGS | {"gpt_j_residual": True, "gpt_j_tied": True}
    with torch.no_grad():
        wanted = model(ids(), BatchInfo(torch.arange(2)))
    require_logits(write(tmp_path / "theirs", parts, settings), tmp_path / "run", wanted)


@pytest.mark.parametrize("tp", [1, 3])
def test_blocks_of_pythia_with_two_norms(tp: int, tmp_path: Path) -> None:
    """Catches the second norm left out, RoPE on whole heads, the approximation of GELU, and biases of the branches
    read as replicas instead of summed."""
    model = neox(use_parallel_residual=True, rotary_pct=0.5, hidden_act="gelu")
    with torch.no_grad():
        wanted = model(ids()).logits
    parts = cut(neox_layers(model), tp)
    for rank, share in enumerate((0.5, 0.2, 0.3) if tp == 3 else (1.0,)):
        for layer in parts[rank]:
            for name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias"):
                if name in layer:
                    layer[name] = layer[name] * share
    settings = SETTINGS | {"gpt_j_residual": True, "rotary-pct": 0.5, "bias-gelu-fusion": False}
    require_logits(write(tmp_path / "theirs", parts, settings), tmp_path / "run", wanted)


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"rotary-pct": 1.25}, ConfigError, r"rotary_fraction = 1\.25"),
        ({"pos-emb": "rpe"}, ConfigError, "pos_emb = 'rpe': megads computes 'learned' or 'rotary' or 'alibi' only"),
        ({"pos-emb": ["rpe"]}, ConfigError, r"pos_emb = \['rpe'\]"),
        ({"norm": "scalenorm"}, ConfigError, "norm = 'scalenorm'"),
        ({"hidden-size": "48"}, ConfigError, "hidden_size = '48': want an integer"),
        ({"use-bias-in-mlp": False}, CheckpointError, r"mlp\.\w+\.bias"),
        ("no settings", ConfigError, r"configs: holds no \*.yml"),
        ("no YAML", ConfigError, "model.yml: cannot be read as YAML"),
        ("no layer", CheckpointError, "a layer is missing or one too many"),
        ("a shard too few", CheckpointError, "layer_02-model_01-model_states.pt is missing"),
        ("another width", CheckpointError, r"layers.2.mlp.dense_h_to_4h.weight has shape"),
    ],
)
def test_bad_folders(change: Any, error: type[MegadsError], told: str, tmp_path: Path) -> None:
    """Catches an unsupported model that is imported as a supported one, and a damaged checkpoint that is accepted."""
    settings = SETTINGS | (change if isinstance(change, dict) else {})
    layers = neox_layers(neox())
    if change == "another width":
        layers[3]["mlp.dense_h_to_4h.weight"] = torch.zeros(HIDDEN, HIDDEN)
    folder = write(tmp_path / "theirs", cut(layers, 2), settings)
    step = folder / "global_step10"
    if change == "no settings":
        shutil.rmtree(step / "configs")
    elif change == "no YAML":
        (step / "configs" / "model.yml").write_text("{a: [")
    elif change == "no layer":
        for path in step.glob("layer_03-*"):
            path.unlink()
    elif change == "a shard too few":
        (step / "layer_02-model_01-model_states.pt").unlink()
    with pytest.raises(error, match=told):
        import_folder(ImportConfig(str(folder), str(tmp_path / "run")))
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
