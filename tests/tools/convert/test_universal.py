"""Universal checkpoints, compared with DeepSpeed's own loader and converter."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import CheckpointHandle, open_checkpoint, read_into
from megads.checkpoint.store import save_parts
from megads.data.indexed.run_tokenizer import TokenizerRecord
from megads.data.indexed.sidecar import tokenizer_sha256
from megads.engine.interface import Shard
from megads.errors import CheckpointError, ConfigError
from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.model_size import parameter_shapes
from megads.tools.convert.export_config import ExportConfig, ExportFormat
from megads.tools.convert.families.llama import LLAMA
from megads.tools.convert.import_config import ImportConfig, ImportFormat
from megads.tools.convert.load import import_folder
from megads.tools.convert.universal import export_universal
from megads.tools.convert.weights import to_hugging_face
from tests.distributed import run_ranks
from tests.small_run import TOKENS, write_dataset
from tests.tools.convert import deepspeed_engine

pytest.importorskip("transformers")

MODEL = ModelConfig(
    num_layers=2, hidden_size=48, num_heads=6, num_kv_heads=3, vocab_size=TOKENS, max_seq_len=32, bias=False,
    position=Position.rope, norm=NormKind.rmsnorm, mlp=MLPKind.swiglu, embedding_norm=False, tie_embeddings=False,
    ffn_size=80,
)  # fmt: skip
KINDS = ("weight", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained tokenizer."""
    return Path(f"{write_dataset(tmp_path_factory.mktemp('data'))}.tokenizer.json")


def write_run(run_dir: Path, tokenizer: Path, model: ModelConfig = MODEL, kinds: tuple[str, ...] = KINDS) -> Path:
    """Writes a run trained for 7 steps, one of them skipped; every tensor has its own random values."""
    generator = torch.Generator().manual_seed(1)
    shards = [
        Shard(f"{kind}/{name}", shape, (0,) * len(shape), torch.rand(shape, generator=generator) / 4)
        for kind in kinds
        for name, shape in parameter_shapes(model).items()
    ]
    end = Tokenizer.from_file(str(tokenizer)).token_to_id("<|endoftext|>")
    record = RunRecord(
        state={"step": 7, "samples": 56, "tokens": 900}, optimizer_steps=6, config_digest="digest",
        model=json.loads(json.dumps(dataclasses.asdict(model))), layout={"tp": 1, "cp": 1, "pp": 1, "dp": 1},
        tokenizer=TokenizerRecord(tokenizer_sha256(tokenizer), TOKENS, end, "ignore"),
    )  # fmt: skip
    save_parts(run_dir, [shards], record)
    shutil.copyfile(tokenizer, run_dir / "tokenizer.json")
    return run_dir


def exported(run: Path, output: Path, **options: Any) -> Path:
    return export_universal(ExportConfig(str(run), str(output), format=ExportFormat.universal, **options)).folder


def tensors_of(handle: CheckpointHandle, kind: str, model: ModelConfig = MODEL) -> dict[str, torch.Tensor]:
    found = {name: torch.empty(shape) for name, shape in parameter_shapes(model).items()}
    read_into(
        handle,
        [Shard(f"{kind}/{name}", tuple(t.shape), (0,) * t.dim(), t) for name, t in found.items()],
    )
    return found


def test_it_comes_back(tmp_path: Path, tokenizer: Path) -> None:
    """Catches a moment with another name or order than its weight, rounding, and a lost step count."""
    run = write_run(tmp_path / "run", tokenizer)
    found = import_folder(ImportConfig(str(exported(run, tmp_path / "out")), str(tmp_path / "back")))
    assert (found.folder / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert found.has_moments and "step 7" in str(found)
    before, after = open_checkpoint(run), open_checkpoint(tmp_path / "back")
    assert after.state == before.state and after.optimizer_steps == before.optimizer_steps == 6
    assert after.folder.name == "step_00000007"
    for kind in KINDS:
        wanted, got = tensors_of(before, kind), tensors_of(after, kind)
        assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
    import_folder(ImportConfig(str(tmp_path / "out"), str(tmp_path / "weights"), optimizer=False))
    weights = open_checkpoint(tmp_path / "weights")
    assert weights.state["step"] == 0 and {key.partition("/")[0] for key in weights.manifest.tensors} == {"weight"}


@pytest.mark.slow
def test_deepspeed_loads_it(tmp_path: Path, tokenizer: Path) -> None:
    """Catches a checkpoint that DeepSpeed's engine does not load: weights, moments and steps of both its parameter
    groups, which keep their own settings."""
    run = write_run(tmp_path / "run", tokenizer)
    folder = exported(run, tmp_path / "out")
    (found,) = run_ranks(deepspeed_engine.load_universal, 1, str(folder), str(folder / "global_step7"))
    handle = open_checkpoint(run)
    for kind in KINDS:
        for name, tensor in to_hugging_face(MODEL, LLAMA.names, tensors_of(handle, kind)).items():
            assert np.array_equal(found[f"{kind}/{name}"], tensor.numpy()), f"{kind}/{name}"
            if kind == "weight":
                assert np.array_equal(found[f"working/{name}"], tensor.bfloat16().float().numpy())
    assert found["steps"].tolist() == [6.0] and found["global_steps"] == 7 and found["decays"].tolist() == [0.1, 0.0]


@pytest.mark.slow
def test_deepspeeds_own_is_read(tmp_path: Path, tokenizer: Path) -> None:
    """Catches names, shapes or steps that are misread from a checkpoint trained, saved and converted by DeepSpeed."""
    settings = exported(write_run(tmp_path / "run", tokenizer), tmp_path / "out") / "global_step7"
    (wanted,) = run_ranks(deepspeed_engine.save, 1, str(tmp_path / "theirs"), str(settings))
    shutil.copyfile(settings / "config.json", tmp_path / "theirs" / "config.json")
    found = import_folder(ImportConfig(str(tmp_path / "theirs"), str(tmp_path / "in"), format=ImportFormat.universal))
    handle = open_checkpoint(found.folder)
    assert handle.optimizer_steps == handle.state["step"] == 3 and handle.state["samples"] == 6
    for kind in KINDS:
        for name, tensor in to_hugging_face(MODEL, LLAMA.names, tensors_of(handle, kind)).items():
            assert np.array_equal(wanted[f"{kind}/{name}"], tensor.numpy()), f"{kind}/{name}"


def test_a_run_without_moments(tmp_path: Path, tokenizer: Path) -> None:
    """Catches an export that fails for an imported run, and one that invents moments."""
    folder = exported(write_run(tmp_path / "run", tokenizer, kinds=("weight",)), tmp_path / "out")
    names = {path.name for path in (folder / "global_step7" / "zero" / "model.norm.weight").iterdir()}
    assert names == {"fp32.pt"}
    assert not import_folder(ImportConfig(str(folder), str(tmp_path / "in"))).has_moments


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("no parameter", "model.norm.weight is missing, which DeepSpeed universal checkpoint of LlamaForCausalLM"),
        ("no moment", r"model.norm.weight is missing \(exp_avg\)"),
        ("a parameter more", "model.mask is left over"),
        ("another shape", r"model.norm.weight has shape \[47\] \(exp_avg_sq\), by config.json it has \[48\]"),
        ("truncated", r"fp32.pt cannot be read"),
        ("no tensor", "fp32.pt: holds no tensor param"),
        ("other steps", r"say different numbers of steps \(\[5, 6\]\)"),
        ("no steps", "have no step.pt, .* optimizer=false imports only the weights"),
        ("steps in words", "step.pt: holds no number of steps"),
    ],
)
def test_bad_folders(damage: str, told: str, tmp_path: Path, tokenizer: Path) -> None:
    """Catches a corrupt checkpoint that is accepted, and an import that leaves a partial run."""
    folder = exported(write_run(tmp_path / "run", tokenizer), tmp_path / "out")
    zero = folder / "global_step7" / "zero"
    norm = zero / "model.norm.weight"
    damages: dict[str, Any] = {
        "no parameter": lambda: shutil.rmtree(norm),
        "no moment": (norm / "exp_avg.pt").unlink,
        "a parameter more": lambda: shutil.copytree(norm, zero / "model.mask"),
        "another shape": lambda: torch.save({"param": torch.zeros(47)}, norm / "exp_avg_sq.pt"),
        "truncated": lambda: (norm / "fp32.pt").write_bytes((norm / "fp32.pt").read_bytes()[:-300]),
        "no tensor": lambda: torch.save({"param": 3}, norm / "fp32.pt"),
        "other steps": lambda: torch.save(torch.tensor(5.0), norm / "step.pt"),
        "no steps": lambda: [path.unlink() for path in zero.glob("*/step.pt")],
        "steps in words": lambda: torch.save("five", norm / "step.pt"),
    }
    damages[damage]()
    with pytest.raises(CheckpointError, match=told):
        import_folder(ImportConfig(str(folder), str(tmp_path / "in")))
    assert not (tmp_path / "in").exists() and not (tmp_path / ".in.partial").exists()


def test_nothing_says_what_it_is(tmp_path: Path, tokenizer: Path) -> None:
    """Catches a guess at the model if config.json is missing."""
    folder = exported(write_run(tmp_path / "run", tokenizer), tmp_path / "out")
    (folder / "global_step7" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model's config.json is missing: put it there"):
        import_folder(ImportConfig(str(folder), str(tmp_path / "in")))
