"""The Python API of `megads` for runs in a notebook."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megads
from megads.batch import BatchInfo
from megads.config.frozen import freeze, load_frozen
from megads.config.root import RootConfig
from megads.errors import ConfigError
from megads.model.config import BlockConfig
from tests.small_run import TEXTS, hot_model, model_config, write_dataset, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    folder = tmp_path_factory.mktemp("notebook")
    return write_run(folder / "run", write_dataset(folder / "data"), hot_model(model_config()))


def test_import_is_light() -> None:
    """Catches an attribute of megads that is imported with it: tab completion waits for `import megads`."""
    code = (
        "import sys, megads; names = dir(megads); assert 'load_model' in names\n"
        "print([name for name in ('torch', 'deepspeed', 'omegaconf', 'hydra', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.always
def test_every_public_name_is_there() -> None:
    """Catches a name of the public API whose module moved."""
    for name in dir(megads):
        assert getattr(megads, name) is not None, name
    with pytest.raises(AttributeError, match="load_modle"):
        megads.load_modle  # type: ignore[attr-defined]  # noqa: B018


def test_logits_are_the_models_before_and_after_generation(run: Path) -> None:
    """Catches a generation that leaves its caches in the model."""
    loaded = megads.load_model(run, dtype="fp32", device="cpu")
    ids_bs = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with torch.no_grad():
        wanted = hot_model(model_config())(ids_bs, BatchInfo(torch.arange(2)))
    assert wanted.shape == (2, 4, model_config().vocabulary)
    assert torch.equal(loaded.logits(ids_bs), wanted)
    text = loaded.generate(TEXTS[0][:20], max_new_tokens=4, temperature=0)
    assert text == loaded.generate(TEXTS[0][:20], max_new_tokens=4, temperature=0)
    assert torch.equal(loaded.logits(ids_bs.tolist()), wanted)
    assert loaded.step == 3 and loaded.tokenizer.get_vocab_size() <= loaded.model.config.vocabulary
    assert megads.load_model(run, dtype=torch.bfloat16).logits([[1]]).dtype is torch.bfloat16


@pytest.mark.parametrize("ids", [[[10**6]], [[-1]], [1, 2]])
def test_ids_out_of_range_are_refused(run: Path, ids: list) -> None:
    """Catches invalid token ids that raise an IndexError inside the model."""
    with pytest.raises(ConfigError, match="ids_bs"):
        megads.load_model(run, device="cpu").logits(ids)


def test_neither_checkpoints_nor_frozen_configs_import_anything(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches code that is executed because an untrusted run names it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    block = BlockConfig("stranger", {"module": "stranger"})
    config = RootConfig(plugins=["stranger"], hooks={"stranger": {}}, model=model_config(block=block))
    freeze(config, tmp_path / "config.yaml")
    assert load_frozen(tmp_path / "config.yaml") == config
    assert megads.read_config(tmp_path).plugins == ["stranger"]
    model = hot_model(model_config())
    model.config = dataclasses.replace(model.config, block=block)
    strange = write_run(tmp_path / "run", tmp_path / "none", model)
    with pytest.raises(ConfigError, match="there is no model block 'stranger'"):
        megads.load_model(strange)
    assert not (tmp_path / "ran").exists() and "stranger" not in sys.modules
