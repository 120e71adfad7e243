"""Usage of a site, computed from sacct's output."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from megads.cli.main import run
from megads.errors import ConfigError, DataError
from megads.tools.report.sacct import COMMAND, FIELDS, read_jobs, read_site, sacct_command
from megads.tools.report.site import cause_of, site_json, site_use
from tests.tools.report.sacct_dump import HEADER, line, synthetic_lines, write

HOUR = 3600


def use_of(*lines: str) -> dict[str, object]:
    return site_json(site_use(read_jobs([HEADER, *lines], "dump")), None)


def by_name(use: dict[str, object], kind: str) -> dict[str, dict[str, object]]:
    groups = use["by"]
    assert isinstance(groups, dict)
    return {group["name"]: group for group in groups[kind]}


def test_a_dump_by_hand() -> None:
    """Catches GPUs counted per type and in total, cancelled jobs counted as failed, queue time that includes waiting
    for dependencies, and time of jobs that never started."""
    use = use_of(
        line(1),
        line(2, User="bob", State="FAILED", ExitCode="1:0", ElapsedRaw="3600", Start="2026-03-01T00:10:00"),
        line(3, State="CANCELLED by 1001", ElapsedRaw="0", Start="None", AllocTRES=""),
        line(4, State="PENDING", ElapsedRaw="0", Start="Unknown", AllocTRES="", Eligible="Unknown"),
        line(5, User="bob", State="NODE_FAIL", AllocTRES="cpu=8,gres/gpu:a100=16,gres/gpu:h100=16,node=4"),
        line(6, Eligible="2026-03-01T12:00:00", Start="2026-03-01T12:00:30", AllocTRES="cpu=8,node=1"),
    )
    assert use["jobs"] == 6 and use["gpu_hours"] == 8 * 2 + 8 * 1 + 32 * 2
    assert (use["failed"], use["failed_gpu_hours"]) == (2, 8 + 64)
    assert use["queue_s"]["max"] == 600 and use["queue_s"]["p50"] == 60
    users = by_name(use, "user")
    assert list(users) == ["bob", "ada"], "the most GPU time first"
    assert users["bob"]["gpu_hours"] == 72 and users["ada"]["jobs"] == 4
    causes = by_name(use, "cause")
    assert causes["a node was lost (NODE_FAIL)"]["gpu_hours"] == 64
    assert causes["FAILED, exit 1"]["run_s"]["p50"] == 3600
    sizes = by_name(use, "size")
    assert list(sizes) == ["CPU only", "5-8", "17-64"]
    assert sizes["CPU only"]["queue_s"]["p50"] == 30, "from when it was eligible"
    assert by_name(use, "state")["CANCELLED"]["failed"] == 0
    assert use["hours"] == 12 + 30 / HOUR + 2


@pytest.mark.parametrize(
    ("state", "code", "cause"),
    [
        ("FAILED", "2:0", "FAILED, exit 2"),
        ("FAILED", "0:9", "FAILED, SIGKILL"),
        ("FAILED", "139:0", "FAILED, SIGSEGV"),
        ("FAILED", "0:99", "FAILED, signal 99"),
        ("FAILED", "", "FAILED, exit not known"),
        ("FAILED", "255:0", "FAILED, exit 255"),
        ("TIMEOUT", "0:0", "time limit (TIMEOUT)"),
        ("OUT_OF_MEMORY", "0:125", "out of memory (OUT_OF_MEMORY)"),
    ],
)
def test_causes(state: str, code: str, cause: str) -> None:
    """Catches a signal reported as an exit code, in any of the ways in which SLURM and shells encode one."""
    assert cause_of(state, code) == cause


def test_gpus_in_use_over_time() -> None:
    """Catches jobs counted before their start or after their end: the mean over the intervals must be the GPU time."""
    jobs = read_jobs([HEADER, line(1), line(2, Start="2026-03-01T05:00:00", ElapsedRaw="18000")], "dump")
    use = site_use(jobs)
    part = use.hours / len(use.busy)
    assert use.busy.sum() * part == pytest.approx(use.whole.gpu_hours)
    assert use.busy[0] < 8 and use.busy[int(1 / part)] == pytest.approx(8)
    assert use.busy[int(3 / part)] == pytest.approx(0) and use.busy[-1] == pytest.approx(8)
    assert use.utilization(16) == pytest.approx(use.whole.gpu_hours / use.hours / 16)


def test_bad_lines_are_counted_and_named() -> None:
    """Catches a malformed line that ends the report, or is counted as a job."""
    good = line(1)
    lines = [HEADER, good, "no|job", good.replace("7200", "two hours"), good.replace("2026-03-01T00:01:00", "soon")]
    lines += ["", good.replace("|gpu|", "|a|b|"), line(1).replace("1|ada", "1.batch|ada"), good.replace("7200", "-1")]
    lines += [line(2, Submit="Unknown")]
    jobs = read_jobs(lines, "dump")
    assert len(jobs) == 1 and jobs.steps == 1
    found = {defect: (item.count, item.line) for defect, item in jobs.bad.items()}
    assert found == {
        "not 11 fields": (2, 3),
        "ElapsedRaw is not a number of seconds": (2, 4),
        "Start is not a time": (1, 5),
        "Submit is not known": (1, 10),
    }
    assert jobs.bad["not 11 fields"].text == "no|job"


def test_fields_in_any_order() -> None:
    """Catches columns read by position, and errors on additional fields or on -p's delimiter at line ends."""
    order = [*reversed(FIELDS), "NodeList"]
    values = dict(zip(HEADER.split("|"), line(7).split("|"), strict=True)) | {"NodeList": "node[1-4]"}
    lines = ["|".join(order).replace("JobID", "JobIDRaw") + "|", "|".join(values[name] for name in order) + "|"]
    jobs = read_jobs(lines, "dump")
    assert (len(jobs), jobs.gpus[0], jobs.names["user"]) == (1, 8, ["ada"])
    assert jobs.eligible[0] == jobs.submit[0], "no Eligible: from the submission"


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("", 3, "is empty: sacct prints nothing"),
        (
            "JobID|State|Submit\n1|FAILED|2026-03-01T00:00:00\n",
            3,
            "lacks the fields User, Account, Partition,",
        ),
        (line(1) + "\n", 3, "lacks the fields JobID, User"),
        (HEADER + "\n", 3, "has no job. Write a dump with: sacct --allusers"),
        (HEADER + "\nx|y\n", 3, "has no job (1 lines: not 11 fields)"),
    ],
)
def test_dumps_without_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, expected: str
) -> None:
    """Catches a traceback or an empty page if the dump is empty or lacks fields."""
    dump = tmp_path / "dump.txt"
    dump.write_text(text)
    assert run(["report", f"site={dump}", f"output={tmp_path}/out"]) == code
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches exit 1 for a missing file, run given with site, a site's options without one, and a corrupt archive."""
    assert run(["report", f"site={tmp_path}/none.txt"]) == 2
    assert "there is no such file, and it is not a sacct command" in capsys.readouterr().err
    assert run(["report", f"site={tmp_path}/a,b[1-2] {{c}}.txt"]) == 2
    assert f"{tmp_path}/a,b[1-2] {{c}}.txt: there is no such file" in capsys.readouterr().err, "taken as it stands"
    assert run(["report", f"site={tmp_path}/none.txt", "run=a"]) == 2
    assert "a report is of a run or of a site" in capsys.readouterr().err
    assert run(["report", "run=a", "json=true"]) == 2
    assert "json = True belongs to the report of a site" in capsys.readouterr().err
    (tmp_path / "dump.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be unpacked"):
        read_site(str(tmp_path / "dump.gz"))


def test_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a page that loads external resources or shows a name as markup, and a missing table or picture."""
    pytest.importorskip("matplotlib", reason="the extra [report] is not installed")
    lines = [*synthetic_lines(2000, seed=0), line(2001, User="<script>alert(1)</script>", ElapsedRaw="9000000"), "bad"]
    with gzip.open(tmp_path / "dump.gz", "wt") as file:
        file.write("\n".join(lines))
    assert run(["report", f"site={tmp_path}/dump.gz", f"output={tmp_path}/out", "site_gpus=2048"]) == 0
    assert capsys.readouterr().out == f"report:  {tmp_path}/out/report.html\npicture: {tmp_path}/out/report/busy.png\n"
    page = (tmp_path / "out" / "report.html").read_text()
    assert len(list((tmp_path / "out" / "report").glob("*.png"))) == 7
    for part in ("utilization", "By GPUs per job", "a node was lost (NODE_FAIL)", "FAILED, SIGKILL", "not 11 fields"):
        assert part in page, part
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches numbers formatted for people, and groups that do not add up to the total."""
    dump = write(tmp_path / "dump.txt", *synthetic_lines(3000, seed=1))
    assert run(["report", f"site={dump}", "json=true", "site_gpus=4096"]) == 0
    use = json.loads(capsys.readouterr().out)
    assert use["jobs"] == 3000
    for kind in ("state", "account", "partition", "size"):
        assert sum(group["jobs"] for group in use["by"][kind]) == 3000, kind
        assert sum(group["gpu_hours"] for group in use["by"][kind]) == pytest.approx(use["gpu_hours"]), kind
    assert sum(group["jobs"] for group in use["by"]["cause"]) == use["failed"]
    assert len(use["by"]["user"]) == 20 < use["groups"]["user"]
    assert use["utilization"] == pytest.approx(use["mean_gpus_in_use"] / 4096)


def test_the_command_gets_what_the_report_needs() -> None:
    """Catches options of the user's that are duplicated or overridden."""
    needed = COMMAND.split()[1:]
    assert sacct_command(["sacct"]) == ["sacct", *needed]
    assert sacct_command(["sacct", "--starttime=2026-01-01", "-X"]) == [
        "sacct",
        *needed[:2],
        needed[3],
        "--starttime=2026-01-01",
        "-X",
    ]
    own = ["sacct", "--format=JobID,State", "-P", "--allusers"]
    assert sacct_command(own) == ["sacct", "--allocations", *own[1:]]


def test_the_real_sacct_without_accounting() -> None:
    """Catches an error message of the real command that is lost: without accounting, it says why it fails."""
    if shutil.which("sacct") is None:
        pytest.skip("SLURM is not installed")
    real = subprocess.run(["sacct", "--parsable2"], capture_output=True, text=True, timeout=60, check=False)
    if real.returncode == 0:
        pytest.skip("SLURM's accounting works here")
    with pytest.raises(ConfigError) as caught:
        read_site("sacct")
    assert real.stderr.strip().splitlines()[-1] in str(caught.value)


@pytest.mark.slow
def test_a_million_jobs(tmp_path: Path) -> None:
    """Catches work per job instead of per column: 10^6 jobs take seconds, and no more memory than a few columns."""
    dump = write(tmp_path / "dump.txt", *synthetic_lines(1_000_000, seed=2))
    begin = time.process_time()
    use = site_use(read_site(str(dump)))
    print(f"10^6 jobs, {dump.stat().st_size / 1e6:,.0f} MB: {time.process_time() - begin:.1f} s of CPU")
    assert use.whole.jobs == 1_000_000 and not use.bad_lines
    assert sum(group.jobs for group in use.by["size"]) == 1_000_000
