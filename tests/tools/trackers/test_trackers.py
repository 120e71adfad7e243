"""Tests the trackers of a run: their failures do not affect it, and no record is lost or logged twice."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.errors import ConfigError
from megads.monitor.trackers import enabled_trackers, wandb_mode
from megads.runtime.config import LoggingConfig, WandbMode
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from megads.tools.trackers.feed import Feed, FeedPosition, FeedUpdate
from tests.command import Command, Ended
from tests.command_server import CommandServer
from tests.monitor.wandb_server import WandbServer


class Run:
    """A run's files, written as rank 0 writes them."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        run_dir.mkdir(exist_ok=True)
        self.metrics, self.events = MetricsWriter(run_dir, True), EventWriter(run_dir)

    def start(self, step: int) -> None:
        self.metrics.drop_after(step)
        self.events.write("start", step=step)

    def steps(self, first: int, last: int, loss: float = 1.0) -> None:
        for step in range(first, last + 1):
            self.metrics.write({"step": step, "loss": loss})
            if step % 5 == 0:
                self.metrics.write({"step": step, "valid/a/loss": loss})


def steps(news: FeedUpdate) -> list[int]:
    return [record["step"] for record in news.metrics if "loss" in record]


def test_tracking_continues_where_it_left_off(tmp_path: Path) -> None:
    """Catches a second start that logs every record again."""
    run, path = Run(tmp_path), tmp_path / "position.json"
    run.start(0)
    run.steps(1, 6)
    feed = Feed(tmp_path, FeedPosition.load(path), rewinds=True)
    assert steps(feed.read()) == [1, 2, 3, 4, 5, 6]
    assert not feed.read()
    feed.position.save(path)
    run.start(6)
    run.steps(7, 8)
    again = Feed(tmp_path, FeedPosition.load(path), rewinds=True).read()
    assert (steps(again), again.rewound_to, len(again.events)) == ([7, 8], None, 1)
    path.write_text("{half a")
    assert steps(Feed(tmp_path, FeedPosition.load(path), rewinds=True).read()) == list(range(1, 9))


@pytest.mark.quick("9")
@pytest.mark.parametrize("regrown_to", [6, 9, 30])
def test_tracking_follows_a_resume_from_an_earlier_step(tmp_path: Path, regrown_to: int) -> None:
    """Catches duplicated or lost steps when a file was truncated and outgrew its old length before the next read."""
    run = Run(tmp_path)
    run.start(0)
    run.steps(1, 9)
    able, unable = (Feed(tmp_path, FeedPosition(), rewinds) for rewinds in (True, False))
    assert steps(able.read()) == steps(unable.read()) == list(range(1, 10))
    run.start(5)
    run.steps(6, regrown_to, loss=2.0)
    news = able.read()
    assert (news.rewound_to, steps(news)) == (5, list(range(6, regrown_to + 1)))
    assert all(record["loss"] == 2.0 for record in news.metrics if "loss" in record)
    news = unable.read()
    assert (news.rewound_to, steps(news)) == (None, list(range(10, regrown_to + 1)))
    validations = [record["step"] for record in news.metrics if "loss" not in record]
    assert validations == list(range(10, regrown_to + 1, 5))
    run.steps(regrown_to + 1, regrown_to + 1)
    assert steps(able.read()) == [regrown_to + 1]
    assert steps(unable.read()) == ([regrown_to + 1] if regrown_to >= 9 else [])


@pytest.mark.parametrize(
    ("event", "fields", "differs"),
    [
        ("config_changed", {"level": "warning"}, True),
        ("config_changed", {"level": "info"}, False),
        ("run_changed", {"level": "warning"}, True),
        ("steps_dropped", {"left": True}, True),
        ("steps_dropped", {"left": False}, False),
    ],
)
def test_abandoned_steps_leave_the_curve(tmp_path: Path, event: str, fields: dict[str, Any], differs: bool) -> None:
    """Catches a curve that keeps the abandoned steps where a tracker cannot remove them, and a second curve of a run
    that repeats its steps bit for bit."""
    run = Run(tmp_path)
    run.start(0)
    run.steps(1, 9)
    feed = Feed(tmp_path, FeedPosition(), rewinds=False, starts_over=True)
    feed.read()
    run.events.write(event, **fields)
    # The event is read before the start that it is about.
    assert feed.read().rewound_to is None
    run.start(5)
    run.steps(6, 7, loss=2.0)
    news = feed.read()
    assert (news.rewound_to, steps(news)) == ((0, [1, 2, 3, 4, 5, 6, 7]) if differs else (None, []))
    assert feed.position.branch == differs
    run.start(6)
    run.steps(7, 10, loss=2.0)
    assert (feed.read().rewound_to, feed.position.step, feed.position.branch) == (None, 10, differs)


def test_discarded_steps_are_not_logged(tmp_path: Path) -> None:
    """Catches stale steps, read just before a resume discarded them, that are still logged."""
    run = Run(tmp_path)
    run.start(0)
    run.steps(1, 9)
    feed = Feed(tmp_path, FeedPosition(), rewinds=False)
    read = feed._metrics.read

    def resume_in_between() -> list[dict[str, object]]:
        records = read()
        feed._metrics.read = read  # type: ignore[method-assign]
        run.start(5)
        run.steps(6, 7, loss=2.0)
        return records

    feed._metrics.read = resume_in_between  # type: ignore[method-assign]
    news = feed.read()
    assert steps(news) == [1, 2, 3, 4, 5, 6, 7]
    assert [record["loss"] for record in news.metrics if record["step"] == 6] == [2.0]


def test_steps_that_never_arrived_are_sent_again(tmp_path: Path) -> None:
    """Catches steps that were sent but never arrived, and are not sent again."""
    run = Run(tmp_path)
    run.start(0)
    run.steps(1, 9)
    feed = Feed(tmp_path, FeedPosition(), rewinds=False)
    feed.read()
    feed.resume_after(9)
    assert not feed.read()
    feed.resume_after(4)
    assert steps(feed.read()) == [5, 6, 7, 8, 9]


REPOSITORY = Path(__file__).parents[3]
STEPS = 30
PATIENCE_S = 60.0
"""logging.flush_s: the tracker processes have a low priority, and import wandb late on a busy machine."""


def frozen_run(run_dir: Path, steps: int = STEPS, **wandb: Any) -> RootConfig:
    """Freezes the config of a run into its directory."""
    config = RootConfig()
    config.run.id, config.run.dir, config.train.steps = run_dir.name, str(run_dir), steps
    config.logging.wandb.mode = wandb.get("mode", WandbMode.disabled)
    config.logging.tensorboard.enabled = wandb.get("tensorboard", False)
    config.logging.mlflow.enabled, config.logging.mlflow.uri = "mlflow" in wandb, wandb.get("mlflow")
    config.logging.flush_s = wandb.get("flush_s", PATIENCE_S)
    config.logging.wandb.tags = ["a tag"]
    run_dir.mkdir(parents=True, exist_ok=True)
    freeze(config, run_dir / "config.yaml")
    return config


class Launch(Protocol):
    """Runs a launcher with a stand-in rank until it exits, with `environment` added to its own."""

    def __call__(self, run_dir: Path, **environment: str) -> Ended: ...


@pytest.fixture
def launch(command_server: CommandServer) -> Launch:
    def run(run_dir: Path, **environment: str) -> Ended:
        with closing(launcher_of(run_dir, command_server, environment)) as launcher:
            return launcher.end(120)

    return run


def launcher_of(run_dir: Path, server: CommandServer, environment: Mapping[str, str] = {}) -> Command:
    words = (str(run_dir), "step_as_planned")
    return Command(REPOSITORY, words, "tests.launch.small_launch", environment, server)


def warnings_of(run_dir: Path) -> list[str]:
    return [e["message"] for e in read_json_lines(run_dir / "events.jsonl") if e["event"] == "tracker_failed"]


def no_process_left(run_dir: Path) -> bool:
    """Whether no process of the tracker or of wandb survives."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        lines = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
        if not any(str(run_dir) in line for line in lines):
            return True
        time.sleep(0.1)
    return False


def wandb_records(path: Path) -> Iterator[Any]:
    """Yields the protobuf records of a .wandb file: a LevelDB log behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, payload = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        payload += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield Record.FromString(payload)
            payload = b""


def wandb_history(run_dir: Path) -> list[tuple[int, str]]:
    """Returns (step, value) of train/loss over all offline files of a run, oldest first."""
    files = sorted(run_dir.glob("wandb/*run-*/run-*.wandb"), key=lambda path: path.parent.name.split("run-")[1])
    return [row for path in files for row in history_of(path)]


def history_of(path: Path) -> list[tuple[int, str]]:
    """Returns (step, value) of train/loss of an offline file."""
    rows = []
    for record in wandb_records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in items:
                rows.append((int(items["_step"]), items["train/loss"]))
    return rows


def tensorboard_scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def tensorboard_text(run_dir: Path, tag: str) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return reader.Tensors(tag)[-1].tensor_proto.string_val[0].decode()


def losses(run_dir: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_json_lines(run_dir / "metrics.jsonl") if "loss" in r}


def test_trackers_are_off_without_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches records that nobody asked for, a core install that requires wandb, and a wanted tracker that is missing
    without an error."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert enabled_trackers(LoggingConfig()) == {}
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert enabled_trackers(LoggingConfig()) == {"wandb": WandbMode.offline}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert enabled_trackers(LoggingConfig()) == {}
    config = LoggingConfig()
    config.wandb.mode = WandbMode.online
    with pytest.raises(ConfigError, match=r"pip install 'megads\[wandb\]'"):
        enabled_trackers(config)
    config = LoggingConfig()
    config.tensorboard.enabled = True
    with pytest.raises(ConfigError, match=r"pip install 'megads\[tensorboard\]'"):
        enabled_trackers(config)
    config = LoggingConfig()
    config.mlflow.enabled = True
    with pytest.raises(ConfigError, match=r"pip install 'megads\[mlflow\]'"):
        enabled_trackers(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [("project", "a" * 129), ("project", "a?b"), ("project", ""), ("tags", ["a" * 65]), ("tags", [""])],
)
def test_names_that_wandb_refuses_are_refused_before_the_start(key: str, value: Any) -> None:
    """Catches a tag or a project that wandb refuses once the run trains."""
    config = LoggingConfig()
    setattr(config.wandb, key, value)
    with pytest.raises(ConfigError, match=f"logging.wandb.{key}"):
        config.check()


@pytest.mark.parametrize(
    ("value", "mode"), [("disabled", "disabled"), ("online", "online"), ("dryrun", "offline"), ("offline", "offline")]
)
def test_wandb_mode_of_the_environment_is_a_default(monkeypatch: pytest.MonkeyPatch, value: str, mode: str) -> None:
    """Catches a WANDB_MODE that is ignored, or that overrides an explicit key."""
    monkeypatch.setenv("WANDB_MODE", value)
    config = LoggingConfig()
    assert wandb_mode(config) == mode
    config.wandb.mode = WandbMode.disabled
    assert wandb_mode(config) == "disabled"


def test_a_wandb_folder_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the wandb/ folder of an earlier run, in the working directory, mistaken for the package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert enabled_trackers(LoggingConfig()) == {}


@pytest.mark.slow
@pytest.mark.distributed
def test_wandb_and_tensorboard_hold_everything_after_a_kill_and_a_resume(launch: Launch, tmp_path: Path) -> None:
    """Catches steps lost or duplicated over a resume, another run id, and a missing config, events or final table."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    run = tmp_path / "a-run"
    frozen_run(run, mode=WandbMode.offline, tensorboard=True)
    (run / "die").touch()
    assert launch(run).code == 10
    assert max(losses(run)) == 7
    done = launch(run)
    assert (done.code, done.err) == (0, "")
    assert warnings_of(run) == []
    truth = losses(run)
    assert sorted(truth) == list(range(1, STEPS + 1))
    history = wandb_history(run)
    assert [step for step, _ in history] == sorted(truth)
    assert all(float(value) == truth[step] for step, value in history)
    scalars = tensorboard_scalars(run, "train/loss")
    assert [step for step, _ in scalars] == sorted(truth)
    assert all(value == pytest.approx(truth[step], rel=1e-6) for step, value in scalars)
    assert [step for step, _ in tensorboard_scalars(run, "valid/held_out/loss")] == [10, 20, 30]
    files = list(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and all(path.name == "run-a-run.wandb" for path in files)
    records = list(wandb_records(max(files)))
    configs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert configs[0].run_id == "a-run" and list(configs[0].tags) == ["a tag"]
    assert any(u.key == "train" and '"seq_len"' in u.value_json for u in configs[0].config.update)
    summary = {"/".join([u.key, *u.nested_key]) for r in records for u in r.summary.update}
    assert any("final/loss" in key for key in summary)
    tables = [path.read_text() for path in run.glob("wandb/*/files/media/html/*.html")]
    assert any("checkpoint_saved" in text for text in tables)
    assert "seq_len: 128" in tensorboard_text(run, "config")
    assert "checkpoint_saved" in tensorboard_text(run, "events")
    assert "| steps | 30 |" in tensorboard_text(run, "final")
    assert no_process_left(run)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_branch_is_its_own_wandb_run(tmp_path: Path) -> None:
    """Catches abandoned steps that stay in the curve of wandb, and a branch that begins in the middle."""
    pytest.importorskip("wandb")
    run = Run(tmp_path / "a-run")
    (run.run_dir / "logs").mkdir(parents=True)
    frozen_run(run.run_dir, mode=WandbMode.offline)
    run.start(0)
    run.steps(1, 9)
    track = [sys.executable, "-m", "megads.tools.trackers.process", str(run.run_dir)]
    subprocess.run(track, check=True, timeout=120)
    run.events.write("config_changed", level="warning")
    run.start(5)
    run.steps(6, 8, loss=2.0)
    subprocess.run(track, check=True, timeout=120)
    histories = {path.name: history_of(path) for path in run.run_dir.glob("wandb/*run-*/run-*.wandb")}
    whole = [(step, 1.0) for step in range(1, 6)] + [(step, 2.0) for step in range(6, 9)]
    assert [(step, float(loss)) for step, loss in histories["run-a-run-branch1.wandb"]] == whole
    assert "tracker" in [event["event"] for event in read_json_lines(run.run_dir / "events.jsonl")]


@pytest.mark.slow
@pytest.mark.distributed
def test_online_goes_on_with_the_run_that_the_server_has(launch: Launch, tmp_path: Path) -> None:
    """Catches a resumed run that creates a second wandb run, repeats steps or loses those that never arrived."""
    pytest.importorskip("wandb")
    run = tmp_path / "a-run"
    frozen_run(run, mode=WandbMode.online)
    with WandbServer() as server:
        environment = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
        (run / "die").touch()
        assert launch(run, **environment).code == 10
        assert [row["_step"] for row in server.runs["a-run"]] == list(range(1, 8))
        del server.runs["a-run"][4:]
        done = launch(run, **environment)
    assert (done.code, done.err, warnings_of(run)) == (0, "", [])
    assert list(server.runs) == ["a-run"]
    rows = server.runs["a-run"]
    assert [row["_step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["train/loss"] for row in rows] == [pytest.approx(loss) for loss in losses(run).values()]
    assert any("events" in path and b"checkpoint_saved" in text for path, text in server.files.items())
    assert any("final" in path and b"exit_code" in text for path, text in server.files.items())


def refusing() -> tuple[int, Callable[[], None]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1], lambda: None


def serving(answer: bytes | None) -> tuple[int, Callable[[], None]]:
    """Starts a server that accepts every connection and sends `answer`, or never answers if it is None."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                connections.append(connection)
                if answer is not None:
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.close()
            except OSError:
                if listener.fileno() < 0:
                    return

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1], listener.close


BAD_SERVERS: dict[str, Callable[[], tuple[int, Callable[[], None]]]] = {
    "refuses": refusing,
    "never answers": lambda: serving(None),
    "answers garbage": lambda: serving(b"\x00\xff garbage \r\n\r\n" * 20),
    "is no wandb": lambda: serving(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"),
}


@pytest.mark.slow
@pytest.mark.fault(17)
@pytest.mark.distributed
@pytest.mark.parametrize("server", BAD_SERVERS)
def test_a_bad_wandb_server_does_not_hold_up_the_run(launch: Launch, tmp_path: Path, server: str) -> None:
    """Catches a step, an exit code or a shutdown that depends on wandb's server."""
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    frozen_run(run, mode=WandbMode.online)
    port, close = BAD_SERVERS[server]()
    try:
        done = launch(run, WANDB_BASE_URL=f"http://127.0.0.1:{port}", WANDB_API_KEY="a" * 40)
        left = time.time()
    finally:
        close()
    assert (done.code, done.err) == (0, "")
    times = [r["step_time_s"] for r in read_json_lines(run / "metrics.jsonl") if "step_time_s" in r]
    assert len(times) == STEPS and sorted(times)[STEPS // 2] < 0.5
    events = list(read_json_lines(run / "events.jsonl"))
    exited = next(e["time"] for e in events if e["event"] == "exit")
    assert left - exited < PATIENCE_S + 5.0
    assert len(warnings_of(run)) == 1
    assert "wandb" not in (run / "logs" / "rank_00000.log").read_text()
    assert [step for step, _ in wandb_history(run)] == list(range(1, STEPS + 1)), "recorded offline instead"
    assert no_process_left(run)


@pytest.mark.fault(17)
@pytest.mark.quick("dead")
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stopped"])
def test_a_dead_or_stopped_tracker_does_not_hold_up_the_run(
    command_server: CommandServer, tmp_path: Path, number: signal.Signals
) -> None:
    """Catches a launcher that waits for a dead or stopped tracker, or exits with it."""
    run = tmp_path / "run"
    frozen_run(run, steps=60, tensorboard=True, flush_s=0.5)
    with closing(launcher_of(run, command_server)) as launcher:
        launcher.wait_for(lambda: bool(losses(run)))
        for child in launcher.processes():
            if "megads.tools.trackers.process" in child.cmdline():
                child.send_signal(number)
        code, out, _ = launcher.end()
    assert code == 0
    assert sorted(losses(run)) == list(range(1, 61))
    assert len(warnings_of(run)) == 1
    assert out.count("tracker failed: the tracker process") == 1
    ended = [event["time"] for event in read_json_lines(run / "events.jsonl")]
    assert ended[-1] - next(e["time"] for e in read_json_lines(run / "events.jsonl") if e["event"] == "exit") < 5
    by_hand = subprocess.run(
        [sys.executable, "-m", "megads.tools.trackers.process", str(run)], cwd=REPOSITORY, timeout=60, check=False
    )
    assert by_hand.returncode == 0
    assert [step for step, _ in tensorboard_scalars(run, "train/loss")] == list(range(1, 61))
