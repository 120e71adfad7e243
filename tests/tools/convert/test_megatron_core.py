"""Distributed checkpoints of Megatron-Core, which its own code writes and whose logits its own model computes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megads.batch import BatchInfo
from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.errors import CheckpointError, ConfigError, MegadsError
from megads.tools.convert.import_config import ImportConfig
from megads.tools.convert.load import import_folder
from megads.tools.convert.pickles import read_inert
from tests.distributed import run_ranks
from tests.tools.convert import megatron_core_peer as peer

# Found, not imported: the import takes seconds, of every collection.
pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
TOLERANCE = 2e-5


def save(folder: Path, shape: dict[str, Any], tp: int = 1, pp: int = 1) -> np.ndarray:
    """Saves iter_0000005 of a folder; returns Megatron's logits."""
    (folder / "iter_0000005").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    found = run_ranks(peer.save, tp * pp, str(folder / "iter_0000005"), shape, tp, pp)
    return found[-1]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """Returns a Llama of one rank, which tests copy, and Megatron's logits."""
    folder = tmp_path_factory.mktemp("megatron") / "theirs"
    return folder, save(folder, peer.LLAMA)


def require_logits(folder: Path, output: Path, wanted: np.ndarray) -> None:
    found = import_folder(ImportConfig(str(folder), str(output)))
    assert found.source.title == "Megatron-LM, iter_0000005, torch_dist"
    model = load_unsharded(open_checkpoint(found.folder), torch.device("cpu"), torch.float32)
    with torch.no_grad():
        got = model(peer.tokens(), BatchInfo(torch.arange(2)))
    np.testing.assert_allclose(got.numpy(), wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_logits_are_megatrons_own(saved: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    """Catches layers unstacked in another order, gate and up projections swapped, wrong query groups, and norms that
    are not found because they are named after the projection that follows them."""
    require_logits(saved[0], tmp_path / "run", saved[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "tp", "pp"),
    [(peer.GPT, 1, 1), (peer.LLAMA, 2, 2), (peer.GPT, 4, 1), (peer.PARTIAL, 1, 1), (peer.RELU2, 2, 1)],
    ids=["gpt", "llama-tp2-pp2", "gpt-tp4", "partial", "relu2-tp2"],
)
def test_parts_of_ranks_are_put_together(shape: dict[str, Any], tp: int, pp: int, tmp_path: Path) -> None:
    """Catches shards of ranks put in the wrong place, biases and learned positions that are dropped, the exact GELU or
    a squared ReLU taken for the tanh approximation, and rotary embedding of a part of a head taken for the whole."""
    wanted = save(tmp_path / "theirs", shape, tp, pp)
    require_logits(tmp_path / "theirs", tmp_path / "run", wanted)


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("run.by.a.pickle",))


def _change_args(step: Path, **changes: Any) -> None:
    state = torch.load(step / "common.pt", weights_only=False)
    for name, value in changes.items():
        setattr(state["args"], name, value)
    torch.save(state, step / "common.pt")


def _flip(step: Path) -> None:
    """Flips a bit of a weight, which torch reads without a message."""
    path = max(step.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        ("truncated", CheckpointError, "the file is too short|is damaged|cannot be read"),
        ("a bit", CheckpointError, "is damaged: Bad CRC-32"),
        ("no part", CheckpointError, "__0_0.distcp is missing, which .metadata names"),
        ("damaged metadata", CheckpointError, ".metadata: is not the metadata of a distributed checkpoint"),
        ("metadata that runs", CheckpointError, ".metadata: is not the metadata"),
        ("settings that run", CheckpointError, r"common.pt: .*nothing was run \(posix.mkdir"),
        ("no format", CheckpointError, "metadata.json cannot be read"),
        ("another format", ConfigError, "sharded_backend = 'zarr': megads reads torch_dist"),
        ("more layers", CheckpointError, r"layers\.2\..* missing, which Megatron-LM"),
        ("norms of queries", ConfigError, "qk_layernorm = True"),
        ("experts", ConfigError, "num_experts = 8"),
        ("interpolated", ConfigError, "use_rope_scaling = True"),
    ],
)
def test_bad_folders(
    damage: str,
    error: type[MegadsError],
    told: str,
    saved: tuple[Path, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a pickle that is executed, a flipped bit that is accepted, and an import that leaves a partial run."""
    monkeypatch.chdir(tmp_path)
    step = Path(shutil.copytree(saved[0], tmp_path / "theirs")) / "iter_0000005"
    part, metadata = step / "__0_0.distcp", step / ".metadata"
    damages: dict[str, Any] = {
        "truncated": lambda: part.write_bytes(part.read_bytes()[:-500]),
        "a bit": lambda: _flip(step),
        "no part": part.unlink,
        "damaged metadata": lambda: metadata.write_bytes(metadata.read_bytes()[:-900]),
        "metadata that runs": lambda: metadata.write_bytes(pickle.dumps(_Runs())),
        "settings that run": lambda: torch.save({"args": _Runs()}, step / "common.pt"),
        "no format": (step / "metadata.json").unlink,
        "another format": lambda: (step / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"})),
        "more layers": lambda: _change_args(step, num_layers=3),
        "norms of queries": lambda: _change_args(step, qk_layernorm=True),
        "experts": lambda: _change_args(step, num_experts=8),
        "interpolated": lambda: _change_args(step, use_rope_scaling=True),
    }
    damages[damage]()
    with pytest.raises(error, match=told):
        import_folder(ImportConfig(str(tmp_path / "theirs"), str(tmp_path / "run")))
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_any_metadata_is_read_or_refused(saved: tuple[Path, np.ndarray]) -> None:
    """Catches a damaged pickle that ends in a traceback, or that is executed: every byte is replaced in turn."""
    content = (saved[0] / "iter_0000005" / ".metadata").read_bytes()[:700] + b"."
    for place in range(len(content)):
        for value in (0, ord("R"), ord("."), 255):
            try:
                read_inert(content[:place] + bytes([value]) + content[place + 1 :])
            except ValueError:
                continue


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_pickles_are_read(protocol: int) -> None:
    """Catches a container that one of pickle's protocols encodes differently."""
    value = {"a": [1, 2.5, (None, True), "x" * 300], "b": {"c": b"\x00\x01"}, "d": ((1, 2, 3, 4), -5, 2**40)}
    if protocol < 3:
        value["b"] = {}
    assert read_inert(pickle.dumps(value, protocol)) == value
