"""`megads compare` on ledgers as training leaves them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megads
from megads.cli.main import run as run_command
from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.errors import ConfigError, DataError
from megads.runtime.run_dir import CONFIG_FILE, DATA_FILE, METRICS_FILE
from megads.tools.compare.comparison import REFERENCE_FILE, Comparison, compare, find_reference
from megads.tools.compare.config import CompareConfig
from megads.tools.compare.output import as_json, as_text, verdict

STEPS = 40
Change = Callable[[dict[str, Any]], None]


def nothing(_: dict[str, Any]) -> None: ...


def write_run(folder: Path, change: Change = nothing, steps: int = STEPS, config: RootConfig | None = None) -> Path:
    """Writes the ledger and the config of a run; `change` alters each of its lines."""
    folder.mkdir()
    with (folder / METRICS_FILE).open("w") as ledger:
        for step in range(1, steps + 1):
            line = {"step": step, "loss": 7.0 - step / 10, "grad_norm": 1.0 + step / 7, "lr": step * 1e-4}
            lines = [line | {"batch_hash": f"{step:016x}"}]
            if step % 20 == 0:
                lines.append({"step": step, "valid/held_out/loss": 7.1 - step / 10})
            for record in lines:
                change(record)
                ledger.write(json.dumps(record) + "\n")
    freeze(config or RootConfig(), folder / CONFIG_FILE)
    return folder


def add_to(key: str, relative: float, first: int) -> Change:
    """A change of a quantity by a relative difference, from a step on."""

    def change(record: dict[str, Any]) -> None:
        if key in record and record["step"] >= first:
            record[key] *= 1 + relative

    return change


def compared(run: Path, reference: Path, **keys: Any) -> Comparison:
    return compare(CompareConfig(run=str(run), reference=str(reference), **keys))


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write_run(tmp_path / "reference")


def test_a_run_equals_itself(reference: Path, tmp_path: Path) -> None:
    """Catches a comparison that finds differences where there are none, or compares nothing."""
    found = compared(write_run(tmp_path / "run"), reference)
    assert found.is_within and found.left is None and not found.trains and not found.rounds
    counts = {item.name: (item.count, item.largest) for item in found.quantities}
    assert counts == {"loss": (40, 0), "grad_norm": (40, 0), "lr": (40, 0), "valid/held_out/loss": (2, 0)}
    assert "within the tolerance" in as_text(found)


@pytest.mark.parametrize(
    ("key", "relative", "within"),
    [
        ("loss", 0.9e-5, True),
        ("loss", -1.1e-5, False),
        ("grad_norm", 0.9e-4, True),
        ("grad_norm", 1.1e-4, False),
        ("lr", 1e-8, False),
    ],
)
def test_a_shifted_value_is_found_at_its_step(
    reference: Path, tmp_path: Path, key: str, relative: float, within: bool
) -> None:
    """Catches a tolerance that is not relative, an unsigned difference, and a step that is off by one."""
    found = compared(write_run(tmp_path / "run", add_to(key, relative, first=17)), reference)
    assert found.is_within is within
    if not within:
        assert found.left is not None and (found.left.quantity, found.left.step) == (key, 17)
        assert found.left.found == pytest.approx(found.left.wanted * (1 + relative), rel=1e-12)
        assert f"at step 17: {key} is" in verdict(found)


def test_the_first_departure_of_all_quantities_is_named(reference: Path, tmp_path: Path) -> None:
    """Catches a verdict about the loss where the gradient norm left earlier, and a validation that is not compared."""

    def change(record: dict[str, Any]) -> None:
        add_to("loss", 1e-3, first=30)(record)
        add_to("valid/held_out/loss", 1e-3, first=20)(record)

    found = compared(write_run(tmp_path / "run", change), reference)
    assert found.left is not None and (found.left.quantity, found.left.step) == ("valid/held_out/loss", 20)
    lefts = {item.name: item.left and item.left.step for item in found.quantities}
    assert lefts == {"loss": 30, "grad_norm": None, "lr": None, "valid/held_out/loss": 20}


def test_the_tolerance_of_a_reference_depends_on_the_step(reference: Path, tmp_path: Path) -> None:
    """Catches one tolerance for all steps, which is too wide at the beginning or too narrow at the end."""
    record = {"machine": "a processor", "tolerance": {"loss": [[1, 1e-6], [10, 1e-3]], "grad_norm": [[1, 1.0]]}}
    (reference / REFERENCE_FILE).write_text(json.dumps(record))
    late, early = (write_run(tmp_path / f"from{first}", add_to("loss", 5e-4, first)) for first in (10, 9))
    assert compared(late, reference).is_within
    found = compared(early, reference)
    assert found.left is not None and (found.left.step, found.left.allowed) == (9, 1e-6)
    assert found.machine == "a processor"
    assert compared(early, reference, loss_tolerance=1e-3).is_within, "a given tolerance takes precedence"
    (reference / REFERENCE_FILE).write_text('{"tolerance": {"loss": 3}}')
    with pytest.raises(DataError, match=r"no tolerance\.loss"):
        compared(late, reference)


def test_a_shorter_run_is_compared_as_far_as_it_goes(reference: Path, tmp_path: Path) -> None:
    """Catches a short run that is refused, or whose missing end counts as a difference."""
    found = compared(write_run(tmp_path / "run", steps=7), reference)
    assert found.is_within and len(found.steps) == 7 and found.planned == STEPS
    assert "7 steps, 1 to 7, of the reference's 40" in as_text(found)


def test_a_loss_that_is_not_finite_is_outside(reference: Path, tmp_path: Path) -> None:
    """Catches a NaN that compares as not larger than the tolerance."""

    def change(record: dict[str, Any]) -> None:
        if record["step"] >= 12 and "loss" in record:
            record["loss"] = math.nan

    found = compared(write_run(tmp_path / "run", change), reference)
    assert found.left is not None and found.left.step == 12 and math.isnan(found.left.found)
    assert compared(tmp_path / "run", tmp_path / "run").is_within, "NaN on both sides is the same"
    everywhere = write_run(tmp_path / "all", lambda record: record.update(loss=math.nan) if "loss" in record else None)
    lost = compared(everywhere, reference)
    assert lost.left is not None and (lost.left.quantity, lost.left.step) == ("loss", 1)
    with pytest.raises(ConfigError, match="no finite loss"):
        compared(reference, everywhere)


def test_other_samples_are_outside_even_with_equal_losses(reference: Path, tmp_path: Path) -> None:
    """Catches a run on other samples that counts as within: its losses may be as close by chance."""

    def change(record: dict[str, Any]) -> None:
        if record["step"] >= 23 and "batch_hash" in record:
            record["batch_hash"] = "0" * 16

    found = compared(write_run(tmp_path / "run", change), reference)
    assert found.other_samples == 23 and found.left is None and not found.is_within
    assert "other samples" in verdict(found) and "step 23" in verdict(found)


def test_differing_keys_are_sorted_by_their_effect(reference: Path, tmp_path: Path) -> None:
    """Catches a learning rate among keys that change rounding, and the folder of a run among the differences."""
    config = RootConfig()
    config.optim.lr, config.parallel.tp, config.run.id, config.checkpoint.every_steps = 1e-2, 2, "other", 7
    config.checkpoint.init_from = "runs/other"
    found = compared(write_run(tmp_path / "run", add_to("loss", 0.1, 5), config=config), reference)
    assert found.trains == {"optim.lr": (3e-4, 1e-2), "checkpoint.init_from": (None, "runs/other")}
    assert found.rounds == {"parallel.tp": (1, 2)}
    assert "optim.lr: 0.0003 -> 0.01" in as_text(found)


def test_other_data_is_named(reference: Path, tmp_path: Path) -> None:
    """Catches a comparison of runs on other text, or with another tokenizer, without a word about it."""
    run = write_run(tmp_path / "run", add_to("loss", 0.1, 1))
    for folder, content in ((reference, "a"), (run, "b")):
        record = {"datasets": [{"path": str(folder), "content": content}], "tokenizer": {"sha256": content}}
        (folder / DATA_FILE).write_text(json.dumps(record))
    assert compared(run, reference).data == ("the tokenizer is another one", "the datasets have other tokens")
    (run / DATA_FILE).write_text((reference / DATA_FILE).read_text())
    assert compared(run, reference).data == ()


def test_an_installed_megads_has_its_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches references that are found in the folder of a checkout only."""
    monkeypatch.chdir(tmp_path)
    assert find_reference("bloom").samefile(Path(megads.__file__).parents[1] / "docs" / "runs" / "bloom")
    references = tmp_path / "site-packages" / "megads" / "docs" / "runs"
    references.mkdir(parents=True)
    reference = write_run(references / "small")
    monkeypatch.setattr(megads, "__file__", str(tmp_path / "site-packages" / "megads" / "__init__.py"))
    assert find_reference("small") == reference


def test_a_ledger_with_missing_steps_is_refused(reference: Path, tmp_path: Path) -> None:
    """Catches a verdict about a run whose ledger lost the steps in which it left the reference."""
    run = write_run(tmp_path / "run")
    lines = (run / METRICS_FILE).read_text().splitlines(keepends=True)
    (run / METRICS_FILE).write_text("".join(['{"step": 5, "lo\n' if '"step": 5,' in line else line for line in lines]))
    with pytest.raises(DataError, match=r"lacks 1 steps .* the first is 5 and has 1 unreadable lines"):
        compared(run, reference)
    # After a resume the step is repeated.
    with (run / METRICS_FILE).open("a") as ledger:
        ledger.write(lines[4])
    found = compared(run, reference)
    assert found.is_within and "1 lines of the run's files are unreadable" in found.notes[0]


def test_what_cannot_be_compared_is_refused(reference: Path, tmp_path: Path) -> None:
    """Catches a traceback, or a verdict, where there is no run, no reference, or no step in common."""
    later = write_run(tmp_path / "later", lambda record: record.update(step=record["step"] + 100))
    with pytest.raises(ConfigError, match="no step in common: steps 101 to 140 and steps 1 to 40"):
        compared(later, reference)
    with pytest.raises(ConfigError, match="no such run directory"):
        compared(tmp_path / "missing", reference)
    with pytest.raises(ConfigError, match="neither a reference nor a run has this name"):
        compared(later, Path("missing"))
    (reference / METRICS_FILE).write_text("")
    with pytest.raises(ConfigError, match="has no step yet"):
        compared(later, reference)
    with pytest.raises(ConfigError, match="loss_tolerance = nan"):
        CompareConfig(run="a", reference="b", loss_tolerance=math.nan).check()


@pytest.mark.always
def test_the_command_has_documented_exit_codes(
    reference: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches a script that takes a run outside of the tolerance for one within it, and JSON that lacks the verdict."""
    within, outside = write_run(tmp_path / "in"), write_run(tmp_path / "out", add_to("loss", 1e-3, 9))
    assert run_command(["compare", f"run={within}", f"reference={reference}"]) == 0
    assert "within the tolerance" in capfd.readouterr().out
    assert run_command(["compare", f"run={outside}", f"reference={reference}", "--json"]) == 7
    printed = capfd.readouterr()
    answer = json.loads(printed.out)
    assert answer["within"] is False and answer["left"]["step"] == 9 and answer["steps"] == STEPS
    assert "leaves" in printed.err and "at step 9" in printed.err
    assert json.loads(as_json(compared(within, reference)))["left"] is None
    assert run_command(["compare", f"run={within}", "reference=nowhere"]) == 2
