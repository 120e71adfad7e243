"""Tests the import of optimizer state from Megatron-DeepSpeed's checkpoints, also after DeepSpeed's own converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megads.checkpoint.read import CheckpointHandle, load_unsharded, open_checkpoint, read_into
from megads.engine.interface import Shard
from megads.errors import CheckpointError
from megads.tools.convert.families.gpt import BLOOM
from megads.tools.convert.import_config import ImportConfig, ImportFormat
from megads.tools.convert.load import import_folder
from megads.tools.convert.weights import to_hugging_face
from tests.small_run import TOKENS
from tests.tools.convert import deepspeed_engine, test_gpt_neox, zero_writer
from tests.tools.convert import megatron_files as files

PADDED = 312


def write(folder: Path, tp: int, pp: int, dp: int) -> tuple[Path, Any]:
    """Writes a checkpoint of BLOOM whose layer files are bf16 and whose optimizer's master weights are not."""
    model = files.bloom(PADDED)
    arguments = files.bloom_arguments(model, tp, pp)
    layers = files.bloom_layers(model)
    files.write(folder, layers, arguments, TOKENS, lambdas=1, dtype=torch.bfloat16)
    zero_writer.write_optimizer_state(folder / "global_step10", zero_writer.stages_of(layers, pp), tp, dp)
    return folder, model


def require_state(handle: CheckpointHandle, model: Any) -> None:
    """Requires weights bitwise equal to the model's, and moments that are half of them and their squares."""
    ours = load_unsharded(handle, torch.device("cpu"), torch.float32)
    wanted = model.state_dict()
    for name, tensor in to_hugging_face(ours.config, BLOOM.names, ours.parameters_by_name()).items():
        assert torch.equal(tensor, wanted[name][: len(tensor)]), name
    require_halves_and_squares(handle)


def require_halves_and_squares(handle: CheckpointHandle) -> None:
    """Requires moments that are half of a weight and its square."""
    weights = load_unsharded(handle, torch.device("cpu"), torch.float32).parameters_by_name()
    for name, weight in weights.items():
        for kind, wanted in (("exp_avg", weight / 2), ("exp_avg_sq", weight * weight)):
            found = torch.empty(weight.shape)
            read_into(handle, [Shard(f"{kind}/{name}", tuple(found.shape), (0,) * found.dim(), found)])
            assert torch.equal(found, wanted), f"{kind}/{name}"


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 3, 2), (12, 1, 1), (1, 2, 12)])
def test_moments_and_masters(tp: int, pp: int, dp: int, tmp_path: Path) -> None:
    """Catches data-parallel rank 10 read before rank 2, slices concatenated over the wrong ranks, a tied embedding that
    is read twice, and weights that are rounded."""
    folder, model = write(tmp_path / "theirs", tp, pp, dp)
    found = import_folder(ImportConfig(str(folder), str(tmp_path / "run")))
    assert found.has_moments
    handle = open_checkpoint(found.folder)
    assert handle.state == {"step": 10, "samples": 80, "tokens": 5120} and handle.optimizer_steps == 9
    require_state(handle, model)
    weights = import_folder(ImportConfig(str(folder), str(tmp_path / "weights"), optimizer=False))
    assert not weights.has_moments and open_checkpoint(weights.folder).state["step"] == 0


def test_moments_of_gpt_neox(tmp_path: Path) -> None:
    """Catches names of GPT-NeoX that are mapped for the weights and not for the moments."""
    theirs = test_gpt_neox.neox()
    layers = test_gpt_neox.neox_layers(theirs)
    folder = test_gpt_neox.write(tmp_path / "theirs", test_gpt_neox.cut(layers, 3), test_gpt_neox.SETTINGS)
    indices = (0, 2, 3, 4, 6, 7)
    stage = {
        f"{index}.{name}": part for index, layer in zip(indices, layers, strict=True) for name, part in layer.items()
    }
    zero_writer.write_optimizer_state(folder / "global_step10", [stage], 3, 2)
    found = import_folder(ImportConfig(str(folder), str(tmp_path / "run")))
    assert found.has_moments and found.source.title.startswith("GPT-NeoX")
    require_halves_and_squares(open_checkpoint(found.folder))


def test_deepspeeds_converter_agrees(tmp_path: Path) -> None:
    """Catches files that DeepSpeed itself would not read, and a failed import of universal checkpoints with Megatron's
    names."""
    from deepspeed.checkpoint import ds_to_universal

    folder, model = write(tmp_path / "theirs", 2, 1, 12)
    deepspeed_engine.convert(folder / "global_step10", ds_to_universal)
    found = import_folder(ImportConfig(str(folder), str(tmp_path / "run"), format=ImportFormat.universal))
    assert found.source.title.startswith("DeepSpeed universal checkpoint of Megatron-DeepSpeed")
    require_state(open_checkpoint(found.folder), model)
    require_state(open_checkpoint(import_folder(ImportConfig(str(folder), str(tmp_path / "direct"))).folder), model)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("no data rank", "of data parallel rank 2 of 12, model parallel rank 1, is missing"),
        ("no last data rank", "says a data-parallel size of 12, but there are 11 files"),
        ("no model rank", "the optimizer's state of model parallel rank 1 is missing"),
        ("no mapping", "lacks the positions of parameters"),
        ("a mapping beyond", "exceeds its partition"),
        ("other steps", r"say different numbers of steps: \[8, 9\]"),
        ("fewer elements", "elements, by param_shapes its shape is"),
        ("no shapes", "holds no param_shapes"),
    ],
)
def test_bad_folders(damage: str, told: str, tmp_path: Path) -> None:
    """Catches a checkpoint of which a rank's part is ignored."""
    folder, _ = write(tmp_path / "theirs", 2, 1, 12)
    step = folder / "global_step10"
    path = step / "bf16_zero_pp_rank_2_mp_rank_01_optim_states.pt"
    file = torch.load(path, weights_only=False)
    state = file["optimizer_state_dict"]
    if damage == "no data rank":
        path.unlink()
    elif damage == "no last data rank":
        for rank in (0, 1):
            (step / f"bf16_zero_pp_rank_11_mp_rank_{rank:02d}_optim_states.pt").unlink()
    elif damage == "no model rank":
        for each in step.glob("bf16_zero_*_mp_rank_01_*"):
            each.unlink()
    elif damage == "no shapes":
        shapes = torch.load(step / "mp_rank_01_model_states.pt", weights_only=False)
        torch.save(shapes | {"param_shapes": None}, step / "mp_rank_01_model_states.pt")
    else:
        name, address = next(iter(state["param_slice_mappings"][0].items()))
        change: dict[str, Any] = {
            "no mapping": lambda: state.pop("param_slice_mappings"),
            "a mapping beyond": lambda: setattr(address, "start", 10**9),
            "other steps": lambda: state["base_optimizer_state"]["state"][0].update(step=torch.tensor(8.0)),
            "fewer elements": lambda: state["param_slice_mappings"][0].pop(name),
        }
        change[damage]()
        torch.save(file, path)
    with pytest.raises(CheckpointError, match=told):
        import_folder(ImportConfig(str(folder), str(tmp_path / "run")))
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
