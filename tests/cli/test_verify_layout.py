"""Tests `megads verify_layout`: with the real ranks, with planted defects, and with configs that cannot be verified."""

from __future__ import annotations

import functools
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megads.cli.main import run
from megads.tools.verify import compare
from tests.command import StartCommand
from tests.test_conf import compose_train

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (REPOSITORY / "conf" / "experiment").glob("*_*.yaml"))
GPU = torch.cuda.is_available()
WITHOUT_GPU = pytest.mark.skipif(GPU, reason="there is a CUDA device")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no CUDA device found")]),
]
SMALL = ("verify.steps=2", "train.precision=fp32", "verify.dir=here")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # The ranks import the defects of this checkout.
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return tmp_path


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes every rank call a function of tests.test_mutants before it does anything else."""

    def planted(name: str) -> None:
        verify = functools.partial(compare.verify, defect=f"tests.test_mutants:{name}")
        monkeypatch.setattr(compare, "verify", verify)

    return planted


@pytest.mark.always
@pytest.mark.distributed
def test_a_correct_layout_passes_and_prints_json_only(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a verification that fails a correct layout, compares nothing, or prints more than JSON."""
    overrides = ("parallel.pp=2", "parallel.dp=2", "model.position=learned", "verify.steps=2", "verify.dir=here")
    documents = ("data.document_mask=true", "data.reset_positions=true")
    assert run(["verify_layout", *overrides, *documents, "train.global_batch_size=4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((elsewhere / "here" / "verify.json").read_text())
    assert said["passed"] and said["likely_cause"] == ""
    checks: list[dict[str, Any]] = said["checks"]
    assert {(c["guarantee"], c["precision"]) for c in checks} == {
        *((name, "fp32") for name in ("N1", "N2", "N3", "N7", "N8", "N9", "N10")),
        *((name, "bf16") for name in ("N1", "N4", "N7", "N8")),
    }
    assert all(c["compared"] > 0 and c["passed"] and c["found"] <= c["bound"] for c in checks)


@pytest.mark.distributed
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "layout",
    [
        "tp=2",
        "cp=2",
        "cp=2 parallel.cp_kind=ulysses",
        "cp=2 parallel.cp_kind=ring",
        "dp=2",
        "pp=2",
        *(f"dp=2 parallel.zero_stage={n}" for n in (2, 3)),
    ],
)
def test_ranks_sharing_a_gpu_train_the_same_model(layout: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches NCCL that refuses ranks which share a GPU, and a layout that trains another model over NCCL. On a CPU it
    shows that the test works."""
    words = (f"verify.device={device}", "cluster.ranks_per_gpu=2", *f"parallel.{layout}".split(), "verify.steps=2")
    assert run(["verify_layout", *words, "verify.dir=here", "ops.impl=torch", "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.distributed
@pytest.mark.quick("llama3_8b", "olmo2_1b")
@pytest.mark.parametrize("experiment", RECIPES)
def test_a_recipe_trains_the_same_model_on_four_ranks(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a recipe whose optimizer, norms, heads or pipeline schedule compute something else in another layout, or
    whose small copy cannot be sharded."""
    config = compose_train(f"experiment={experiment}")
    # Falcon 7B has 71 heads; experts that a recipe divides are divided here, too.
    divided = config.parallel.ep > 1
    tp = 1 if divided or config.model.num_heads % 2 else 2
    layout = (f"parallel.tp={tp}", "parallel.pp=2", f"parallel.dp={2 // tp}", f"parallel.ep={1 + divided}")
    assert run(["verify_layout", f"experiment={experiment}", *layout, *SMALL]) == 0
    assert "This layout trains the same model." in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
def test_verify_phase_verifies_with_the_keys_of_that_phase(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches verify.phase that is ignored, or whose keys do not override those of the config."""
    layout = ("parallel.tp=2", "parallel.pp=2", "parallel.dp=1", "verify.phase=2")
    phases = "train.phases=[{until_steps: 5}, {parallel: {recompute: full}, model: {rope_theta: 70000.0}}]"
    assert run(["verify_layout", "model=tiny_llama", phases, *layout, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "the keys of phase 2 of 2" in shown
    job = json.loads((elsewhere / "here" / "job.json").read_text())
    assert job["parallel"]["recompute"] == "full" and job["scenarios"][0]["model"]["rope_theta"] == 70000.0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_model_with_every_feature_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a small copy of a model with grouped-query attention, a window and gates that cannot be sharded, or lacks
    one of them."""
    grouped = ("model.num_heads=8", "model.num_kv_heads=2", "model.window=100", "model.position=rope")
    gated = ("model.norm=rmsnorm", "model.mlp=swiglu", "model.parallel_block=true")
    assert run(["verify_layout", "parallel.tp=2", "parallel.cp=2", *grouped, *gated, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "num_heads 8 -> 4" in shown and "num_kv_heads" not in shown and "window 100 -> 5" in shown


@pytest.mark.distributed
def test_a_defect_is_named_with_its_parameters(
    plant: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a verdict without the names of the parameters, the likely cause or exit code 7."""
    plant("no_backward_all_reduce_of_column_layers")
    assert run(["verify_layout", "parallel.tp=2", *SMALL]) == 7
    captured = capsys.readouterr()
    for expected in ("loss of step 1 ", "DIFFERS", "gradient of blocks.0.input_norm.weight: off by", "Likely cause: "):
        assert expected in captured.out
    assert "the first wrong gradient is that of final_norm.bias" in captured.out
    assert "megads verify_layout: this layout does not train the same model" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "defect", "layout"),
    [
        ("muon", "owners_orthogonalise_their_own_piece", "parallel.dp=2"),
        ("muon", "owners_orthogonalise_their_own_piece", "parallel.zero_stage=3"),
        ("muon", "tensor_parallel_shares_orthogonalised", "parallel.tp=2"),
        ("muon", "matrices_of_one_parameter_as_one", "parallel.tp=2"),
        ("lamb", "trust_ratio_of_a_part", "parallel.tp=2"),
        ("lamb", "trust_ratio_of_a_part", "parallel.zero_stage=3"),
    ],
)
def test_a_defect_of_an_optimizer_is_named(
    name: str, defect: str, layout: str, plant: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a verification that compares another optimizer than the run's, or does not compare its weights."""
    words = ("verify_layout", f"optim.name={name}", layout, "parallel.dp=2", "train.global_batch_size=8", *SMALL)
    assert run(list(words)) == 0
    plant(defect)
    assert run(list(words)) == 7
    assert "N3 every weight at the end in fp32" in capsys.readouterr().out


SEQUENCE_PARALLEL = ("parallel.tp=2", "parallel.sequence_parallel=true")
SHARED_KEYS = ("parallel.tp=2", "model.num_kv_heads=2", "model.window=5")
REPORTED = {
    "no_sum_of_partial_gradients": (*SEQUENCE_PARALLEL, "model.qk_norm=true"),
    "tokens_summed_over_data_parallel_only": ("parallel.cp=2",),
    "key_and_value_gradients_not_summed_over_context": ("parallel.cp=2",),
    "keys_and_values_in_rank_order": ("parallel.cp=2",),
    "key_gradients_of_one_query_head": SHARED_KEYS,
    "shared_key_gradients_of_one_rank": ("parallel.tp=2", "model.num_kv_heads=1"),
    "averaged_micro_batches": ("parallel.pp=2",),
    "averaged_replicas": ("parallel.dp=2", "train.global_batch_size=8"),
    "loss_of_gathered_logits": ("parallel.tp=2",),
    "sinks_of_the_first_rank_in_the_norm": ("parallel.tp=2", "model.attention_sinks=true"),
    "norm_of_the_own_stage": ("parallel.pp=2",),
    "replicated_parameters_count_on_every_rank": ("parallel.pp=2",),
    "missing_tensor_parallel_mark": ("parallel.tp=2", "parallel.dp=2", "parallel.zero_stage=2"),
    "mean_of_the_ranks_own_means": ("parallel.cp=2",),
    "blocks_numbered_from_the_stage": ("parallel.pp=2", "model.num_layers=3"),
    "a_step_counted_before_the_first": ("parallel.dp=2", "train.global_batch_size=8"),
    "divided_by_the_shards_twice": ("parallel.dp=2", "parallel.zero_stage=3", "train.global_batch_size=8"),
}
"""The defects in docs/notes/numerics.md reported for other trainers, each in a layout in which it can occur."""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("defect", REPORTED)
def test_what_was_reported_of_other_trainers_is_caught(
    defect: str, plant: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a verification that misses a bug that another trainer has had."""
    plant(defect)
    assert run(["verify_layout", *REPORTED[defect], "ops.impl=torch", *SMALL]) == 7
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
def test_ctrl_c_ends_a_verification_and_its_ranks(megads: StartCommand) -> None:
    """Catches ranks that are asked to save and stop, which they cannot, and keep running."""
    command = megads("verify_layout", "parallel.tp=2", *SMALL)
    command.wait_for((megads.folder / "here" / "logs" / "rank_00001.log").exists)
    command.process.send_signal(signal.SIGINT)
    ended = command.end(30)
    assert ended.code == 130 and "killed by a signal" in ended.out


def test_docs_name_the_defects_that_are_planted() -> None:
    """Catches a row of the table of reported bugs whose mutant is not run against `megads verify_layout`."""
    page = (REPOSITORY / "docs" / "notes" / "numerics.md").read_text()
    table, _, _ = page[page.index("Bugs that were reported of other trainers") :].partition("\n## ")
    planted = set(REPORTED) | {"owners_orthogonalise_their_own_piece"}
    assert planted == {name for name in re.findall(r"`([a-z]\w*_\w*)`", table) if name != "verify_layout"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["parallel.tp=3"], "model.num_heads = 4 is not divisible by parallel.tp = 3"),
        (["verify.steps=0"], "verify.steps = 0: must be at least 1"),
        (["parallel.tp=2", "parallel.pp=2", "verify.max_ranks=2"], "need at least 4 ranks; raise it"),
        (["verify.max_rank=2"], "verify.max_rank"),
        (["verify.phase=0"], "verify.phase = 0: must be at least 1"),
        (["verify.phase=2"], "verify.phase = 2: train.phases has none"),
        (["experiment=llama3_8b", "verify.phase=4", "parallel.dp=1"], "verify.phase = 4: train.phases has 3"),
        (["optim.clip_grad=-1"], "optim.clip_grad"),
        (["cluster.ranks_per_gpu=0"], "cluster.ranks_per_gpu = 0: must be at least 1"),
        pytest.param(["verify.device=cuda"], "verify.device = cuda, but torch finds no GPU", marks=WITHOUT_GPU),
    ],
)
def test_unverifiable_configs_are_refused(
    overrides: list[str], expected: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback, and ranks or folders created for a config that cannot be verified."""
    assert run(["verify_layout", *overrides]) == 2
    error = capsys.readouterr().err
    assert expected in error and "Traceback" not in error
    assert not list(elsewhere.iterdir())
