"""Tests the costs of layouts that `megads calibrate` fits to the steps that it trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.model.model_size import parameter_count
from megads.tools.plan.calibrate.passes import IN_LAYOUTS, PLAIN, TrialTimes, layout_costs, layouts
from megads.tools.plan.devices import LayoutCosts, device_from
from megads.tools.plan.step_estimate import StepModel
from megads.tools.plan.workload import Workload
from tests.tools.plan.measured_steps import read_stored


@pytest.mark.parametrize("layout", [name for name in layouts(2) if name != PLAIN])
@pytest.mark.parametrize("off", [1.0, 0.8])
def test_costs_of_a_layout_are_found_again(layout: str, off: float) -> None:
    """Catches wrong units, costs that are fitted to another layout or that no plan counts, and a wrong fit on a device
    on which all steps take less time than planned."""
    device = replace(device_from(read_stored()["machines"]["2x1 bf16"], "measured"), layout_costs=())
    slower = replace(device, layout_costs=(LayoutCosts(layout, 700.0, 3.0),))
    steps: dict[str, list[TrialTimes]] = {}
    for name, parallel in layouts(2).items():
        for trial in IN_LAYOUTS:
            shape = Workload(trial.seq_len, trial.samples, trial.micro_batches)
            of_costs, without = (
                StepModel(trial.model, parallel, shape, of).estimate().step_time_s for of in (slower, device)
            )
            step_s = of_costs - (1 - off) * without
            one = TrialTimes(trial, 0.0, 0.0, 0.0, 0.0, step_s, parameter_count(trial.model))
            steps.setdefault(name, []).append(one)
    costs = {name: rest for name, *rest in layout_costs(steps, device, width=2)}
    block_us, element_ns = costs.pop(layout)
    assert costs and not any(map(any, costs.values()))
    assert block_us == pytest.approx(700.0, rel=0.02)
    assert element_ns == pytest.approx(3.0, rel=0.02)


def test_other_numbers_of_ranks_train_what_they_can() -> None:
    """Catches layouts whose trials have too few heads, layers or tokens for the number of ranks."""
    for ranks in (1, 4):
        assert set(layouts(ranks)) == {PLAIN, "recompute_selective", "recompute_full"}
        assert all(parallel.world_size == ranks for parallel in layouts(ranks).values())
