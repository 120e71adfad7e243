"""Mixtures of experts in and out: storage of the experts, the router's state, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megads.checkpoint.read import load_unsharded, open_checkpoint, read_into
from megads.checkpoint.store import save_parts
from megads.engine.interface import Shard
from megads.errors import CheckpointError, ConfigError
from megads.model.gpt import GPT
from megads.model.moe import Router
from megads.model.moe_config import MoEConfig
from megads.tools.convert import export, load
from megads.tools.convert.architectures import ARCHITECTURES, architecture_of
from megads.tools.convert.export import SINGLE_FILE
from megads.tools.convert.export_config import ExportConfig, ExportFormat, ExportPrecision
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.weights import links, shapes_of
from tests.tools.convert.families import CASES, reloaded, their_logits, their_model, tokens, write_folder

transformers = pytest.importorskip("transformers")

NAMES = sorted(name for name, architecture in ARCHITECTURES.items() if architecture.has_experts)


def imported(folder: Path, output: Path, dtype: torch.dtype = torch.float32) -> GPT:
    found = load.import_folder(ImportConfig(str(folder), str(output)))
    return load_unsharded(open_checkpoint(found.folder), torch.device("cpu"), dtype)


def exported(run: Path, output: Path, name: str, **options: Any) -> Path:
    given: dict[str, Any] = {"precision": ExportPrecision.fp32, **options}
    return export.export_checkpoint(ExportConfig(str(run), str(output), ExportFormat(name), **given)).folder


def content_of(name: str, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(their_model(name, CASES[name][number]).config.to_json_string(use_diff=False))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_stacked_experts_are_those_of_the_hub(name: str, tmp_path: Path) -> None:
    """Catches tensors of transformers 5's own storage, in shards, whose gates, ups or experts are taken for others."""
    theirs = their_model(name, CASES[name][0])
    hub = write_folder(theirs, tmp_path / "hub")
    stacked = write_folder(theirs, tmp_path / "stacked", save_original_format=False, max_shard_size="40KB")
    files = sorted(stacked.glob("*.safetensors"))
    assert len(files) > 1 and any(key.endswith("experts.gate_up_proj") for file in files for key in load_file(file))
    ours, again = imported(hub, tmp_path / "in"), imported(stacked, tmp_path / "again")
    for parameter, weight in ours.parameters_by_name().items():
        assert torch.equal(weight, again.parameters_by_name()[parameter]), parameter


@pytest.mark.parametrize("name", NAMES)
def test_files_hold_some_experts_of_a_layer(name: str, tmp_path: Path) -> None:
    """Catches a layer of experts that is written to one file whatever its size, and shards that cannot be read."""
    theirs = their_model(name, CASES[name][0] | {"hidden_size": 240, "num_hidden_layers": 5})
    imported(write_folder(theirs, tmp_path / "theirs"), tmp_path / "in")
    folder = exported(tmp_path / "in", tmp_path / "out", name, shard_mib=1)
    layers_of_files = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            layers_of_files.append({key.split(".experts.")[0] for key in list(file.keys()) if ".experts." in key})
    assert any(one & other for one, other in pairwise(layers_of_files))
    assert torch.equal(their_logits(reloaded(folder)[0], tokens()), their_logits(theirs, tokens()))


@pytest.mark.parametrize("name", NAMES)
def test_one_expert_is_converted_at_a_time(name: str) -> None:
    """Catches a conversion that needs the stacked weights of all experts of a layer in memory."""
    architecture = ARCHITECTURES[name]
    model = architecture.model_of(content_of(name))
    names = architecture.names_of(model)
    shapes = shapes_of(model, names)
    of_experts = [link for link in links(model, names) if "mlp.experts." in link.ours[0]]
    assert len(of_experts) == 2 * model.moe.num_experts * sum(map(model.moe.holds, range(model.num_layers)))
    largest = max(shard.tensor.numel() for link in of_experts for shard in link.shards("", shapes, "meta"))
    assert largest == 2 * model.expert_width * model.hidden_size


def test_an_imported_router_starts_with_even_loads_and_trains(tmp_path: Path) -> None:
    """Catches an import without the state of the balance loss, which a run that continues it could not load."""
    ours = imported(write_folder(their_model("mixtral", CASES["mixtral"][1]), tmp_path / "theirs"), tmp_path / "in")
    assert ours.config.moe.global_loss == 0.02
    loads = [weight for name, weight in ours.parameters_by_name().items() if name.endswith("expert_load")]
    assert len(loads) == ours.config.num_layers and all(torch.equal(load, torch.ones(5)) for load in loads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_routers_state_stays_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches a model loaded or converted to bf16 that rounds the bias by which experts are selected."""
    imported(write_folder(their_model("mixtral", CASES["mixtral"][1]), tmp_path / "theirs"), tmp_path / "in")
    handle = open_checkpoint(tmp_path / "in")
    shards = []
    for key, record in handle.manifest.tensors.items():
        shard = Shard(key, record.shape, (0,) * len(record.shape), torch.empty(record.shape))
        read_into(handle, [shard])
        if key.endswith("expert_load"):
            shard.tensor.copy_(1.0 + torch.arange(5) / 1000)  # not a bf16 number
        shards.append(shard)
    save_parts(tmp_path / "changed", [shards], handle.manifest.run)
    model = load_unsharded(open_checkpoint(tmp_path / "changed"), torch.device("cpu"), dtype)
    for model_ in (model, model.to(torch.bfloat16)):
        for router in (module for module in model_.modules() if isinstance(module, Router)):
            assert router.expert_load is not None and router.weight.dtype == model_.layers[0].word.weight.dtype
            assert torch.equal(router.expert_load, 1.0 + torch.arange(5) / 1000)
            assert not router.expert_load.requires_grad


def test_the_bias_that_selects_experts_is_exported_in_fp32(tmp_path: Path) -> None:
    """Catches a bias rounded to the dtype of the weights, on the way in or out."""
    theirs = their_model("glm4_moe", CASES["glm4_moe"][1])
    ours = imported(write_folder(theirs, tmp_path / "theirs"), tmp_path / "in", torch.bfloat16)
    assert ours.config.moe.selects_by_bias
    folder = exported(tmp_path / "in", tmp_path / "out", "glm4_moe", precision=ExportPrecision.bf16)
    out = load_file(folder / SINGLE_FILE)
    biases = {key: buffer for key, buffer in theirs.named_buffers() if key.endswith("e_score_correction_bias")}
    assert len(biases) == 2 and all(torch.equal(out[key], biases[key]) for key in biases)
    assert {tensor.dtype for key, tensor in out.items() if key not in biases} == {torch.bfloat16}


def test_layers_of_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    """Catches GLM-4.5's files refused, or a layer after the model's last one taken for a damaged file."""
    theirs = their_model("glm4_moe", CASES["glm4_moe"][0])
    folder = write_folder(theirs, tmp_path / "theirs")
    tensors = load_file(folder / SINGLE_FILE)
    more = {"model.layers.4.eh_proj.weight": torch.ones(3, 3), "model.layers.4.mlp.gate.weight": torch.ones(6, 48)}
    save_file(tensors | more, folder / SINGLE_FILE, {"format": "pt"})
    found = load.import_folder(ImportConfig(str(folder), str(tmp_path / "in")))
    assert "layers of multi-token prediction left out" in str(found)
    content = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"layers\.4\..* are left over"):
        load.import_folder(ImportConfig(str(folder), str(tmp_path / "again")))


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]: megads supports the first layers only"),
        ("qwen3_moe", {"mlp_only_layers": "x"}, "mlp_only_layers = 'x': want a list"),
        ("qwen3_moe", {"num_experts": 0, "num_local_experts": 0}, "it has 0 experts: want at least 1"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "top_k = 7 is above model.moe.num_experts = 6"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0: megads computes None only"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: megads computes 0.0 only"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, changes: dict[str, Any], told: str) -> None:
    """Catches a key of experts that is ignored."""
    with pytest.raises(ConfigError, match=told):
        ARCHITECTURES[name].model_of(content_of(name) | changes)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("deepseek_v3", "multi-head latent attention .* it knows mixtral, "),
        ("gpt_oss", "experts with biases and a clamped activation"),
    ],
)
def test_unknown_experts_are_refused_by_name(name: str, told: str) -> None:
    """Catches a refusal that names a family that happens to have similar keys instead of what is missing."""
    config = transformers.AutoConfig.for_model(name, num_hidden_layers=2)
    with pytest.raises(ConfigError, match=f"model_type = '{name}': megads does not compute its {told}"):
        architecture_of(json.loads(config.to_json_string(use_diff=False)))


@pytest.mark.parametrize(
    ("wanted", "changes", "told"),
    [
        ("llama", {}, "model.moe.num_experts = 6 where llama has 0"),
        ("olmoe", {}, "model.qk_norm_width = head where olmoe has full"),
        ("qwen3_moe", {"shared_ffn_size": 8}, "model.moe.shared_ffn_size = 8 where qwen3_moe has 0"),
        ("qwen3_moe", {"bias_rate": 0.001}, "model.moe.bias_rate = 0.001 where qwen3_moe has 0.0"),
        ("qwen3_moe", {"score": "sigmoid"}, "model.moe.score = sigmoid where qwen3_moe has softmax"),
        ("qwen3_moe", None, "model.moe.num_experts = 0 where qwen3_moe has experts"),
    ],
)
def test_experts_that_a_format_lacks_are_refused(wanted: str, changes: dict[str, Any] | None, told: str) -> None:
    """Catches an export that drops experts, a shared one, or the bias that selects them."""
    model = ARCHITECTURES["qwen3_moe"].model_of(content_of("qwen3_moe"))
    moe = MoEConfig() if changes is None else dataclasses.replace(model.moe, **changes)
    assert told in ARCHITECTURES[wanted].refusals(dataclasses.replace(model, moe=moe))


@pytest.mark.parametrize(
    ("step", "dense", "first"),
    [(1, [], 0), (1, [0, 1], 2), (2, [0], 1), (2, [0, 1], 2), (2, [1], 2), (2, [0, 1, 2], 3)],
)
def test_layers_without_experts_are_the_same_ones(step: int, dense: list[int], first: int) -> None:
    """Catches another layer with experts than transformers has."""
    content = content_of("qwen3_moe") | {"decoder_sparse_step": step, "mlp_only_layers": dense}
    model = ARCHITECTURES["qwen3_moe"].model_of(content)
    held = [layer for layer in range(model.num_layers) if model.moe.holds(layer)]
    assert held == [layer for layer in range(4) if layer not in dense and (layer + 1) % step == 0]
    assert model.moe.first_dense == first
    assert ARCHITECTURES["qwen3_moe"].model_of(ARCHITECTURES["qwen3_moe"].config_json(model)) == model


def test_the_balance_loss_of_transformers_multiplies_means_over_layers() -> None:
    """Catches docs/hugging-face.md where transformers' loss is another one: the sum of the layers' own losses, which
    is what global_loss weights, or without the factor top_k."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    num_layers, tokens, experts, top_k = 3, 50, 6, 2
    generator = torch.Generator().manual_seed(2)
    logits_lte = 2.0 * torch.randn(num_layers, tokens, experts, generator=generator)
    scores_lte = logits_lte.softmax(-1)
    chosen_lte = torch.zeros_like(scores_lte).scatter(2, scores_lte.topk(top_k, -1).indices, 1.0)
    share_le, mean_le = chosen_lte.mean(1) / top_k, scores_lte.mean(1)
    theirs = load_balancing_loss_func(tuple(logits_lte), experts, top_k)
    torch.testing.assert_close(theirs, top_k * experts * (share_le.mean(0) * mean_le.mean(0)).sum())
    own_l = experts * (share_le * mean_le).sum(-1)
    assert abs(theirs / top_k - own_l.mean()) > 0.01
    for layer, own in enumerate(own_l):
        alike = load_balancing_loss_func((logits_lte[layer],) * num_layers, experts, top_k)
        torch.testing.assert_close(alike, top_k / num_layers * own * num_layers)
