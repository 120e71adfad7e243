"""Resharding of checkpoints from any layout to any other and back: the state bit for bit, and the next step's loss."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megads.checkpoint.config import step_folder
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import find_checkpoint, read_into
from megads.checkpoint.store import save_checkpoint
from megads.engine.interface import StepResult, TrainEngine
from megads.errors import ConfigError
from megads.model.config import MLPKind, ModelConfig, NormKind
from megads.model.moe_config import MoEConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import EngineKind, ParallelConfig
from megads.parallel.schedule import ScheduleName
from megads.runtime.distributed import open_control_plane
from megads.tools.verify.layout import rank_batches
from megads.tools.verify.run import TensorPart
from tests.distributed import run_ranks
from tests.parity import Scenario, assemble, build_engine, pieces

pytestmark = pytest.mark.distributed

LEVELS: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 3),
    "pp": (1, 2, 4),
    "dp": (1, 2),
    "schedule": (ScheduleName["1f1b"], ScheduleName.interleaved, ScheduleName.dualpipe_v),
    "zero_stage": (1, 3),
}
KINDS = ("weight", "exp_avg", "exp_avg_sq", "average")
TRAINED_STEPS = 2
MOST_RANKS_IN_CI = 8
SAVED = "saved"
# Eight virtual stages at pp 4, two per rank; a vocabulary of 509 leaves padding rows under tensor parallelism.
MODEL = ModelConfig(num_layers=7, hidden_size=24, num_heads=6, vocab_size=509, max_seq_len=64)
# Four micro-batches at dp 2, one for each stage of the longest pipeline.
SCENARIO = Scenario(
    model=MODEL, global_batch_size=8, micro_batch_size=1, seq_len=8, steps=TRAINED_STEPS,
    optimizer=OptimConfig(ema_decay=0.6),
)  # fmt: skip
LOSS_BOUND = 1e-6
"""N3: relative difference of fp32 losses from the same state in two layouts."""


def legal_layouts() -> list[ParallelConfig]:
    """Layouts of LEVELS that the config accepts, smallest first: ZeRO-3 has no pipeline, virtual stages need one."""
    found = list[ParallelConfig]()
    for values in itertools.product(*LEVELS.values()):
        layout = ParallelConfig(**dict(zip(LEVELS, values, strict=True)))
        try:
            layout.check()
        except ConfigError:
            continue
        found.append(layout)
    return sorted(found, key=lambda layout: layout.world_size)


def levels_of(layout: ParallelConfig) -> tuple[Any, ...]:
    return tuple(getattr(layout, factor) for factor in LEVELS)


def name_of(layout: ParallelConfig) -> str:
    schedule = "" if layout.pp == 1 else f"-{layout.schedule}"
    return f"tp{layout.tp}pp{layout.pp}dp{layout.dp}{schedule}{'-zero3' * (layout.zero_stage == 3)}"


@dataclass(frozen=True)
class Case:
    """Resharding from one layout to another and back: each layout saves a checkpoint, and each loads the other's.

    Attributes:
        home: the smaller layout, because it is started twice.
        away: the other layout.
        tied: whether the embeddings are tied.
        engines: engines of home and away.
        model: model to train.
    """

    home: ParallelConfig
    away: ParallelConfig
    tied: bool
    engines: tuple[EngineKind, EngineKind] = (EngineKind.auto, EngineKind.auto)
    model: ModelConfig = field(default_factory=lambda: MODEL)

    def scenario(self, seed: int, engine: EngineKind) -> Scenario:
        return replace(SCENARIO, model=replace(self.model, tie_embeddings=self.tied), seed=seed, engine=engine)

    @property
    def ranks(self) -> int:
        """Number of ranks that the case starts."""
        return 2 * self.home.world_size + self.away.world_size

    def __str__(self) -> str:
        return f"{name_of(self.home)}--{name_of(self.away)}--{'tied' if self.tied else 'untied'}"


Pair = tuple[int, Any, int, Any]


def pairs_of_levels(case: Case) -> set[Pair]:
    """All pairs of settings that a case combines: of the saving layout, the loading layout, and the model."""
    found = set[Pair]()
    for writes, reads in ((case.home, case.away), (case.away, case.home)):
        numbered = enumerate((*levels_of(writes), *levels_of(reads), case.tied))
        found |= {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(numbered, 2)}
    return found


def possible_cases() -> list[Case]:
    layouts = legal_layouts()
    return [Case(a, b, tied) for a, b in itertools.combinations(layouts, 2) for tied in (False, True)]


def covering_cases() -> list[Case]:
    """Cases that contain every layout and all possible pairs of settings.

    Each of the smaller half of the layouts is the home of one of the larger half; cases with few ranks add the missing
    pairs.
    """
    layouts, possible = legal_layouts(), [(case, pairs_of_levels(case)) for case in possible_cases()]
    everything = set[Pair]().union(*(pairs for _, pairs in possible))
    half = len(layouts) // 2 + 1
    small, large = layouts[:half], layouts[-half:]

    def matched(shift: int) -> list[Case]:
        both = enumerate(zip(small, large[shift:] + large[:shift], strict=True))
        return [Case(home, away, number % 2 == 0) for number, (home, away) in both if home is not away]

    def missing(cases: list[Case]) -> set[Pair]:
        return everything.difference(*map(pairs_of_levels, cases))

    cases = min(map(matched, range(1, half)), key=lambda cases: len(missing(cases)))
    while left := missing(cases):
        # Most missing pairs per started rank.
        cases.append(max(possible, key=lambda found: len(found[1] & left) / found[0].ranks)[0])
    return cases


def next_step(engine: TrainEngine, scenario: Scenario, number: int) -> StepResult:
    return engine.step(rank_batches(scenario, number, engine.grid), scenario.lr)


def save(engine: TrainEngine, folder: Path, layout: ParallelConfig) -> None:
    """Saves as a run's hook does."""
    samples = TRAINED_STEPS * SCENARIO.global_batch_size
    state = {"step": TRAINED_STEPS, "samples": samples, "tokens": samples * SCENARIO.seq_len}
    record = RunRecord(state, engine.optimizer_steps, "digest", {}, layout.sizes)
    keys = {shard.key for shard in engine.named_shards(owned=False)}
    save_checkpoint(folder, engine.named_shards(), record, keys=keys, control=open_control_plane())


@dataclass
class Seen:
    """A rank's shards at the checkpoint, those it owns and with copies of others' shards, and its next step."""

    owned: list[TensorPart]
    held: list[TensorPart]
    loss: float
    grad_norm: float


def seen(engine: TrainEngine, scenario: Scenario, folder: Path | None, layout: ParallelConfig) -> Seen:
    """Saves, and takes the next step."""
    owned, held = pieces(engine.named_shards()), pieces(engine.named_shards(owned=False))
    if folder is not None:
        save(engine, folder, layout)
    step = next_step(engine, scenario, TRAINED_STEPS)
    assert not step.skipped
    return Seen(owned, held, step.loss, step.grad_norm)


def train_and_save(folder: Path, case: Case) -> Seen:
    scenario, layout = case.scenario(7, case.engines[0]), case.home
    engine = build_engine(scenario, layout)
    for number in range(TRAINED_STEPS):
        next_step(engine, scenario, number)
    return seen(engine, scenario, folder, layout)


def load_and_save(source: Path, folder: Path | None, case: Case, away: bool) -> Seen:
    """Loads as a start of a run does, into an engine with other weights."""
    scenario, layout = case.scenario(99, case.engines[away]), case.away if away else case.home
    engine = build_engine(scenario, layout)
    handle = find_checkpoint(source, "auto", open_control_plane())
    assert handle is not None and handle.folder == step_folder(source, TRAINED_STEPS)
    engine.load_shards(lambda shards: read_into(handle, shards, engine.grid.rank), handle.optimizer_steps)
    assert engine.optimizer_steps == TRAINED_STEPS
    return seen(engine, scenario, folder, layout)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def global_tensors(ranks: list[Seen]) -> dict[str, np.ndarray]:
    """All tensors, assembled from the shards that the ranks own."""
    parts = [part for rank in ranks for part in rank.owned]
    return {f"{kind}/{name}": full for kind in KINDS for name, full in assemble(parts, kind).items()}


def differing(ranks: list[Seen], expected: dict[str, np.ndarray]) -> list[str]:
    """Shards, copies included, that differ in any bit from the global tensors."""
    return [
        f"rank {number}: {part.key} at {part.offset}"
        for number, rank in enumerate(ranks)
        for part in rank.held
        if not same_bits(part.values, np.ascontiguousarray(expected[part.key][part.where]))
    ]


def test_every_layout_and_pair_of_settings_has_a_case() -> None:
    """Catches a layout without a case, and a pair of settings that no case combines."""
    layouts, cases = legal_layouts(), covering_cases()
    names = {name_of(layout) for layout in layouts}
    assert len(layouts) == len(names) == 45
    assert {name_of(layout) for case in cases for layout in (case.home, case.away)} == names
    met = set[Pair]().union(*map(pairs_of_levels, cases))
    assert met == set[Pair]().union(*map(pairs_of_levels, possible_cases()))


def cases_with_marks() -> list[Any]:
    """Test parameters; cases of many ranks take a minute each and only run in `make test-attack`."""
    marked = []
    for case in covering_cases():
        large = max(case.home.world_size, case.away.world_size) > MOST_RANKS_IN_CI
        marked.append(pytest.param(case, id=str(case), marks=[pytest.mark.attack] if large else []))
    return marked


def test_shared_kv_heads_reshard(tmp_path: Path) -> None:
    """Catches keys that one rank saves and several load, or rows saved as if a rank's were consecutive: from ranks
    that share a KV head to ranks of which each has all."""
    model = replace(MODEL, num_kv_heads=1)
    case = Case(ParallelConfig(tp=2), ParallelConfig(dp=2), tied=True, model=model)
    test_a_checkpoint_reshards_and_back(case, tmp_path)


# Of groups of experts, with both states of routers, a shared expert, and a layer without experts.
EXPERTS = MoEConfig(
    num_experts=8, top_k=2, expert_ffn_size=20, first_dense=1, shared_ffn_size=12, bias_rate=0.05, global_loss=0.02
)
OF_EXPERTS = {
    "ep2 to tp2": (ParallelConfig(dp=2, ep=2), ParallelConfig(tp=2)),
    "ep4 to one": (ParallelConfig(), ParallelConfig(dp=4, ep=4)),
    "ep2 dp2 to tp2 ep2 pp2": (ParallelConfig(dp=4, ep=2), ParallelConfig(tp=2, dp=2, ep=2, pp=2)),
    "tp2 ep4, whole, to cp2 ep2": (
        ParallelConfig(cp=2, ep=2),
        ParallelConfig(tp=2, dp=2, ep=4, sequence_parallel=True, expert_tp=False),
    ),
    "ZeRO-0 to ep2 zb_v": (
        ParallelConfig(dp=4, ep=2, zero_stage=0),
        ParallelConfig(pp=2, dp=2, ep=2, schedule=ScheduleName.zb_v),
    ),
}


@pytest.mark.quick("ep2 to tp2")
@pytest.mark.parametrize("layouts", OF_EXPERTS)
def test_experts_reshard(layouts: str, tmp_path: Path) -> None:
    """Catches experts in the order of the ranks that saved them, shares of an expert's features taken for experts, and
    biases and loads of routers that are not saved or not loaded."""
    model = replace(MODEL, mlp=MLPKind.swiglu, norm=NormKind.rmsnorm, bias=False, moe=EXPERTS)
    home, away = OF_EXPERTS[layouts]
    test_a_checkpoint_reshards_and_back(Case(home, away, tied=False, model=model), tmp_path)


def test_aligned_vocabulary_rows_are_not_saved(tmp_path: Path) -> None:
    """Catches alignment rows that are saved, and ranks that load tokens of another range of the vocabulary."""
    aligned = ParallelConfig(tp=2, vocab_multiple=128)
    test_a_checkpoint_reshards_and_back(Case(aligned, ParallelConfig(dp=2, vocab_multiple=1), tied=True), tmp_path)


@pytest.mark.quick("native-pp2dp2-pp2dp2")
@pytest.mark.parametrize(
    ("home", "away"), [("pp2dp2", "pp2dp2"), ("tp2pp2", "pp3"), ("dp2", "tp2"), ("dp2", "dp2 ZeRO-0")]
)
@pytest.mark.parametrize("first", [EngineKind.native, EngineKind.deepspeed])
def test_another_engine_continues(first: EngineKind, home: str, away: str, tmp_path: Path) -> None:
    """Catches state of one engine that the other does not load: a run changes its engine, and back, in the same layout
    and in another (N6)."""
    layouts = {
        "pp2dp2": ParallelConfig(pp=2, dp=2),
        "tp2pp2": ParallelConfig(tp=2, pp=2),
        "pp3": ParallelConfig(pp=3),
        "dp2": ParallelConfig(dp=2),
        "dp2 ZeRO-0": ParallelConfig(dp=2, zero_stage=0),
        "tp2": ParallelConfig(tp=2),
    }
    other = EngineKind.deepspeed if first is EngineKind.native else EngineKind.native
    test_a_checkpoint_reshards_and_back(Case(layouts[home], layouts[away], tied=True, engines=(first, other)), tmp_path)


@pytest.mark.quick("tp1pp1dp1--tp1pp1dp2-zero3--untied")
@pytest.mark.parametrize("case", cases_with_marks())
def test_a_checkpoint_reshards_and_back(case: Case, tmp_path: Path) -> None:
    """Catches a rectangle that one layout saves and another loads elsewhere, moments of other weights, copies that are
    not loaded, padding loaded as weights, and a state that differs in any bit after resharding there and back (N3, N6).
    """
    there, back = tmp_path / "there", tmp_path / "back"
    origin = run_ranks(train_and_save, case.home.world_size, there, case)
    expected = global_tensors(origin)
    assert {key.partition("/")[0] for key in expected} == set(KINDS)
    assert all(np.isfinite(full).all() and np.any(full) for full in expected.values())
    reached = run_ranks(load_and_save, case.away.world_size, there, back, case, True)
    assert differing(reached, expected) == []
    assert global_tensors(reached).keys() == expected.keys()
    off = abs(reached[0].loss / origin[0].loss - 1)
    print(f"{case}: first loss {origin[0].loss} off by {off:.1e}")
    assert off <= LOSS_BOUND
    returned = run_ranks(load_and_save, case.home.world_size, back, None, case, False)
    assert differing(returned, expected) == []
    for before, after in zip(origin, returned, strict=True):
        assert [part[:3] for part in after.held] == [part[:3] for part in before.held]
        # The next step is bitwise equal, too: these tensors are the whole state.
        assert (after.loss, after.grad_norm) == (before.loss, before.grad_norm)
