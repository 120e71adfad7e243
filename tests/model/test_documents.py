"""Packed documents: masked from each other and, where positions restart, each computed as if it were alone."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig, Position
from megads.model.gpt import GPT
from megads.model.kv_cache import CachedGPT
from tests.model import naive
from tests.model.test_gpt import hot_value

# Rows of one micro-batch are packed differently; a document may be one token.
STARTS = [[0, 0, 0, 3, 4, 4, 4, 4, 8, 8], [0, 1, 1, 1, 1, 1, 6, 6, 6, 6]]
LENGTH = 10


def model_config(position: Position, **changes: object) -> ModelConfig:
    return ModelConfig(
        num_layers=2, hidden_size=24, num_heads=6, vocab_size=50, max_seq_len=LENGTH, position=position, **changes
    )


def tokens() -> Tensor:
    return torch.randint(0, 50, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def packed(*, mask: bool, restart: bool) -> BatchInfo:
    starts = torch.tensor(STARTS)
    return BatchInfo(
        torch.tensor([0, 1]),
        position_ids_bs=torch.arange(LENGTH) - starts if restart else None,
        document_starts=starts if mask else None,
    )


def documents(row: int) -> list[slice]:
    """The range of each document of a row."""
    begins = sorted(set(STARTS[row]))
    return [slice(begin, end) for begin, end in pairwise([*begins, LENGTH])]


@pytest.mark.parametrize(("position", "mask", "restart"), list(product(Position, (True, False), (True, False))))
def test_equals_the_naive_model(position: Position, mask: bool, restart: bool) -> None:
    """Catches a document mask or restarted positions that are ignored, off by one, or only work together."""
    config = model_config(position)
    model = GPT(config, 0, hot_value).double()
    found = model(tokens(), packed(mask=mask, restart=restart))
    for row, starts in enumerate(STARTS):
        positions = [place - start for place, start in enumerate(starts)] if restart else None
        expected = naive.logits(config, model.parameters_by_name(), tokens()[row], starts if mask else None, positions)
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dropout", [0.0, 1e-12])
@pytest.mark.parametrize("position", Position)
def test_a_packed_document_is_as_it_would_be_alone(position: Position, dropout: float) -> None:
    """Catches a document that attends to its neighbor or depends on its place, in fused and explicit attention."""
    model = GPT(model_config(position, attention_dropout=dropout), 0, hot_value)
    together = model(tokens(), packed(mask=True, restart=True))
    for row in range(2):
        for where in documents(row):
            alone = model(tokens()[row : row + 1, where], BatchInfo(torch.tensor([row])))[0]
            assert (together[row, where] - alone).norm() <= 1e-6 * alone.norm()


def test_gradients_stay_in_the_document() -> None:
    """Catches a mask that hides keys in the forward pass only: inputs of other documents must get no gradient."""
    core = AttentionCore(model_config(Position.alibi), 0, "core")
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 6, LENGTH, 4, generator=generator, requires_grad=True) for _ in range(3))
    core(q, k, v, packed(mask=True, restart=False))[0, :, 6].sum().backward()
    for grad in (k.grad, v.grad):
        reached = (grad[0] != 0).any(dim=0).any(dim=-1)
        assert reached.nonzero().flatten().tolist() == [4, 5, 6] and not grad[1].any()


def test_layers_share_one_mask_and_micro_batches_do_not() -> None:
    """Catches a mask built in every layer, one that outlives its micro-batch, and one reused by the next one."""
    core, other_layer = (AttentionCore(model_config(Position.alibi), 0, "core") for _ in range(2))
    info, later = packed(mask=True, restart=False), packed(mask=True, restart=False)
    options = (LENGTH, torch.device("cpu"), torch.float32)
    mask = core.bias(info, *options)
    assert other_layer.bias(info, *options) is mask
    other_layer.narrow(1, 2)
    assert torch.equal(other_layer.bias(info, *options), mask[:, 3:])
    assert core.bias(later, *options) is not mask
    alive = weakref.ref(mask)
    del mask, info
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("position", Position)
def test_incremental_reading_has_the_same_documents(position: Position, restart: bool) -> None:
    """Catches a KV cache in which a new document attends to the previous one, or continues its positions."""
    whole = GPT(model_config(position), 0, hot_value).eval()
    with torch.no_grad():
        expected = whole(tokens(), packed(mask=True, restart=restart))
    model = CachedGPT(GPT(model_config(position), 0, hot_value), reset_positions=restart)
    model.start(2)
    for begin, end in pairwise([0, 5, 6, 7, 10]):
        pieces = tokens()[:, begin:end].tolist()
        found = model.append(pieces, [starts[begin:end] for starts in STARTS])
        assert float((found - expected[:, end - 1]).abs().max()) <= 1e-5
    model.start(1)
    again = model.append([tokens()[0].tolist()])
    with torch.no_grad():
        unpacked = whole(tokens()[:1], BatchInfo(torch.tensor([0])))[:, -1]
    assert float((again - unpacked).abs().max()) <= 1e-5, "documents of the last sequences are not forgotten"
