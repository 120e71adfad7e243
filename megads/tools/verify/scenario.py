"""What the reference and every layout train: weights, samples and settings at which no part of the model can hide.

At BLOOM's init a wrong ALiBi slope hides below 1e-6, so weights have std 0.2, and gains and biases are random.
Shape suffixes: b = micro-batch size, s = sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megads.batch import BatchInfo, MicroBatch
from megads.data.sampler import micro_batch_ids
from megads.model.config import ModelConfig
from megads.model.gpt import InitialValue, parameter_generator
from megads.ops.config import Implementation, OpsConfig
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.runtime.distributed import decode, encode

# Three blocks over two stages and a vocabulary as large as a block: gloo's order of summation depends on the place in a
# buffer, and the two copies of the tied embedding lie at different places, as they do in large models. Six heads bring
# in the odd ALiBi slopes, and 509 tokens leave padding rows in every tensor-parallel layout.
MODEL = ModelConfig(num_layers=3, hidden_size=48, num_heads=6, vocab_size=509, max_seq_len=64)
VALIDATION_SAMPLES = 7
"""Of which the last micro-batches of most layouts are incomplete."""


@dataclass(frozen=True)
class Scenario:
    """What is trained; the same for the reference and every layout.

    Attributes:
        model: its shape.
        steps: optimizer steps.
        global_batch_size: samples a step.
        micro_batch_size: samples of a forward pass.
        seq_len: tokens of a sample.
        precision: name of torch's dtype of weights and activations.
        clip_grad: largest gradient norm; hot gradients have one of about 2.
        lr: learning rate of every step.
        seed: of the weights.
        masked: masks leave 1 to all tokens of a sample.
        counted: masks leave so many tokens at the start of a sample; None leaves it to `masked`.
        hot: weights at which every part matters; else the model's own initialisation.
        documents: samples hold several documents, of which the model is told.
        document_mask: with documents: attention stays in them.
        reset_positions: with documents: positions restart in them.
        optimizer: every other setting of the optimizer.
        ops: how the layout's operators are computed; the reference takes torch's.
    """

    model: ModelConfig = field(default_factory=lambda: MODEL)
    steps: int = 1
    global_batch_size: int = 12
    micro_batch_size: int = 2
    seq_len: int = 24
    precision: str = "float32"
    clip_grad: float = 0.5
    lr: float = 1e-3
    seed: int = 7
    masked: bool = False
    counted: int | None = None
    hot: bool = True
    documents: bool = False
    document_mask: bool = True
    reset_positions: bool = True
    optimizer: OptimConfig = field(default_factory=OptimConfig)
    ops: OpsConfig = field(default_factory=lambda: OpsConfig(Implementation.torch))

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype

    @property
    def optim(self) -> OptimConfig:
        return replace(self.optimizer, lr=self.lr, min_lr=0.0, clip_grad=self.clip_grad)


def hot_value(seed: int) -> InitialValue:
    """Weights at which every part of the model matters."""

    def value(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.empty(shape).normal_(0.0, 0.2, generator=parameter_generator(seed, name))
        return noise + 1.0 if name.endswith("norm.weight") else noise

    return value


def initial_weights(scenario: Scenario) -> InitialValue | None:
    """Initial weights of a scenario; None is the model's own initialisation."""
    return hot_value(scenario.seed) if scenario.hot else None


def sample(scenario: Scenario, sample_id: int) -> tuple[Tensor, Tensor]:
    """Tokens int64 [s + 1] and mask fp32 [s] of one sample; see Scenario.masked and counted."""
    generator = torch.Generator().manual_seed(1000 + sample_id)
    tokens = torch.randint(0, scenario.model.vocabulary, (scenario.seq_len + 1,), generator=generator)
    mask = torch.ones(scenario.seq_len)
    if scenario.masked:
        mask[1 + (sample_id * 5) % scenario.seq_len :] = 0.0
    if scenario.counted is not None:
        mask[scenario.counted :] = 0.0
    return tokens, mask


def document_starts(scenario: Scenario, sample_id: int) -> Tensor:
    """Place at which the document of each token starts, int64 [s]: three documents of any length from one token."""
    generator = torch.Generator().manual_seed(2000 + sample_id)
    later = 1 + torch.randperm(scenario.seq_len - 1, generator=generator)[:2]
    starts = torch.zeros(scenario.seq_len, dtype=torch.int64)
    starts[later] = later
    return starts.cummax(0).values


def micro_batch(scenario: Scenario, ids: Sequence[int] | np.ndarray) -> MicroBatch:
    """The samples with these numbers."""
    rows = [sample(scenario, int(i)) for i in ids]
    tokens, mask = torch.stack([t for t, _ in rows]), torch.stack([m for _, m in rows])
    info = BatchInfo(sample_ids=torch.as_tensor(np.asarray(ids)))
    if scenario.documents:
        starts_bs = torch.stack([document_starts(scenario, int(i)) for i in ids])
        positions_bs = torch.arange(scenario.seq_len) - starts_bs
        info = BatchInfo(
            info.sample_ids,
            position_ids_bs=positions_bs if scenario.reset_positions else None,
            document_starts=starts_bs if scenario.document_mask else None,
        )
    return MicroBatch(info=info, tokens_bs=tokens[:, :-1], labels_bs=tokens[:, 1:], loss_mask_bs=mask)


def step_batches(scenario: Scenario, step: int, dp_rank: int = 0, dp: int = 1) -> list[MicroBatch]:
    """One data-parallel rank's micro-batches of a step, as the real sampler deals them."""
    first = step * scenario.global_batch_size
    ids = micro_batch_ids(first, scenario.global_batch_size, scenario.micro_batch_size, dp_rank, dp)
    return [micro_batch(scenario, row) for row in ids]


def validation_ids(scenario: Scenario, dp_rank: int, dp: int) -> np.ndarray:
    """Ids of this rank's validation micro-batches; those from VALIDATION_SAMPLES on are filling and fully masked."""
    block = scenario.micro_batch_size * dp
    return micro_batch_ids(0, -(-VALIDATION_SAMPLES // block) * block, scenario.micro_batch_size, dp_rank, dp)


def validation_batches(scenario: Scenario, dp_rank: int = 0, dp: int = 1) -> list[MicroBatch]:
    """One data-parallel rank's micro-batches of the whole validation set."""
    batches = []
    for ids in validation_ids(scenario, dp_rank, dp):
        batch = micro_batch(scenario, ids)
        assert batch.loss_mask_bs is not None
        filling = torch.as_tensor(np.asarray(ids)) >= VALIDATION_SAMPLES
        batches.append(replace(batch, loss_mask_bs=batch.loss_mask_bs.masked_fill(filling[:, None], 0.0)))
    return batches


@dataclass(frozen=True)
class Job:
    """What every rank does.

    Attributes:
        parallel: the layout.
        scenarios: trained one after another, each on an engine of its own.
        corpus: prefix of the dataset that the data path is checked on.
        timeout_s: longest wait for a peer.
        defect: module:function, called first; tests break something with it.
        plugins: modules that the user's command line names, imported before.
    """

    parallel: ParallelConfig
    scenarios: tuple[Scenario, ...]
    corpus: Path
    timeout_s: float
    defect: str = ""
    plugins: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Leaves it for the ranks."""
        (folder / "job.json").write_bytes(encode(self, Job))

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Reads what `write` left; raises UnhealthyNode on anything else."""
        return decode((folder / "job.json").read_bytes(), Job, 0)  # type: ignore[no-any-return]


def result_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its RankRun of every scenario."""
    return folder / f"rank_{rank:05d}.pt"
