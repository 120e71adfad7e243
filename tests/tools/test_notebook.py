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


def table() -> megads.MetricsTable:
    lines = [{"step": step, "loss": step / 3, "batch_hash": f"<{step}>"} for step in range(1, 13)]
    lines[3:3] = [{"step": 3, "valid/a&b/loss": 4.0}]
    return megads.MetricsTable.of_lines([*lines, {"step": 12, "valid/a&b/loss": float("nan")}])


def test_metrics_are_a_row_per_step() -> None:
    """Catches a validation in a row of its own, which would tear the curve of the loss."""
    metrics = table()
    assert metrics.columns == ["step", "loss", "batch_hash", "valid/a&b/loss"] and len(metrics) == 12
    assert metrics["step"] == list(range(1, 13)) and metrics["loss"][2] == 1.0
    assert metrics["valid/a&b/loss"][:4] == [None, None, 4.0, None]
    validated = metrics[["step", "valid/a&b/loss"]].dropna()
    assert validated["step"] == [3, 12] and validated.columns == ["step", "valid/a&b/loss"]
    assert metrics.tail(2).to_dict()["step"] == [11, 12] and metrics.tail(20)["step"] == metrics["step"]
    assert len(metrics.tail(0)) == 0 and len(megads.MetricsTable.of_lines([])) == 0
    with pytest.raises(KeyError, match="lossy; the columns are step, loss"):
        metrics["lossy"]


def test_a_table_is_shown_as_text_and_in_a_notebook() -> None:
    """Catches markup of a text in a cell, and all rows of a long run in a notebook."""
    text, page = repr(table()), table()._repr_html_()
    assert text.splitlines()[0].split() == ["step", "loss", "batch_hash", "valid/a&b/loss"]
    assert text.splitlines()[1].split() == ["3", "1", "<3>", "4"] and text.endswith("12 rows, 4 columns; the last 10")
    assert page.count("<tr>") == 11 and "<td>&lt;12&gt;</td>" in page and "valid/a&amp;b/loss" in page
    assert repr(megads.MetricsTable.of_lines([])).strip() == "0 rows, 0 columns"
    wide = megads.MetricsTable({f"a_rather_long_column_{number}": [1.0] for number in range(9)})
    assert all(len(line) <= 120 and line.endswith("...") for line in repr(wide).splitlines()[:2])


def test_a_table_becomes_a_data_frame() -> None:
    """Catches missing values that turn a column of numbers into objects."""
    pytest.importorskip("pandas")
    frame = table().to_pandas()
    assert frame.index.name == "step" and list(frame.index) == list(range(1, 13))
    assert frame["valid/a&b/loss"].dtype == float and frame["valid/a&b/loss"].count() == 1


def test_a_handle_opens_an_earlier_run(run: Path) -> None:
    """Catches a handle that works for a run that was just trained only."""
    handle = megads.RunHandle(run)
    assert handle.exit_code is None and repr(handle) == f"run {run}" and Path(handle) == run
    assert handle.checkpoint is not None and handle.checkpoint.parent.parent == run
    assert handle.load_model(device="cpu").step == 3 and len(handle.metrics) == 0
