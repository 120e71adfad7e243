"""N2 of a verification: the samples of all ranks together are those of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megads.tools.verify.checks import measure_samples
from megads.tools.verify.run import RankRun, Run, join
from megads.tools.verify.scenario import Scenario
from megads.tools.verify.stream import read_stream, write_corpus

SCENARIO = Scenario(steps=6)


def test_ranks_together_read_what_one_process_reads(tmp_path: Path) -> None:
    """Catches a check that cannot pass, and one that passes a rank that reads another's samples, other documents, or
    fewer steps."""
    write_corpus(tmp_path / "corpus", SCENARIO)
    reference = Run(stream=read_stream(tmp_path / "corpus", SCENARIO))
    ranks = [
        RankRun(stream=read_stream(tmp_path / "corpus", SCENARIO, rank, 3, needs_tokens=ends))
        for rank in range(3)
        for ends in (True, False)
    ]
    found = measure_samples(join(ranks, 6), reference)
    samples = SCENARIO.steps * SCENARIO.global_batch_size
    assert len(found) == SCENARIO.steps + 4 * samples and not any(deviation.exceeds for deviation in found)

    lost = measure_samples(join(ranks[:4], 6), reference)
    assert sum(deviation.exceeds for deviation in lost) == 4 * samples // 3
    other = read_stream(tmp_path / "corpus", replace(SCENARIO, seed=8))
    assert all(d.exceeds for d in measure_samples(Run(stream=other), reference) if d.what.startswith("batch hash"))
    first = ranks[0].stream
    torn = replace(first, contents={name: value + "x" * ("starts" in name) for name, value in first.contents.items()})
    assert (
        sum(d.exceeds for d in measure_samples(join([RankRun(stream=torn), *ranks[2:]], 6), reference)) == samples // 3
    )
