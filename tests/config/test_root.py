"""Tests the root config: validation, run ids, digests and freezing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from megads.config.frozen import (
    config_dict,
    config_digest,
    config_of_start,
    derive_run_id,
    freeze,
    load_frozen,
    record_config,
)
from megads.config.layout_checks import check_layout
from megads.config.root import (
    Precision,
    RootConfig,
    attention_work,
    best_loss_key,
    check_attention,
    check_config,
    planned_steps,
)
from megads.data.config import DatasetConfig
from megads.errors import ConfigError
from megads.model.config import AttentionKind, ModelConfig, NormKind, Position, QKNormWidth
from megads.model.rope_scaling import RopeScaling
from megads.ops.config import Compile, Implementation, OpsConfig
from megads.parallel.config import ContextParallelKind, EngineKind, ParallelConfig
from megads.parallel.schedule import ScheduleName
from megads.runtime.run_dir import recorded_config_path


def good_config(values: Mapping[str, object] = {}) -> RootConfig:
    """A valid config with other values of these keys."""
    config = RootConfig()
    config.train.steps = 10
    config.data.train = [DatasetConfig(path="corpus")]
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        setattr(attrgetter(section)(config) if section else config, name, value)
    return config


ULYSSES, RING = ContextParallelKind.ulysses, ContextParallelKind.ring
BEST = {"checkpoint.keep_best": 1, "checkpoint.every_steps": 4, "evaluation.every_steps": 4}
"""Keeps the best checkpoint, with validation at each."""
RAMP = {"train.batch_ramp.start": 4, "train.batch_ramp.increment": 2, "train.batch_ramp.samples": 100}
"""4 divides 8, but not 4 + 2."""


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({}, "valid/held_out/loss"),
        ({"data.valid": "corpus"}, "valid/held_out/loss"),
        ({"data.valid": {"code": "a", "web": "b"}}, "valid/code/loss"),
        ({"data.valid": {"code": "a", "web": "b"}, "checkpoint.best_by": "web"}, "valid/web/loss"),
        ({"data.train": [DatasetConfig("a/x", 1.0), DatasetConfig("a/y", 2.0)]}, "valid/x/loss"),
        ({"data.train": [], "data.raw": "text"}, "valid/held_out/loss"),
        ({"evaluation.every_steps": 1}, "valid/held_out/loss"),
        ({"evaluation.every_steps": 8}, "valid/held_out/loss"),
        ({"evaluation.every_steps": 40, "checkpoint.every_steps": 20}, "valid/held_out/loss"),
        ({"evaluation.every_steps": 3, "train.steps": 12}, "valid/held_out/loss"),
        ({"evaluation.every_steps": 3, "train.steps": "auto"}, "valid/held_out/loss"),
        ({"checkpoint.keep_best": 0}, None),
    ],
)
def test_checkpoint_best_compares_a_loss_that_the_run_logs(values: dict[str, object], key: str | None) -> None:
    """Catches a validation loss that the metrics log under another name, and refusing a run whose saved and validated
    steps coincide, whose length is not known yet, or that is a short trial of a long one."""
    config = good_config(BEST | values)
    check_config(config)
    assert best_loss_key(config) == key


@pytest.mark.parametrize(
    "values", [{}, {"parallel.sequence_parallel": True, "train.seq_len": 127}, {"train.seq_len": 4096}]
)
def test_valid_configs_pass(values: dict[str, object]) -> None:
    """Catches a check that refuses the defaults, sequence parallelism with tp=1, where it has no effect, or a sequence
    longer than model.max_seq_len without learned positions."""
    check_config(good_config(values))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"train.samples": 100}, "train.samples = 100"),
        ({"train.steps": None}, "none of them is set"),
        ({"train.steps": 0}, "train.steps = 0"),
        ({"train.seed": -1}, "train.seed = -1"),
        ({"parallel.tp": 3}, "model.num_heads = 4"),
        ({"parallel.vocab_multiple": 0}, "parallel.vocab_multiple = 0"),
        (
            {"parallel.tp": 4, "model.num_heads": 24, "model.head_size": 4, "model.num_kv_heads": 6},
            "model.num_kv_heads = 6 neither divides parallel.tp = 4 nor is divisible by it",
        ),
        (
            {"parallel.tp": 4, "model.num_kv_heads": 1, "model.head_size": 9},
            "18 rows of its key and value are not divisible by 4",
        ),
        (
            {
                "parallel.tp": 4,
                "model.num_kv_heads": 2,
                "model.norm": NormKind.rmsnorm,
                "model.qk_norm": True,
                "model.qk_norm_width": QKNormWidth.full,
            },
            "below parallel.tp = 4, which model.qk_norm_width = full does not support",
        ),
        ({"parallel.tp": 4, "model.ffn_size": 130}, "model.ffn_size"),
        (
            {"parallel.tp": 4, "parallel.sequence_parallel": True, "train.seq_len": 126},
            "train.seq_len = 126 is not divisible by parallel.tp = 4",
        ),
        (
            {"parallel.tp": 4, "parallel.cp": 2, "parallel.sequence_parallel": True, "train.seq_len": 132},
            "train.seq_len = 132 is not divisible by parallel.cp",
        ),
        ({"parallel.pp": 3}, "model.num_layers = 2"),
        ({**RAMP, "train.micro_batch_size": 4}, "a step of train.batch_ramp = 6"),
        ({"parallel.dp": 3}, "8"),
        ({"train.micro_batch_size": 3}, "8"),
        ({"model.position": Position.learned, "train.seq_len": 4096}, "model.max_seq_len = 2048"),
        ({"parallel.cp": 3}, "train.seq_len = 128 is not divisible by 2"),
        ({"parallel.cp": 3}, "change train.seq_len to 132, or lower parallel.cp"),
        (
            {
                "parallel.cp": 2,
                "parallel.tp": 2,
                "parallel.cp_kind": ULYSSES,
                "model.num_heads": 6,
                "model.head_size": 8,
            },
            "over parallel.cp = 2 ranks, which does not divide them: change parallel.cp to a divisor of 3, or use "
            "parallel.cp_kind=allgather",
        ),
        (
            {"parallel.cp": 2, "parallel.cp_kind": ULYSSES, "model.num_heads": 1},
            "a tensor-parallel rank, 1, over parallel.cp = 2 ranks, which does not divide them: use parallel.cp_kind",
        ),
        ({"model.position": Position.rope, "model.hidden_size": 60}, "a head has 15 features"),
        ({"model.rope_scaling.kind": RopeScaling.yarn}, "rope_scaling.kind = yarn scales rope's angles"),
        ({"model.rope_scaling.factor": 0.5}, "model.rope_scaling.factor = 0.5"),
        ({"model.rope_scaling.attention_factor": -1.0}, "model.rope_scaling.attention_factor = -1.0: must be positive"),
        (
            {"model.position": Position.rope, "model.rope_scaling.kind": RopeScaling.longrope},
            "model.rope_scaling.short_factor has 0 numbers: want one number for each",
        ),
        (
            {"model.position": Position.rope, "model.rope_scaling.long_factor": [1.0]},
            "long_factor has 1 numbers: only applies with model.rope_scaling.kind=longrope",
        ),
        ({"model.rope_scaling.beta_slow": 32.0}, "beta_slow = 32.0, beta_fast = 32.0: want 0 < beta_slow"),
        ({"model.attention": AttentionKind.fused}, "ops.impl = auto"),
        ({"model.attention": AttentionKind.augmented, "train.precision": Precision.fp32}, "bf16"),
        ({"model.attention": AttentionKind.augmented, "data.document_mask": True}, "document_mask"),
        ({"model.attention": AttentionKind.augmented, "model.window": 9}, "window = 9"),
        ({"model.attention": AttentionKind.fused_softmax}, "model.attention = fused_softmax needs"),
        (
            {"model.attention": AttentionKind.augmented, "model.attention_dropout": 0.1},
            "model.attention_dropout = 0.1",
        ),
        (
            {"optim.impl": Implementation.apex, "parallel.zero_stage": 3, "parallel.dp": 2},
            "optim.impl = apex is not supported with engine = auto, which is deepspeed for parallel.zero_stage = 3",
        ),
        (
            {"ops.compile": Compile.blocks, "parallel.zero_stage": 3, "parallel.dp": 2},
            "ops.compile = blocks is not supported with parallel.zero_stage = 3",
        ),
        (
            {"engine": EngineKind.deepspeed, "parallel.schedule": ScheduleName.zb_h1},
            "parallel.schedule = zb_h1 is not supported with engine = deepspeed",
        ),
        ({"deepspeed": {"dump_state": True}}, "deepspeed.dump_state only applies to engine=deepspeed"),
        (
            {"ops.cuda_graphs": True, "parallel.pp": 2},
            "is not supported with parallel.pp = 2: a micro-batch is captured",
        ),
        ({"ops.cuda_graphs": True, "parallel.tp": 2}, "set parallel.tp=1, or ops.cuda_graphs=false"),
        (
            {"ops.cuda_graphs": True, "parallel.zero_stage": 2, "parallel.dp": 2},
            "parallel.zero_stage = 2",
        ),
        (
            {"ops.cuda_graphs": True, "parallel.dp": 2, "parallel.overlap_param_gather": True},
            "ops.cuda_graphs = true is not supported with parallel.overlap_param_gather = true",
        ),
        ({"ops.cuda_graphs": "on"}, "ops.cuda_graphs = on: use true, false or auto"),
        ({"ops.loss_chunk": 0}, "ops.loss_chunk = 0: must be at least 1 token"),
        ({"model.rope_theta": 0.0}, "model.rope_theta = 0.0"),
        ({"run.id": "../elsewhere"}, "run.id"),
        ({"logging.every_steps": 0}, "logging.every_steps = 0"),
        ({"checkpoint.keep": -1}, "checkpoint.keep = -1"),
        ({"checkpoint.keep_every": -5}, "checkpoint.keep_every = -5"),
        ({"checkpoint.keep_best": -1}, "checkpoint.keep_best = -1"),
        ({"checkpoint.keep": 0, "checkpoint.keep_every": 4}, "checkpoint.keep = 0 keeps all"),
        ({"checkpoint.keep": 0, "checkpoint.keep_best": 4}, "checkpoint.keep = 0 keeps all"),
        ({"checkpoint.every_steps": 4, "checkpoint.keep_every": 10}, "use 12, for example"),
        ({"checkpoint.best_by": "held_out"}, "best_by = held_out only applies with checkpoint.keep_best"),
        ({**BEST, "evaluation.every_steps": 0}, "validates at the end only: set evaluation.every_steps to"),
        (
            {**BEST, "evaluation.every_steps": 0, "evaluation.at_end": False},
            "validates never: set evaluation.every_steps to checkpoint.every_steps = 4",
        ),
        ({**BEST, "checkpoint.every_steps": 0}, "checkpoint.every_steps = 0 saves by time and at the end"),
        ({**BEST, "evaluation.every_steps": 3}, "step 12 is the first that is both saved and validated, and"),
        ({**BEST, "data.split": [1.0, 0.0]}, "data.split = "),
        (
            {**BEST, "checkpoint.best_by": "web"},
            "is not a validation set of this run, which has held_out: choose",
        ),
        (
            {**BEST, "data.valid": {"code": "a", "web": "b"}, "checkpoint.best_by": "held_out"},
            "which has code, web: choose",
        ),
    ],
)
def test_bad_configs_are_refused_with_the_value(values: dict[str, object], named: str) -> None:
    """Catches a config that would fail minutes later on the ranks, and an error message without the value."""
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        check_config(good_config(values))


@pytest.mark.parametrize(
    ("tp", "cp", "kv_heads", "expected"),
    [(1, 2, 4, (4, 2)), (1, 2, 1, (4, 1)), (2, 4, 2, (1, 1)), (2, 2, 8, (2, 2)), (4, 2, 2, (1, 1))],
)
def test_attention_after_an_all_to_all_has_fewer_heads_of_whole_samples(
    tp: int, cp: int, kv_heads: int, expected: tuple[int, int]
) -> None:
    """Catches kernels that are tried, or refused, for queries of two chunks, or for all heads of a rank."""
    heads = {"model.num_heads": 8, "model.num_kv_heads": kv_heads, "model.head_size": 8}
    config = good_config({"parallel.tp": tp, "parallel.cp": cp, "parallel.cp_kind": ULYSSES, **heads})
    check_config(config)
    work = attention_work(config, config.model)
    assert (work.heads, work.kv_heads) == expected and work.context == 1
    gathered = attention_work(good_config({"parallel.tp": tp, "parallel.cp": cp, **heads}), config.model)
    assert (gathered.heads, gathered.context) == (8 // tp, cp)
    two_level = {"parallel.tp": tp, "parallel.cp": 2 * cp, "parallel.cp_ulysses": cp, **heads}
    work = attention_work(good_config(two_level | {"parallel.cp_kind": RING}), config.model)
    assert (work.heads, work.kv_heads) == expected and (work.context, work.ring) == (2, True)


@pytest.mark.parametrize("kind", [ULYSSES, RING])
def test_heads_of_a_plugins_block_are_not_exchanged(kind: ContextParallelKind) -> None:
    """Catches a plugin's attention core that is told to keep a share of heads that it may not have, or to attend to a
    block of keys."""
    model = ModelConfig()
    model.block.name = "own"
    with pytest.raises(ConfigError, match=r"not supported with model\.block\.name = own: .*cp_kind=allgather"):
        check_layout(model, ParallelConfig(cp=2, cp_kind=kind), 64)
    with pytest.raises(ConfigError, match=r"cp_ulysses = 2 is not supported with .*; use parallel\.cp_ulysses=1"):
        check_layout(model, ParallelConfig(cp=4, cp_ulysses=2), 64)
    with pytest.raises(ConfigError, match="there is no model block 'own'"):
        check_layout(model, ParallelConfig(cp=2, cp_kind=ContextParallelKind.auto), 64)


def test_a_ring_takes_no_kernel_for_all_keys() -> None:
    """Catches an explicit kernel that is silently replaced, one that is refused although there is no ring, and model
    features that are refused although the ring has them."""
    ring = {"parallel.cp": 2, "parallel.cp_kind": RING}
    for kind in set(AttentionKind) - {AttentionKind.auto, AttentionKind.sdpa}:
        with pytest.raises(ConfigError, match=rf"model\.attention = {kind} .*parallel\.cp_kind = ring .*=allgather"):
            check_attention(good_config({**ring, "model.attention": kind}))
    check_attention(good_config({**ring, "parallel.cp": 1, "model.attention": AttentionKind.flex}))
    features = {"model.window": 5, "model.attention_dropout": 0.1, "model.attention_logit_softcap": 30.0}
    check_attention(good_config({**ring, **features, "data.document_mask": True}))


def test_ulysses_takes_kernels_of_whole_samples() -> None:
    """Catches a kernel for queries in order that is refused although the all-to-all has put them in order."""
    wanted = {"model.attention": AttentionKind.augmented, "model.position": Position.alibi, "parallel.cp": 2}
    check_attention(good_config({**wanted, "parallel.cp_kind": ULYSSES}))
    with pytest.raises(ConfigError, match=r"2 context-parallel ranks: set parallel\.cp=1"):
        check_attention(good_config(wanted))


def test_a_length_in_samples_or_tokens_is_rounded_down_to_steps() -> None:
    """Catches a length that counts tokens as samples, or is rounded up beyond the requested tokens."""
    assert planned_steps(good_config({"train.steps": None, "train.tokens": 128 * 8 * 5 + 127})) == 5


def test_run_id_ignores_how_and_where_but_not_what() -> None:
    """Catches a run id that depends on logging, length or kernels, and one that ignores layout, seed or optimizer."""
    base = derive_run_id(good_config(), "x")
    same: dict[str, object] = {
        "train.steps": 99, "logging.every_steps": 7, "checkpoint.every_steps": 3, "cluster.threads_per_rank": 1,
        "run.dir": "elsewhere", "ops.impl": Implementation.torch, "optim.impl": Implementation.torch,
        "model.attention": AttentionKind.sdpa,
    }  # fmt: skip
    for path, value in same.items():
        assert derive_run_id(good_config({path: value}), "x") == base, path
    for path, value in {"parallel.pp": 2, "train.seed": 1, "optim.lr": 1e-3, "optim.options": {"beta": 1}}.items():
        assert derive_run_id(good_config({path: value}), "x") != base, path
    watched = dataclasses.replace(good_config(), plugins=["own"], hooks={"echo": {}})
    assert derive_run_id(watched, "x") == base
    assert base.startswith("x-") and len(base) == 10


def test_a_new_key_renames_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a new version whose new keys, left at their defaults, change the run id of the same command."""
    base = derive_run_id(good_config(), "x")

    def with_new_key(config: Any) -> dict[str, Any]:
        content = config_dict(config)
        content["optim"]["new"] = {"key": None}
        return content

    monkeypatch.setattr("megads.config.frozen.config_dict", with_new_key)
    assert derive_run_id(good_config(), "x") == base


def test_freeze_round_trip_is_exact(tmp_path: Path) -> None:
    """Catches floats that lose digits and enums read back as strings: the ranks would compute another digest."""
    config = good_config()
    config.optim.lr, config.optim.eps, config.model.init_std = 0.1 + 0.2, 1e-8, 1 / 3
    config.train.tokens = 450_000_000_000
    freeze(config, tmp_path / "config.yaml")
    loaded = load_frozen(tmp_path / "config.yaml")
    assert loaded == config
    assert config_digest(loaded) == config_digest(config)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{after}: &{after} [{', '.join(['*' + before] * 10)}]" for before, after in itertools.pairwise("abcdefghij")
)


@pytest.mark.parametrize(
    "text", ["model: {layers: 3}", "model: {num_layers: many}", "model: [", "", "run: {id: '${oc.env:HOME}'}", BOMB]
)
def test_a_file_of_another_schema_is_refused(tmp_path: Path, text: str) -> None:
    """Catches a rank that trains with defaults instead of refusing a damaged or foreign file, that interpolates
    environment variables into it, or that exhausts its memory on ten lines of nested YAML aliases."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_frozen(path)


def test_every_field_is_in_the_digest() -> None:
    """Catches a digest that omits a section."""
    digests = {config_digest(good_config())}
    for section in dataclasses.fields(RootConfig):
        config = good_config()
        part = getattr(config, section.name)
        if isinstance(part, OpsConfig):  # has no numeric field
            part.impl = Implementation.torch
        elif isinstance(part, list):
            part.append("x")
        elif isinstance(part, dict):
            part["x"] = 1
        elif isinstance(part, EngineKind):
            config.engine = EngineKind.native
        else:
            names = (f.name for f in dataclasses.fields(part) if isinstance(getattr(part, f.name), int | float | None))
            setattr(part, next(names), 987)
        digests.add(config_digest(config))
    assert len(digests) == 1 + len(dataclasses.fields(RootConfig))


def test_the_config_of_an_earlier_start_is_found_again(tmp_path: Path) -> None:
    """Catches a lookup of an old start's config that returns the newest one, or fails because a key was added since."""
    first, second = RootConfig(), RootConfig()
    first.train.steps, second.train.steps = 7, 9
    for config in (first, second):
        record_config(config, tmp_path)
    assert config_of_start(tmp_path, config_digest(first)) == first
    assert config_of_start(tmp_path, config_digest(second)) == load_frozen(tmp_path / "config.yaml") == second
    assert config_of_start(tmp_path, "0" * 64) is None
    kept = recorded_config_path(tmp_path, config_digest(first))
    kept.write_text(kept.read_text().replace("  prefetch_steps: 2\n", ""))
    assert config_of_start(tmp_path, config_digest(first)) == first
    with pytest.raises(ConfigError, match="keys are missing"):
        load_frozen(kept)
