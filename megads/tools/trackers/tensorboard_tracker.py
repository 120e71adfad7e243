"""The tracker of TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from megads.api import RunDescription
from megads.tools.trackers.feed import details, numbers

# Texts are at step 0, so that no rewind removes them.
_TEXT_STEP = 0


class TensorBoardTracker:
    """Writes TensorBoard event files to <run_dir>/tensorboard; TensorBoard itself need not be running.

    Args:
        run: description of the run.
        step: last step recorded before; later steps in earlier files are rewound.
    """

    rewinds, starts_over = True, False
    first_step: int | None = None

    def __init__(self, run: RunDescription, step: int):
        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"), flush_secs=10)
        self.rewind(step)
        self._add_text("config", f"```yaml\n{yaml.safe_dump(dict(run.config), sort_keys=False)}```")

    def rewind(self, step: int) -> None:
        # TensorBoard discards the values of earlier files from this step on.
        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers(record).items()]
        self._add(Event(step=int(record["step"]), summary=Summary(value=values)))

    def add_event(self, event: Mapping[str, Any]) -> None:
        pass  # `finish` writes all events at once: TensorBoard shows only a sample of the texts of a tag.

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, table: Mapping[str, int | float], events: Sequence[Mapping[str, Any]]) -> None:
        self._add_text("events", _markdown(("time", "event", "details"), [_event_row(event) for event in events]))
        self._add_text("final", _markdown(("name", "value"), [(name, f"{value:.6g}") for name, value in table.items()]))
        self._writer.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.add_event(event)

    def _add_text(self, tag: str, text: str) -> None:
        value = Summary.Value(
            tag=tag,
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(
                dtype=DT_STRING,
                string_val=[text.encode()],
                tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
            ),
        )
        self._add(Event(step=_TEXT_STEP, summary=Summary(value=[value])))


def _event_row(event: Mapping[str, Any]) -> tuple[str, ...]:
    moment = time.strftime("%F %T", time.localtime(event.get("time")))
    return moment, str(event.get("event")), details(event).replace("|", "\\|")


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
