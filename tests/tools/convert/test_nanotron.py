"""Tests the import of nanotron checkpoints, written after its sources, against transformers' Llama with the same
weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megads.batch import BatchInfo
from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.errors import CheckpointError, ConfigError, MegadsError
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.load import import_folder
from tests.tools.convert import megatron_files as files
from tests.tools.convert.megatron_files import HEADS, HIDDEN, LAYERS

pytest.importorskip("transformers")
VOCABULARY, TOLERANCE = 360, 2e-5
DIM = HIDDEN // HEADS


def _interleaved(weight: Tensor) -> Tensor:
    """Returns a projection with its rows permuted for rotary embeddings of adjacent pairs."""
    return weight.view(-1, 2, DIM // 2, HIDDEN).transpose(1, 2).reshape(weight.shape)


def _parameters(model: Any, interleaved: bool) -> dict[str, tuple[Tensor, int | None, list[int]]]:
    """Returns nanotron's parameters: each with the dim that tensor parallelism shards, and the sizes stacked along
    it."""
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    found: dict[str, tuple[Tensor, int | None, list[int]]] = {
        "model.token_position_embeddings.pp_block.token_embedding.weight": (
            state["embed_tokens.weight"],
            0,
            [VOCABULARY],
        ),
        "model.final_layer_norm.pp_block.weight": (state["norm.weight"], None, []),
        "model.lm_head.pp_block.weight": (model.lm_head.weight.detach(), 0, [VOCABULARY]),
    }
    for index in range(LAYERS):
        ours, theirs = f"model.decoder.{index}.pp_block.", f"layers.{index}."
        q, k, v = (state[f"{theirs}self_attn.{kind}_proj.weight"] for kind in "qkv")
        if interleaved:
            q, k = _interleaved(q), _interleaved(k)
        gate, up, down = (state[f"{theirs}mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        found |= {
            f"{ours}attn.qkv_proj.weight": (torch.cat([q, k, v]), 0, [len(q), len(k), len(v)]),
            f"{ours}attn.o_proj.weight": (state[f"{theirs}self_attn.o_proj.weight"], 1, [HIDDEN]),
            f"{ours}mlp.gate_up_proj.weight": (torch.cat([gate, up]), 0, [len(gate), len(up)]),
            f"{ours}mlp.down_proj.weight": (down, 1, [down.shape[1]]),
            f"{ours}input_layernorm.weight": (state[f"{theirs}input_layernorm.weight"], None, []),
            f"{ours}post_attention_layernorm.weight": (state[f"{theirs}post_attention_layernorm.weight"], None, []),
        }
    return found


def _slices(dim: int, start: int, stop: int) -> str:
    return "|".join(f"{start},{stop},None" if axis == dim else "None,None,None" for axis in range(2))


def write(folder: Path, model: Any, tp: int, pp: int = 1, interleaved: bool = True, **changes: Any) -> Path:
    """Writes a checkpoint of step 5."""
    step = folder / "5"
    for name, (tensor, dim, sizes) in _parameters(model, interleaved).items():
        place, _, kind = name.rpartition(".")
        target = step / "model" / Path(*place.split("."))
        target.mkdir(parents=True)
        if dim is None:
            save_file({"data": tensor.clone()}, target / f"model_{kind}.safetensors")
            continue
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        for rank in range(tp):
            cuts = [(start + size // tp * rank, size // tp) for start, size in zip(starts, sizes, strict=True)]
            parts = [tensor.narrow(dim, start, length) for start, length in cuts]
            local = [sum(length for _, length in cuts[:index]) for index in range(len(cuts))]
            pairs = ";".join(
                f"{_slices(dim, here, here + length)}#{_slices(dim, start, start + length)}"
                for here, (start, length) in zip(local, cuts, strict=True)
            )
            save_file(
                {"data": torch.cat(parts, dim).contiguous()},
                target / f"model_{kind}_pp-rank-{pp - 1}-of-{pp}_tp-rank-{rank}-of-{tp}.safetensors",
                {
                    "version": "1.2", "local_global_slices_pairs": pairs,
                    "unsharded_shape": str(tuple(tensor.shape)),
                },
            )  # fmt: skip
    config = {
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
        "intermediate_size": 72, "is_llama_config": True, "max_position_embeddings": 64, "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS, "num_key_value_heads": model.config.num_key_value_heads, "pad_token_id": None,
        "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False,
        "use_cache": True, "vocab_size": VOCABULARY,
    } | changes  # fmt: skip
    (step / "model_config.json").write_text(json.dumps(config))
    (step / "checkpoint_metadata.json").write_text(json.dumps({"version": "1.2", "tp": tp, "dp": 1, "metas": {}}))
    (folder / "latest.txt").write_text("5")
    return folder


@pytest.mark.parametrize(
    ("tp", "pp", "kv", "changes"),
    [
        (1, 1, 12, {}),
        (2, 2, 4, {}),
        (3, 1, 3, {"rope_interleaved": False, "rope_theta": 10000.0}),
        (12, 1, 12, {"rope_interleaved": True}),
    ],
)
def test_llama(tp: int, pp: int, kv: int, changes: dict[str, Any], tmp_path: Path) -> None:
    """Catches fused projections whose ranks' parts are concatenated in rank order, rotary embeddings of the other
    layout, and gate projections read as up projections."""
    model = files.llama(VOCABULARY, kv)
    ids = torch.randint(0, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(3))
    interleaved = changes.get("rope_interleaved", True)
    folder = write(tmp_path / "theirs", model, tp, pp, interleaved, **changes)
    found = import_folder(ImportConfig(str(folder), str(tmp_path / "run")))
    assert found.source.title == f"nanotron Llama, 5, tensor parallel {tp}"
    ours = load_unsharded(open_checkpoint(found.folder), torch.device("cpu"), torch.float32)
    with torch.no_grad():
        wanted, got = model(ids).logits, ours(ids, BatchInfo(torch.arange(2)))
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


def _with_header(path: Path, changes: dict[str, str]) -> None:
    with safe_open(path, framework="pt") as file:
        tensor, metadata = file.get_tensor("data"), file.metadata()
    save_file({"data": tensor}, path, metadata | changes)


DOWN = Path("5/model/model/decoder/1/pp_block/mlp/down_proj")
PART = DOWN / "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "no part": lambda folder: (folder / PART).unlink(),
    "no parameter": lambda folder: [path.unlink() for path in (folder / DOWN).iterdir()],
    "a parameter more": lambda folder: save_file({"data": torch.ones(3)}, folder / "5/model/model_bias.safetensors"),
    "truncated": lambda folder: (folder / PART).write_bytes((folder / PART).read_bytes()[:-9]),
    "the other's slices": lambda folder: _with_header(
        folder / PART, {"local_global_slices_pairs": "None,None,None|0,36,None#None,None,None|0,36,None"}
    ),
    "slices in words": lambda folder: _with_header(folder / PART, {"local_global_slices_pairs": "all"}),
    "another shape": lambda folder: _with_header(folder / PART, {"unsharded_shape": "(48, 80)"}),
    "no data": lambda folder: save_file({"date": torch.ones(3)}, folder / PART),
    "no config": lambda folder: (folder / "5/model_config.json").unlink(),
}


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        ("no part", CheckpointError, "the part of tensor parallel rank 1 of 2 is missing"),
        ("no parameter", CheckpointError, r"model.layers.1.mlp.down_proj.weight is missing, which nanotron Llama"),
        ("a parameter more", CheckpointError, "bias is left over"),
        ("truncated", CheckpointError, "cannot be read"),
        ("the other's slices", CheckpointError, "is not stored exactly once"),
        ("slices in words", CheckpointError, "has wrong slices"),
        ("another shape", CheckpointError, "different shapes|says wrongly"),
        ("no data", CheckpointError, "cannot be read"),
        ("no config", ConfigError, r"model_config.json cannot be read"),
        ({"is_llama_config": None}, ConfigError, "megads reads Llama only"),
        ({"hidden_act": "gelu"}, ConfigError, "model_config.json: hidden_act = 'gelu'"),
        ({"intermediate_size": 96}, CheckpointError, r"by model_config.json it has 192 rows"),
    ],
)
def test_bad_folders(damage: Any, error: type[MegadsError], told: str, tmp_path: Path) -> None:
    """Catches a bad checkpoint that is accepted, and an import that leaves a partial run."""
    changes = damage if isinstance(damage, dict) else {}
    folder = write(tmp_path / "theirs", files.llama(VOCABULARY, 4), 2, **changes)
    if not changes:
        DAMAGES[damage](folder)
    with pytest.raises(error, match=told):
        import_folder(ImportConfig(str(folder), str(tmp_path / "run")))
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
