"""`megads diagnose` on logs in various formats, on runs, with past incidents, and as a command."""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megads.errors import ConfigError, DataError
from megads.runtime.lease import claimed
from megads.tools.diagnose.causes import Cause
from megads.tools.diagnose.command import Report, diagnose, show
from megads.tools.diagnose.config import DiagnoseConfig, IncidentsConfig, LanguageModelConfig
from megads.tools.diagnose.decision import DiagnosisOutcome
from megads.tools.diagnose.inputs import rank_of_name
from tests.command import REPOSITORY, Command

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"


def report(*logs: Path | str, **fields: Any) -> Report:
    return diagnose(DiagnoseConfig(logs=[str(log) for log in logs], **fields))


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


_DRAW = random.Random(1)
LOGS = {
    "plain.log": OOM.encode(),
    "wide.log": OOM.encode("utf-16"),
    "packed.log.gz": gzip.compress(OOM.encode()),
    "packed.log.zst": zstandard.compress(OOM.encode()),
    "members.log.gz": gzip.compress(b"step 1\n") + gzip.compress(OOM.encode()),
    "frames.log.zst": zstandard.compress(b"step 1\n") + zstandard.compress(OOM.encode()),
    "latin.log": "\xe9\n".encode("latin-1") + OOM.encode(),
    "growing.log.gz": gzip.compress(_DRAW.randbytes(3000) + b"\n" + OOM.encode() + _DRAW.randbytes(3000))[:-1000],
    "no_line_end": OOM.strip().encode(),
}


@pytest.mark.always
@pytest.mark.parametrize("name", LOGS)
def test_logs_of_every_sort(name: str, tmp_path: Path) -> None:
    """Catches a log that is compressed, still being written or in another encoding, and in which nothing is found."""
    found = report(write(tmp_path / name, LOGS[name]))
    assert found.diagnosis.cause == Cause.cuda_oom
    assert bool(found.notes) == name.startswith("growing")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (bytes(range(256)) * 4 + bytes(1000), "is no text")],
    ids=["empty", "binary"],
)
def test_nothing_to_read(content: bytes, message: str, tmp_path: Path) -> None:
    """Catches a cause reported for a log that is empty or binary."""
    path = write(tmp_path / "a.log", content)
    with pytest.raises(DataError, match=message):
        report(path)
    other = write(tmp_path / "b.log", OOM)
    assert message in report(path, other).notes[0]


def test_one_path_is_no_list(tmp_path: Path) -> None:
    """Catches logs=<file>, as shell completion writes it, that is refused because it has no brackets."""
    found = diagnose(DiagnoseConfig(logs=str(write(tmp_path / "a.log", OOM))))
    assert found.diagnosis.cause == Cause.cuda_oom


def test_missing_logs(tmp_path: Path) -> None:
    """Catches a traceback for a path that does not exist or cannot be read."""
    with pytest.raises(DataError, match="there is no file"):
        report(tmp_path / "none.log")
    with pytest.raises(DataError, match="holds no log"):
        report(tmp_path)
    (tmp_path / "pipe").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="cannot be read"):
        report(tmp_path / "pipe")


def test_folders_and_the_ranks_in_names(tmp_path: Path) -> None:
    """Catches logs in torchrun's folders, whose names contain the rank, that are read as those of one rank."""
    write(tmp_path / "0" / "2" / "stderr.log", OOM)
    write(tmp_path / "0" / "0" / "stderr.log", "RuntimeError: Connection closed by peer\n")
    write(tmp_path / "picture.png", OOM)
    found = report(tmp_path)
    assert (found.diagnosis.cause, found.diagnosis.culprit, len(found.surveys)) == (Cause.cuda_oom, "rank 2", 2)
    names = ["rank_00012.log", "job-rank3.out", "3/stdout.log", "step_7.log", "a/rank.log"]
    assert [rank_of_name(Path(name)) for name in names] == [12, 3, 3, None, None]


def test_templates(tmp_path: Path) -> None:
    """Catches a log of many similar lines that is shown line by line."""
    path = write(tmp_path / "a.log", "".join(f"step {i} loss {i / 7:.3f}\n" for i in range(1000)) + OOM)
    assert sorted(report(path).templates.values()) == [1, 1000]


def run_folder(folder: Path, events: list[dict[str, Any]], logs: dict[int, str]) -> Path:
    write(folder / "config.yaml", "run: {}\n")
    write(folder / "events.jsonl", "".join(json.dumps(event) + "\n" for event in events))
    for rank, text in logs.items():
        write(folder / "logs" / f"rank_{rank:05d}.log", f"--- rank {rank} of 2, pid 1\n{text}")
    return folder


@pytest.mark.always
def test_a_run(tmp_path: Path) -> None:
    """Catches a failure of an earlier start, or a log line of it, taken for that of the last start."""
    old, new = {"event": "failure", "exit_code": 7, "rank": 0, "message": "rank 0: non-finite"}, {
        "event": "failure", "exit_code": 1, "rank": 1, "message": "rank 1 failed, RuntimeError: x", "nodes": ["n2"],
    }  # fmt: skip
    earlier = "RuntimeError: Error(s) in loading state_dict for M:\n--- rank 1 of 2, pid 2\n"
    folder = run_folder(
        tmp_path / "run", [{"event": "launch"}, old, {"event": "exit", "exit_code": 7}, {"event": "launch"}, new],
        {0: "RuntimeError: Connection closed by peer\n", 1: earlier + OOM},
    )  # fmt: skip
    found = diagnose(DiagnoseConfig(run=str(folder)))
    assert (found.diagnosis.cause, found.diagnosis.culprit) == (Cause.cuda_oom, "rank 1")
    first = found.diagnosis.evidence[0]
    assert first.file == "logs/rank_00001.log"


def test_a_node_that_the_launcher_blamed(tmp_path: Path) -> None:
    """Catches a lost node that is not named as the root cause."""
    lost = {"event": "failure", "exit_code": 9, "rank": None, "message": "node n2: lost", "nodes": ["n2"]}
    found = diagnose(DiagnoseConfig(run=str(run_folder(tmp_path / "run", [{"event": "launch"}, lost], {}))))
    assert found.diagnosis.cause is Cause.node_lost
    assert found.diagnosis.culprit == "n2" and found.diagnosis.restartable


def steps(folder: Path, *times: float) -> None:
    lines = [{"step": i, "loss": 2.0, "step_time_s": 1.0, "time": at} for i, at in enumerate(times, 1)]
    write(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def of_run(folder: Path) -> Report:
    return diagnose(DiagnoseConfig(run=str(folder)))


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "finished at step 2"), (5, "stopped on request, after saving"), (6, "preempted or out of time, after saving")],
)
def test_a_run_that_ended_without_a_failure(code: int, words: str, tmp_path: Path) -> None:
    """Catches a cause reported for a run that finished, or that was stopped after it had saved."""
    events = [{"event": "launch"}, {"event": "exit", "exit_code": code}]
    folder = run_folder(tmp_path / "run", events, {0: OOM})
    steps(folder, 1.0, 2.0)
    found = of_run(folder).diagnosis
    assert (found.outcome, found.cause, found.restartable) == (DiagnosisOutcome.no_failure, None, None)
    assert words in found.advice and found.culprit == ""


def test_a_run_that_still_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run in progress called killed; and one whose launcher was killed called alive."""
    folder = run_folder(tmp_path / "run", [{"event": "launch"}], {0: "Using topology\n"})
    steps(folder, time.time() - 2, time.time() - 1)
    with claimed(folder):
        found = of_run(folder)
    assert found.diagnosis.outcome is DiagnosisOutcome.no_failure
    show(found, 0)
    shown = " ".join(capsys.readouterr().out.split())
    assert "in progress: last step 2" in shown and "no failure found" in shown and "not needed" in shown
    gone = of_run(folder).diagnosis
    assert (gone.outcome, gone.cause, gone.restartable) == (DiagnosisOutcome.no_cause, None, True)
    assert "the launcher itself was killed" in gone.advice and "from its last checkpoint" in gone.advice


def test_a_run_that_hangs(tmp_path: Path) -> None:
    """Catches a hang of a living run read as killed, or its rank not named; and one that is over."""
    hang = {"event": "hang_suspected", "rank": 3, "message": "rank 3 hangs in step 2"}
    folder = run_folder(tmp_path / "run", [{"event": "launch"}, hang], {})
    steps(folder, time.time() - 2, time.time() - 1)
    with claimed(folder):
        found = of_run(folder).diagnosis
        assert (found.cause, found.culprit, found.restartable) == (Cause.nccl_timeout_hang, "rank 3", True)
        write(folder / "events.jsonl", '{"event": "launch"}\n' + json.dumps(hang) + '\n{"event": "hang_over"}\n')
        assert of_run(folder).diagnosis.outcome is DiagnosisOutcome.no_failure
        steps(folder, 1.0, 2.0)
        silent = of_run(folder).diagnosis
    assert (silent.cause, silent.evidence[0].file) == (Cause.nccl_timeout_hang, "events.jsonl")


def test_runs_that_are_none(tmp_path: Path) -> None:
    """Catches a diagnosis of a folder that is missing, is not a run, or has no logs."""
    with pytest.raises(ConfigError, match="no such run"):
        diagnose(DiagnoseConfig(run=str(tmp_path / "none")))
    with pytest.raises(DataError, match="is no run directory"):
        diagnose(DiagnoseConfig(run=str(tmp_path)))
    with pytest.raises(DataError, match="was it started"):
        diagnose(DiagnoseConfig(run=str(run_folder(tmp_path / "run", [], {}))))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DiagnoseConfig(), "nothing to diagnose"),
        (DiagnoseConfig(logs=5), "logs = 5: want a file or folder, or a list"),
        (DiagnoseConfig(flight_recorder=[""]), "flight_recorder = .*: want a file or folder, or a list"),
        (DiagnoseConfig(run="a", templates=-1), "templates"),
        (DiagnoseConfig(run="a", incidents=IncidentsConfig(store=True)), "incidents.file"),
        (DiagnoseConfig(run="a", incidents=IncidentsConfig(file="f", note="n")), "incidents.store"),
        (DiagnoseConfig(run="a", llm=LanguageModelConfig(endpoint="ftp://x")), "llm.endpoint"),
        (DiagnoseConfig(run="a", llm=LanguageModelConfig(endpoint="http://x", timeout_s=0)), "llm.timeout_s"),
    ],
)
def test_wrong_keys(config: DiagnoseConfig, message: str) -> None:
    """Catches a wrong setting that is accepted, or refused only after minutes."""
    with pytest.raises(ConfigError, match=message):
        config.check()


def dump(rank: int, entered: bool) -> str:
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
    entries = [
        {"record_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 4, "p2p_seq_id": 0,
         "profiling_name": "nccl:all_reduce", "state": "scheduled", "is_p2p": False}
    ]  # fmt: skip
    return json.dumps(
        {"version": "2.10", "pg_config": {"0": group}, "pg_status": {}, "entries": entries if entered else []}
    )


def test_dumps_name_whom_the_logs_do_not(tmp_path: Path) -> None:
    """Catches a hang reported without the rank that the flight recorder identifies."""
    for rank in range(2):
        write(tmp_path / "dumps" / f"nccl_trace_rank_{rank}", dump(rank, entered=rank == 0))
    write(tmp_path / "dumps" / "notes_3", "not a dump")
    log = write(tmp_path / "a.log", "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)\n")
    folder = [str(tmp_path / "dumps")]
    found = report(log, flight_recorder=folder)
    assert (found.diagnosis.cause, found.diagnosis.culprit) == (Cause.nccl_timeout_hang, "rank 1")
    assert "rank 1 did not enter nccl:all_reduce number 4" in found.diagnosis.evidence[0].text
    assert report(flight_recorder=folder).diagnosis.culprit == "rank 1"
    assert report(write(tmp_path / "b.log", OOM), flight_recorder=folder).diagnosis.cause == Cause.cuda_oom


def test_a_dump_runs_nothing(tmp_path: Path) -> None:
    """Catches a pickle that is executed: whoever writes a dump could run code as whoever reads it."""
    mark = tmp_path / "mark"
    evil = b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR."
    protocol = b"\x80\x02" + evil
    for content in (evil, protocol):
        with pytest.raises(DataError):
            report(flight_recorder=[str(write(tmp_path / "dump_0", content))])
    assert not mark.exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["none_0"], "there is no file"),
        (["."], "no dumps in"),
        (["dump"], "must end in its rank"),
        (["dump_1", "b/dump_1"], "second dump of rank 1"),
    ],
)
def test_dumps_that_cannot_be_used(
    names: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback, and two dumps of one rank that both count."""
    monkeypatch.chdir(tmp_path)
    if names != ["."]:
        for name in ("dump", "dump_1", "b/dump_1"):
            write(tmp_path / name, dump(1, entered=True))
    with pytest.raises(DataError, match=message):
        report(flight_recorder=names)


def incidents(path: Path, **fields: Any) -> IncidentsConfig:
    return IncidentsConfig(file=str(path), **fields)


def test_past_incidents(tmp_path: Path) -> None:
    """Catches a failure that matches an explained past incident and is reported as unknown."""
    site = tmp_path / "site" / "incidents.jsonl"
    strange = "step 9 loss 2.0\n%CFS-7-GREMLIN: cache line 0x7f1234 of unit 3 is haunted\n"
    first = write(tmp_path / "a.log", strange)
    known = incidents(site, store=True, note="the water pump of rack 3")
    assert report(first, incidents=known).diagnosis.confidence == 0
    report(write(tmp_path / "c.log", OOM), incidents=incidents(site, store=True))
    stored = [json.loads(line) for line in site.read_text().splitlines()]
    assert [one["cause"] for one in stored] == ["", "cuda_oom"]
    again = write(tmp_path / "b.log", strange.replace("0x7f1234", "0x9abc").replace("unit 3", "unit 12"))
    found = report(again, incidents=incidents(site))
    assert found.similar_incidents[0].incident.note == "the water pump of rack 3"
    assert found.similar_incidents[0].likeness > 0.9
    assert "the water pump" in found.diagnosis.advice
    assert report(write(tmp_path / "d.log", "KeyError: 'new'\n"), incidents=incidents(site)).similar_incidents == ()
    assert len(site.read_text().splitlines()) == 2, "looking up stores nothing"


def test_signatures_come_before_the_past(tmp_path: Path) -> None:
    """Catches a past incident that overrides what the log says."""
    log, site = write(tmp_path / "a.log", OOM), tmp_path / "site.jsonl"
    report(log, incidents=incidents(site, store=True))
    site.write_text(site.read_text().replace("cuda_oom", "nvlink_error"))
    found = report(log, incidents=incidents(site))
    assert found.similar_incidents[0].incident.cause == "nvlink_error" and found.diagnosis.cause == Cause.cuda_oom


def test_incidents_that_are_damaged(tmp_path: Path) -> None:
    """Catches one damaged line that loses all others, and a file that cannot be written and is silently ignored."""
    site = write(tmp_path / "site.jsonl", '{"cause": 3}\nnothing\n{"run": "x", "templates": 7}\n')
    log = write(tmp_path / "a.log", OOM)
    assert report(log, incidents=incidents(site, store=True)).similar_incidents == ()
    assert report(log, incidents=incidents(site)).similar_incidents[0].likeness == pytest.approx(1)
    with pytest.raises(DataError, match="cannot be written"):
        report(log, incidents=incidents(log / "site.jsonl", store=True))


def command(tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    ended = Command(tmp_path, ["diagnose", *arguments]).end()
    return ended.code, ended.out, ended.err


@pytest.mark.slow
def test_as_a_command(tmp_path: Path) -> None:
    """Catches other output mixed with the JSON on standard output, a missing documented key, and wrong exit codes."""
    write(tmp_path / "a.log", OOM)
    code, out, err = command(tmp_path, "logs=[a.log]", "json=true", "templates=1")
    content = json.loads(out)
    assert (code, err) == (0, "")
    assert {"cause", "domain", "restartable", "culprit", "evidence", "advice"} <= set(content)
    assert content["cause"] == "cuda_oom" and content["evidence"][0] == {
        "file": "a.log",
        "line": 1,
        "text": OOM.strip(),
    }
    assert content["language_model"] is None and len(content["templates"]) == 1
    code, out, _ = command(tmp_path, "logs=[a.log]")
    assert code == 0 and "cuda_oom" in out and "does not help" in out and "a.log:1" in out
    assert command(tmp_path, "logs=[none.log]")[0] == 3
    assert command(tmp_path, "lgs=[a.log]")[0] == 2
    assert command(tmp_path)[0] == 2
    assert (REPOSITORY / "docs" / "diagnose.md").is_file()
