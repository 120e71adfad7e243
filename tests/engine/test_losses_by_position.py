"""Losses by position equal those of the model on one process, in every layout."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from megads.model.gpt import GPT, token_losses
from megads.tools.verify.layout import evaluate
from megads.tools.verify.scenario import initial_weights, validation_batches
from tests import parity
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, build_engine, scenario_with

pytestmark = pytest.mark.distributed


def _by_position(layout: str, documents: bool) -> tuple[list[list[float]], float, int]:
    scenario = parity.fitted(scenario_with(masked=True, documents=documents), LAYOUTS[layout])
    engine = build_engine(scenario, LAYOUTS[layout])
    batches = validation_batches(scenario, engine.grid.dp.rank, engine.grid.dp.size)
    found = engine.losses_by_position(batches, scenario.seq_len)
    return found.tolist(), *evaluate(engine, scenario)


@functools.cache
def losses_by_position(documents: bool) -> Tensor:
    """Returns the sums of losses and of loss masks by position, of the unsharded model."""
    scenario = scenario_with(masked=True, documents=documents)
    model = GPT(scenario.model, scenario.seed, initial_weights(scenario)).eval()
    sums_2p = torch.zeros(2, scenario.seq_len, dtype=torch.float64)
    with torch.no_grad():
        for batch in validation_batches(scenario):
            assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
            losses_bs = token_losses(model(batch.tokens_bs, batch.info), batch.labels_bs).double()
            places_bs = batch.info.positions(scenario.seq_len, losses_bs.device).expand_as(losses_bs)
            for row in range(len(losses_bs)):
                for place, loss, mask in zip(places_bs[row], losses_bs[row], batch.loss_mask_bs[row], strict=True):
                    sums_2p[:, place] += torch.tensor([float(loss) * float(mask), float(mask)], dtype=torch.float64)
    return sums_2p


@pytest.mark.quick("tp2pp2sp-True")
@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("layout", ["tp2pp2sp", "cp2", "pp2", "zero3dp2", "tp2cp2"])
def test_losses_by_position_are_the_same_in_every_layout(layout: str, documents: bool) -> None:
    """N10. Catches positions counted within a rank's chunk instead of the sample, restarted positions that are ignored,
    padding that counts, and a token that counts on two tensor-parallel ranks."""
    expected_2p = losses_by_position(documents)
    for sums, loss, tokens in run_ranks(_by_position, LAYOUTS[layout].world_size, layout, documents):
        found_2p = torch.tensor(sums, dtype=torch.float64)
        assert torch.equal(found_2p[1], expected_2p[1]) and int(found_2p[1].sum()) == tokens
        torch.testing.assert_close(found_2p[0], expected_2p[0], rtol=1e-5, atol=1e-5)
        assert float(found_2p[0].sum()) == pytest.approx(loss, rel=1e-6)
