"""Training phases from the config: their boundaries, the config of each phase, and rejected settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megads.config.frozen import derive_run_id
from megads.config.identity import changed_keys
from megads.config.phases import check_skips, parse_phases, phase_stream_starts, with_mixes
from megads.config.root import (
    RootConfig,
    batch_size_schedule,
    check_config,
    config_at,
    learning_rate,
    phase_config,
    planned_steps,
    run_spans,
)
from megads.data.config import DatasetConfig, SkipConfig
from megads.data.sampling.sampler import skips_of
from megads.errors import ConfigError
from megads.model.config import LayerKind, Position
from megads.parallel.config import Recompute
from tests.corpus import VOCAB_SIZE

PHASES: list[Any] = [
    {"until_tokens": 1300, "train": {"seq_len": 16, "global_batch_size": 4}},
    {"until_samples": 200, "train": {"seq_len": 32}, "parallel": {"recompute": "full"}},
    {"until_steps": 60, "train.global_batch_size": 8},
    {"schedule": {"name": "linear"}, "optim": {"min_lr": 0.0}, "weights": [1, 3]},
]


def phased(phases: list[Any] | None = None, **train: Any) -> RootConfig:
    """A small run of 80 steps with phases."""
    config = RootConfig()
    config.model.vocab_size = VOCAB_SIZE
    config.data.train = [DatasetConfig("a", 1.0), DatasetConfig("b", 1.0)]
    config.schedule.warmup_samples = 20
    config.optim.lr, config.optim.min_lr = 1e-3, 1e-4
    values = {"steps": 80, "global_batch_size": 6, "micro_batch_size": 2, "seq_len": 8} | train
    config.train = replace(config.train, phases=PHASES if phases is None else phases, **values)
    return config


def test_phases_lie_end_to_end_in_whole_steps() -> None:
    """Catches an end that is counted from the beginning of its phase, rounded up, or computed with another phase's
    sequence length, and a change that later phases do not inherit."""
    config = phased()
    check_config(config)
    found = [(s.first_step, s.first_sample, s.first_token, s.global_batch_size, s.seq_len) for s in run_spans(config)]
    assert found == [(0, 0, 0, 4, 16), (20, 80, 1280, 4, 32), (50, 200, 5120, 8, 32), (60, 280, 7680, 8, 32)]
    batches = batch_size_schedule(config)
    assert [batches.at(sample) for sample in (0, 79, 80, 196, 200, 440)] == [4, 4, 4, 4, 8, 8]
    assert [batches.samples_after(step) for step in (0, 20, 50, 51, 80)] == [0, 80, 200, 208, 440]
    assert [batches.steps_for(sample) for sample in (79, 80, 207, 208, 440)] == [19, 20, 50, 51, 80]


@pytest.mark.parametrize(
    ("unit", "length", "steps"),
    [("steps", 80, 80), ("steps", 30, 30), ("samples", 440, 80), ("samples", 207, 50), ("tokens", 12800, 80),
     ("tokens", 1281, 20), ("tokens", 5375, 50), ("tokens", 5376, 51)],
)  # fmt: skip
def test_the_length_of_a_run_counts_all_phases(unit: str, length: int, steps: int) -> None:
    """Catches a length divided by the batch or sequence length of one phase. A run may end before its last phase."""
    config = phased(**{"steps": None, unit: length})
    check_config(config)
    assert planned_steps(config) == steps
    assert planned_steps(phase_config(config, 2)) == steps


def test_the_config_of_a_phase_is_that_of_the_run_with_its_changes() -> None:
    """Catches a phase that loses the changes of an earlier one, a phase config with other phase boundaries, and a phase
    that begins a step too early or too late."""
    config = phased()
    places = (0, 79, 80, 199, 200, 280, 1000)
    parts = [config_at(config, samples) for samples in places]
    assert [part.train.seq_len for part in parts] == [16, 16, 32, 32, 32, 32, 32]
    assert [part.train.global_batch_size for part in parts] == [4, 4, 4, 4, 8, 8, 8]
    full = [part.parallel.recompute is Recompute.full for part in parts]
    assert full == [False, False, True, True, True, True, True]
    for part in parts:
        assert run_spans(part) == run_spans(config)
        assert config_at(part, 0) == config_at(config, 0)
        samples = range(1, 441, 7)
        assert [*map(learning_rate(part), samples)] == [*map(learning_rate(config), samples)]
        check_config(part)


def test_a_run_without_phases_keeps_its_name() -> None:
    """Catches phases that do not change the run id, and a run without phases whose config is replaced."""
    config = phased([])
    assert derive_run_id(config, "x") != derive_run_id(phased(), "x")
    assert "phases" not in str(run_spans(config)) and config_at(config, 5) is config


def test_a_schedule_of_its_own_begins_where_the_rate_was() -> None:
    """Catches a phase's schedule that counts from the beginning of the run, restarts at optim.lr, does not end with the
    run, or changes the learning rates before it."""
    rate, without = learning_rate(phased()), learning_rate(phased([*PHASES[:3], {}]))
    assert [rate(sample) for sample in (20, 150, 280)] == [without(sample) for sample in (20, 150, 280)]
    assert rate(20) == pytest.approx(1e-3) and without(440) == pytest.approx(1e-4)
    assert rate(360) == pytest.approx(without(280) / 2) and rate(440) == 0.0
    own = [*PHASES[:3], {"schedule": {"name": "constant", "warmup_steps": 5}, "optim": {"lr": 2e-3}}]
    rate = learning_rate(phased(own))
    assert rate(280) == without(280) and rate(280 + 20) == pytest.approx(1e-3) and rate(280 + 40) == rate(440) == 2e-3
    one = learning_rate(phased([*PHASES[:2], {"train": {"global_batch_size": 8}}]))
    assert one(280) > 1e-4 and one(200 + 8 * 30) == pytest.approx(1e-4)


def test_a_later_schedule_takes_the_place_of_the_one_before() -> None:
    """Catches a phase's schedule that is ignored after an earlier one, or begins at another learning rate."""
    phases = [
        {"until_steps": 10},
        {"until_steps": 20, "schedule": {"name": "linear"}, "optim": {"lr": 1e-3, "min_lr": 5e-4}},
        {"schedule": {"name": "linear"}, "optim": {"min_lr": 1e-4}},
    ]
    rate = learning_rate(phased(phases, steps=30))
    assert [rate(sample) for sample in (90, 120, 150, 180)] == pytest.approx([8.75e-4, 7.5e-4, 4.25e-4, 1e-4])


def test_warmups_and_decays_in_tokens_count_all_phases() -> None:
    """Catches tokens divided by the sequence length of one phase."""
    config = phased([*PHASES[:3], {}])
    config.schedule.warmup_tokens, config.schedule.decay_tokens = 1280 + 33, 7680 + 32
    rate = learning_rate(config)
    assert (rate.warmup, rate.end) == (82, 281)


@pytest.mark.parametrize(
    ("phases", "train", "text"),
    [
        ([{"until_steps": 5, "optim": {"name": "lamb"}}, {}], {}, "phases[0] sets optim.name, which cannot change"),
        ([{"until_steps": 5, "model": {"num_layers": 3}}, {}], {}, "sets model.num_layers"),
        ([{"until_steps": 5, "parallel": {"tp": 2}}, {}], {}, "A phase may change train.seq_len"),
        ([{"train": {"seq_len": 16}}, {}], {}, "phases[0]: it has no end"),
        ([{"until_steps": 5}, {"until_steps": 9}], {}, "phases[1] is the last phase and sets until_steps"),
        ([{"until_steps": 5, "until_tokens": 90}, {}], {}, "until_steps = 5 and until_tokens = 90"),
        ([{"until_steps": 2.5}, {}], {}, "until_steps = 2.5"),
        ([{"until_steps": 5}, {"until_steps": 5}, {}], {}, "phases[1].until_steps = 5: the phase begins at step 5"),
        ([{"until_steps": 5}, {"train": {"global_batch_size": 7}}], {}, "phases[1]: train.global_batch_size = 7"),
        ([{"until_steps": 5}, {"train": {"global_batch_size": "many"}}], {}, "train: global_batch_size"),
        ([{"until_steps": 5}, {"train": {"seq_len": 12}}], {}, "phases[0]: train.seq_len = 8 does not divide 12"),
        ([{"until_steps": 5}, {"weights": [1]}], {}, "phases[1].weights = [1]: want 2 numbers"),
        ([{"weights": [1, 2], "until_steps": 5}, {}], {}, "weights in the first phase"),
        ([{"until_steps": 5}, {"optim": {"lr": 1.0}}], {}, "sets optim.lr without schedule.name"),
        ([{"until_steps": 5}, {"schedule": {"name": "cosin"}}], {}, "phases[1]"),
        ([{"until_steps": 5}, {"schedule": {"decay_from": "x", "name": "wsd"}}], {}, "sets schedule.decay_from"),
        ([{"until_steps": 5}, {}], {"steps": "auto"}, "train.steps = auto"),
        ([{"until_steps": 5}, {"parallel": {"cp_kind": "auto"}}], {}, "cp_kind = auto in a phase: name the kind"),
        ([5], {}, "phases[0] = 5: want an entry"),
    ],
)  # fmt: skip
def test_an_impossible_phase_is_refused_naming_phase_and_key(
    phases: list[Any], train: dict[str, Any], text: str
) -> None:
    """Catches a phase that would fail during the run, or change a setting that must not change."""
    with pytest.raises(ConfigError) as error:
        check_config(phased(phases, **train))
    assert text in str(error.value)


def batches_of(config: RootConfig) -> list[tuple[int, int, int]]:
    """Returns sequence length, global batch size and micro-batch size of every phase."""
    parts = [phase_config(config, place).train for place in range(len(config.train.phases))]
    return [(part.seq_len, part.global_batch_size, part.micro_batch_size) for part in parts]


def test_longer_samples_may_keep_the_tokens_of_a_step() -> None:
    """Catches a batch that keeps its samples, one that is divided twice, a given size that is overwritten, a
    micro-batch that exceeds its replica's batch, and other sizes seen from the config of a phase."""
    lengths: list[Any] = [
        {"until_steps": 5},
        {"until_steps": 9, "train": {"seq_len": 32}},
        {"until_steps": 12, "train": {"seq_len": 64, "micro_batch_size": 1}},
        {"until_steps": 15, "train": {"seq_len": 128, "global_batch_size": 10}},
        {"train": {"seq_len": 16}},
    ]
    sizes: dict[str, Any] = {"global_batch_size": 48, "micro_batch_size": 6, "seq_len": 16, "keep_batch_tokens": True}
    config = phased(lengths, **sizes)
    wanted = [(16, 48, 6), (32, 24, 3), (64, 12, 1), (128, 10, 1), (16, 80, 8)]
    assert batches_of(config) == wanted
    check_config(config)
    for place in range(len(lengths)):
        part = phase_config(config, place)
        assert batches_of(part) == wanted and run_spans(part) == run_spans(config)
    config.parallel.dp = 8
    assert [micro for _, _, micro in batches_of(config)][:2] == [6, 3]
    config.train.phases = [*lengths[:3], {"train": {"seq_len": 128}}]
    assert batches_of(config)[3] == (128, 6, 1)
    config.train.keep_batch_tokens = False
    assert [batch for _, batch, _ in batches_of(config)] == [48] * 4


def test_the_learning_rate_advances_with_tokens_if_a_step_keeps_them() -> None:
    """Catches a decay that is slower in phases of longer samples, in the run's schedule or in that of a phase, and a
    rate that differs between the configs of the phases."""
    lengths: list[Any] = [
        {"until_steps": 10},
        {"until_steps": 20, "train": {"seq_len": 32}},
        {"train": {"seq_len": 64}},
    ]
    sizes: dict[str, Any] = {"global_batch_size": 16, "seq_len": 16, "steps": 40, "keep_batch_tokens": True}
    config = phased(lengths, **sizes)
    same = phased([], **(sizes | {"keep_batch_tokens": False}))
    samples, batches, plain = batch_size_schedule(config), batch_size_schedule(same), learning_rate(same)
    wanted = [plain(batches.samples_after(step)) for step in range(1, 41)]
    for place in range(3):
        rate = learning_rate(phase_config(config, place))
        assert [rate(samples.samples_after(step)) for step in range(1, 41)] == pytest.approx(wanted, rel=1e-12)
    assert wanted[0] < wanted[2] > wanted[20] > wanted[-1] == 1e-4
    own = {"schedule": {"name": "wsd", "decay_share": 0.5, "decay_shape": "linear"}, "optim": {"min_lr": 0.0}}
    config.train.phases = [lengths[0], {**lengths[1], **own}, lengths[2]]
    found = [learning_rate(config)(samples.samples_after(step)) for step in range(1, 41)]
    assert found[:10] == pytest.approx(wanted[:10], rel=1e-12)
    # 30 steps from step 10 on, of which the last 15 decay linearly.
    share = [1.0] * 15 + [1 - number / 15 for number in range(1, 16)]
    assert found[10:] == pytest.approx([wanted[9] * part for part in share], rel=1e-9)


LLAMA: list[Any] = [
    {"until_steps": 5, "model": {"max_seq_len": 32}},
    {"train": {"seq_len": 64}, "model": {"max_seq_len": 64, "rope_theta": 5e5}, "parallel": {"cp": 2, "dp": 1}},
]


def test_a_phase_may_divide_longer_samples_over_more_ranks() -> None:
    """Catches a layout, length or RoPE base of another phase, and a phase whose ranks are not those of the run."""
    config = phased(LLAMA, seq_len=32, global_batch_size=4)
    config.parallel.dp, config.model.position = 2, Position.rope
    check_config(config)
    first, second = (phase_config(config, place) for place in (0, 1))
    assert (first.parallel.cp, first.parallel.dp, first.model.max_seq_len) == (1, 2, 32)
    assert (second.parallel.cp, second.parallel.dp, second.model.max_seq_len) == (2, 1, 64)
    assert (first.model.rope_theta, second.model.rope_theta) == (10000.0, 5e5)
    config.train.phases = [LLAMA[0], {"parallel": {"cp": 2}}]
    with pytest.raises(ConfigError, match=r"phases\[1\]: tp 1 x cp 2 x pp 1 x dp 2 = 4 ranks, but the run has"):
        check_config(config)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ({"position": Position.learned}, {"model": {"max_seq_len": 4096}}, r"the number of learned positions, which"),
        ({"position": Position.learned}, {"train": {"seq_len": 4096}}, r"exceeds model.max_seq_len = 2048"),
        ({"position": Position.alibi}, {"model": {"rope_theta": 5e5}}, r"model.position = alibi has no rotary"),
        ({"position": Position.none}, {"model": {"rope_scaling": {"factor": 2}}}, r"rope_scaling.factor, which has no"),
        (
            {
                "position": Position.rope,
                "layer_pattern": [LayerKind(rope_theta=1e4), LayerKind(position=Position.none)],
            },
            {"model": {"rope_theta": 5e5}},
            r"every rotary layer of model.layer_pattern has a rope_theta of its own",
        ),
    ],
)
def test_a_position_encoding_that_cannot_change_is_refused(
    model: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    """Catches a run that fails at a boundary because a weight has another shape, and a change without effect."""
    config = phased([{"until_steps": 5}, changes])
    config.model = replace(config.model, **model)
    with pytest.raises(ConfigError, match=r"train.phases\[1\].*" + said):
        check_config(config)


def test_a_length_that_does_not_divide_the_batch_is_refused() -> None:
    """Catches a batch of fewer tokens than the phase before."""
    config = phased([{"until_steps": 5}, {"train": {"seq_len": 32}}], keep_batch_tokens=True, global_batch_size=6)
    with pytest.raises(ConfigError, match=r"phases\[1\]: train.seq_len = 32 does not divide the 48 tokens of a step"):
        check_config(config)


def test_a_dataset_may_begin_with_a_later_mix() -> None:
    """Catches a dataset rejected although a later phase reads it, and one accepted although no phase reads it."""
    config = phased()
    config.data.train = [DatasetConfig("a", 1.0), DatasetConfig("b", 0.0)]
    check_config(config)
    unread = [{**PHASES[3], "weights": [1, 0]}]
    for phases in ([*PHASES[:3], *unread], []):
        other = phased(phases)
        other.data.train = config.data.train
        with pytest.raises(ConfigError, match=r"data\.train\[1\] \(b\): weight = 0.0, and no mix"):
            check_config(other)


def test_a_changed_past_phase_is_refused_on_resume() -> None:
    """Catches a resume that reads other text because a sequence length, batch or end of past phases changed; those of
    later phases may change."""
    before = phased()
    changed_keys(before, phased(), 250, ())
    later = [*PHASES[:3], {"train": {"global_batch_size": 16, "seq_len": 16}}]
    assert changed_keys(before, phased(later), 250, ()) == []
    for other in (
        [{**PHASES[0], "until_tokens": 1400}, *PHASES[1:]],
        [*PHASES[:3], {"train": {"seq_len": 64}}],
        [{**PHASES[0], "train.global_batch_size": 8}, *PHASES[1:]],
        [],
    ):
        with pytest.raises(ConfigError, match=r"train\.seq_len = "):
            changed_keys(before, phased(other), 250, ())


def test_a_phases_mix_begins_with_the_phase_despite_skipped_samples() -> None:
    """Catches a mix that begins early by the samples that data.skip skips, and a skip across two sequence lengths."""
    config = phased()
    config.data.skip = [SkipConfig(samples=[100, 130])]
    skips, phases = skips_of(config.data.skip, batch_size_schedule(config)), parse_phases(config.train.phases)
    starts = phase_stream_starts(run_spans(config), skips)
    assert starts == [0, 80, 230, 310]
    phases = with_mixes(config.data, phases, starts).phases
    assert [(phase.from_sample, phase.weights) for phase in phases] == [(310, [1.0, 3.0])]
    check_skips(run_spans(config), skips)
    across = skips_of([SkipConfig(samples=[70, 90])], batch_size_schedule(config))
    with pytest.raises(ConfigError, match=r"but train\.phases\[1\] begins within"):
        check_skips(run_spans(config), across)
