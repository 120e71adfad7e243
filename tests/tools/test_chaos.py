"""`megads chaos`: a campaign that is survived, failures that it must detect, and invalid requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megads.errors import ConfigError
from megads.tools.chaos.attacked_run import AttackedRun
from megads.tools.chaos.campaign import CampaignResult, FaultResult, as_json, difference, write
from megads.tools.chaos.config import ChaosConfig
from megads.tools.chaos.faults import FAULTS
from tests.command import StartCommand

QUICK = ("train.train.global_batch_size=8", "train.train.seq_len=32", "train.ops.impl=torch")


@pytest.mark.slow
@pytest.mark.distributed
def test_a_campaign(megads: StartCommand) -> None:
    """Catches a fault that is not injected, a recovery that is not awaited, and a scorecard that omits a fault."""
    kinds = "kinds=[kill_rank, flipped_bit, changed_seed]"
    command = ("chaos", "faults=3", "steps=40", kinds, "dir=out", *QUICK, "--json")
    ended = megads(*command).end()
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    results = {result["kind"]: result for result in found["results"]}
    assert set(results) == {"kill_rank", "flipped_bit", "changed_seed"} and found["survived"] == 3
    assert results["kill_rank"]["detected_s"] < results["kill_rank"]["recovered_s"] < 120
    assert all(result["problem"] == "" for result in results.values())
    assert "| kill_rank | a restart in place | 1 | 1 |" in (megads.folder / "out" / "scorecard.md").read_text()
    # Nothing else is left, in the folder or in memory.
    assert {path.name for path in (megads.folder / "out").iterdir()} == {
        "scorecard.md", "scorecard.json", "corpus.bin", "corpus.idx",
    }  # fmt: skip
    again = megads(*command).end()
    assert again.code == 2 and "is not empty: choose another folder" in again.err


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_that_does_not_survive(megads: StartCommand) -> None:
    """Catches a campaign that reports a fault as survived although the run did not continue."""
    train = (*QUICK, "train.cluster.max_restarts=0")
    ended = megads("chaos", "faults=1", "steps=30", "kinds=kill_rank", "dir=out", *train).end()
    assert ended.code == 4, ended.out + ended.err
    assert "1 of 1 faults were not survived" in ended.err and "no restart in place" in ended.out
    assert (megads.folder / "out" / "run_001" / "events.jsonl").is_file(), "what is lost stays, to be looked at"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_campaign_whose_time_is_up(megads: StartCommand) -> None:
    """Catches "0 of 0 faults survived" and exit code 0 where no time was left for the first fault, and fewer faults
    than asked that count as a passed campaign."""
    ended = megads("chaos", "faults=3", "minutes=0.001", "steps=20", "kinds=kill_rank", "dir=out", *QUICK).end()
    assert ended.code == 2, ended.out + ended.err
    assert "1 of 1 faults survived" in ended.out
    assert "only 1 of 3 faults were injected within minutes = 0.001" in ended.err


def run_with(folder: Path, *losses: float) -> AttackedRun:
    """A run whose ledger has these losses."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": loss, "batch_hash": "a"}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return AttackedRun(folder, [], folder, 1)


def test_what_counts_as_lost(tmp_path: Path) -> None:
    """Catches a comparison that accepts one different bit, a repeated step, or a missing step."""
    reference = run_with(tmp_path / "reference", 3.0, 2.0, 1.0)
    assert difference(run_with(tmp_path / "same", 3.0, 2.0), reference) == ""
    assert difference(run_with(tmp_path / "whole", 3.0, 2.0, 1.0), reference, whole=True) == ""
    one_bit = 2.0 + 2**-51
    assert "in step 2: loss" in difference(run_with(tmp_path / "bit", 3.0, one_bit), reference)
    assert "in step 2: loss" in difference(run_with(tmp_path / "twice", 3.0, 3.0, 2.0), reference)
    assert "has 2 steps" in difference(run_with(tmp_path / "short", 3.0, 2.0), reference, whole=True)


@pytest.mark.always
def test_the_scorecard(tmp_path: Path) -> None:
    """Catches a fault that was not survived, but is counted as survived."""
    results = [
        FaultResult("kill_rank", "rank 1", 1, 7, 0.5, 3.0, 2),
        FaultResult("kill_rank", "rank 0", 1, 9, 0.1, 5.0, 0, "the ledger differs"),
    ]
    campaign = CampaignResult(tmp_path, 60.0, 1, 0.1, results)
    text = write(campaign).read_text()
    assert "| kill_rank | a restart in place | 2 | 1 | 0.3 s, at most 0.5 | 4.0 s, at most 5.0 | 2 |" in text
    assert "run 1, kill_rank (rank 0) after step 9: the ledger differs" in text
    assert json.loads(as_json(campaign))["survived"] == 1
    assert "3 faults were asked for" in write(CampaignResult(tmp_path, 60.0, 1, 0.1, results, asked=3)).read_text()
    assert "No fault was injected" in write(CampaignResult(tmp_path, asked=3)).read_text()


def test_every_fault_is_listed(megads: StartCommand) -> None:
    """Catches a dry run that starts something, or omits a fault."""
    ended = megads("chaos", "dry_run=true").end()
    assert ended.code == 0 and all(name in ended.out for name in FAULTS)
    assert list(megads.folder.iterdir()) == []
    ended = megads("chaos", "dry_run=true", "kinds=kill_ranks").end()
    assert ended.code == 2 and "there is no fault 'kill_ranks'" in ended.err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ChaosConfig(faults=0), "faults = 0"),
        (ChaosConfig(steps=3), "steps = 3"),
        (ChaosConfig(minutes=float("nan")), "minutes = nan"),
        (ChaosConfig(recover_s=0), "recover_s = 0"),
        (ChaosConfig(kinds=[]), "kinds = \\[\\]"),
        (ChaosConfig(kinds=[3]), "kinds = \\[3\\]"),
        (ChaosConfig(train={"run": {"dir": "x"}}), "train.run.dir is set by the campaign"),
    ],
)
def test_requests_that_cannot_be_met(config: ChaosConfig, message: str) -> None:
    """Catches an invalid request that only fails during the campaign."""
    with pytest.raises(ConfigError, match=message):
        config.check()
