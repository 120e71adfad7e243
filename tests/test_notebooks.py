"""The notebooks of the documentation, in a real kernel."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import TIMEOUT_S, checkpoint_of, events_of, small_model, steps_of

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))
MIME_PICTURE = "image/png"


@pytest.fixture
def jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps kernels and settings of the user's apart: `python3` is this Python."""
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    """Catches outputs of someone's machine, and a cell that is too long to be read at once."""
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert max(len("".join(cell["source"]).splitlines()) for cell in cells) <= 25


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("jupyter")
def test_the_first_model_is_trained_and_inspected(tmp_path: Path) -> None:
    """Catches a cell that fails in a fresh kernel and an empty folder, and progress that no cell shows."""
    import nbformat
    from nbclient import NotebookClient

    (path,) = (path for path in NOTEBOOKS if path.stem == "first-model")
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=1800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [[dict(output) for output in cell.get("outputs", [])] for cell in book.cells]
    (trained,) = (
        shown for cell, shown in zip(book.cells, outputs, strict=True) if "megads.train(" in cell.source and shown
    )
    said = "".join(output.get("text", "") for output in trained)
    assert "starting ranks" in said and "step 250/250 | loss" in said
    assert trained[-1]["data"]["text/plain"] == "run runs/first-model: finished"
    pictures = [shown for shown in outputs if any(MIME_PICTURE in output.get("data", {}) for output in shown)]
    assert len(pictures) == 4, "loss, attention, gradients of the run, gradients of a text"
    assert "BloomForCausalLM differs by" in json.dumps(outputs[-2:])
    validated = [
        line for line in (tmp_path / "runs/first-model/metrics.jsonl").read_text().splitlines() if "valid/" in line
    ]
    last = json.loads(validated[-1])
    assert last["valid/held_out/loss"] < last["valid/held_out/unigram_loss"] - 0.8


@pytest.fixture
def kernel(jupyter: None, tmp_path: Path) -> Iterator[Any]:
    """A kernel whose folder is empty, and its client."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(tmp_path), startup_timeout=TIMEOUT_S)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.distributed
def test_interrupting_the_kernel_saves_and_returns(kernel: Any, corpus: Path, tmp_path: Path) -> None:
    """Catches an interrupt that kills the ranks, which are in the kernel's process group, or ends the kernel."""
    manager, client = kernel
    run_dir = tmp_path / "run"
    overrides = [*small_model(corpus, parallel__dp=2, schedule__name="constant"), f"run.dir={run_dir}"]
    message = client.execute(f"import megads; run = megads.train(*{overrides!r}, 'train.steps=100000')")
    deadline = time.monotonic() + TIMEOUT_S
    while len(steps_of(run_dir)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=TIMEOUT_S)
    while reply["parent_header"]["msg_id"] != message:  # answers to the client's own questions at its start
        reply = client.get_shell_msg(timeout=TIMEOUT_S)
    assert reply["content"]["status"] == "ok", reply["content"]
    last = steps_of(run_dir)[-1]["step"]
    assert checkpoint_of(run_dir, last).exists()
    assert events_of(run_dir, "end")[-1]["stopped"] == "interrupted"
    code = f"assert run.exit_code == 5; run = megads.train(*{overrides!r}, 'train.steps={last + 2}')"
    answer = client.execute_interactive(code, timeout=TIMEOUT_S, output_hook=lambda _message: None)
    assert answer["content"]["status"] == "ok", answer["content"]
    assert [line["step"] for line in steps_of(run_dir)] == list(range(1, last + 3))
