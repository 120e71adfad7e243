"""A run in a notebook: how it ended, its model, config, metrics and data."""

from __future__ import annotations

import copy
import html
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from tokenizers import Tokenizer
from torch import Tensor

from megads.api import (
    CONFIG_FILE,
    EVENTS_FILE,
    EXIT_CODES,
    EXIT_OK,
    GPT,
    MANIFEST_FILE,
    METRICS_FILE,
    BatchInfo,
    CheckpointError,
    CheckpointHandle,
    ConfigError,
    FoundTokenizer,
    GenerationSpeed,
    MegadsError,
    RootConfig,
    Sampling,
    TextGenerator,
    TrainSource,
    ValidationSource,
    WeightPrecision,
    choose_device,
    choose_dtype,
    config_of_start,
    import_plugins,
    list_checkpoints,
    load_frozen,
    load_unsharded,
    open_checkpoint,
    open_run_data,
    read_json_lines,
    read_record,
)
from megads.tools.generate import checkpoint_tokenizer, run_path

if TYPE_CHECKING:
    import pandas

_SHOWN_ROWS = 10
_SHOWN_WIDTH = 110


class LoadedModel:
    """The unsharded model of a checkpoint, in evaluation mode.

    Attributes:
        model: the module; returns logits for tokens [b, s] and a BatchInfo.
        folder: folder of the checkpoint.
        step: number of training steps.
    """

    def __init__(self, model: GPT, handle: CheckpointHandle) -> None:
        self.model, self.folder, self.step = model, handle.folder, handle.state["step"]
        self._handle = handle

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @cached_property
    def config(self) -> RootConfig:
        """The config of the start that wrote the checkpoint.

        Raises:
            CheckpointError: the run does not have that config.
        """
        found = config_of_start(self._run_dir, self._handle.manifest.run.config_digest)
        if found is None:
            raise CheckpointError(
                f"{self._run_dir} does not have the config with which {self.folder.name} was written; "
                f"its model is {self.model.config}"
            )
        return found

    @property
    def tokenizer(self) -> Tokenizer:
        """The Hugging Face tokenizer that the run was trained with."""
        return self._found.tokenizer

    @torch.no_grad()
    def logits(self, ids_bs: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Returns the next-token logits at each position.

        Args:
            ids_bs: token ids [b, s].

        Returns:
            Logits [b, s, vocabulary] in the model's dtype.

        Raises:
            ConfigError: the ids do not have shape [b, s], or are outside the vocabulary.
        """
        tokens_bs = torch.as_tensor(ids_bs, dtype=torch.int64, device=self.device)
        vocabulary = self.model.config.vocabulary
        if tokens_bs.dim() != 2 or not tokens_bs.numel():
            raise ConfigError(f"ids_bs has shape {list(tokens_bs.shape)}: want [batch, sequence], not empty")
        if int(tokens_bs.min()) < 0 or int(tokens_bs.max()) >= vocabulary:
            raise ConfigError(f"ids_bs ranges from {tokens_bs.min()} to {tokens_bs.max()}: want 0 to {vocabulary - 1}")
        logits_bsv: Tensor = self.model(tokens_bs, BatchInfo(torch.arange(len(tokens_bs), device=self.device)))
        return logits_bsv

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 0,
        seed: int = 1234,
        end_of_document: str = "auto",
    ) -> str:
        """Returns the completion of a prompt; the arguments are the keys of `megads generate`.

        Raises:
            ConfigError: the prompt does not fit the model.
        """
        sampling = Sampling(temperature, top_p, top_k, seed)
        # The generator adds KV caches to its model, so it gets a copy that shares the weights.
        shared = {id(weight): weight for weight in self.model.parameters()}
        model = copy.deepcopy(self.model, dict(shared))
        generator = TextGenerator(model, self._found, sampling, max_new_tokens, end_of_document)
        (completion,) = generator.complete_all([generator.prompt(prompt)], 1, GenerationSpeed())
        return completion.text

    @property
    def _run_dir(self) -> Path:
        return self.folder.parent.parent

    @cached_property
    def _found(self) -> FoundTokenizer:
        return checkpoint_tokenizer(self._handle)


def load_model(
    run: str | Path, *, dtype: str | torch.dtype = "auto", device: str = "auto", plugins: Sequence[str] = ()
) -> LoadedModel:
    """Loads the unsharded model of a run or checkpoint, regardless of its layout.

    Args:
        run: folder of a run or its name in runs/, whose newest usable checkpoint is loaded; or folder of a checkpoint.
        dtype: dtype of weights and activations: bf16, fp32, a torch dtype, or auto (bf16 on a GPU, fp32 on a CPU).
        device: auto (a GPU if there is one), cpu, cuda or cuda:<number>.
        plugins: modules to import, for a model whose block comes from a plugin. A checkpoint imports nothing itself.

    Raises:
        CheckpointError: there is no usable checkpoint.
        ConfigError: the device or dtype does not exist, or the block's plugin is not imported.
    """
    import_plugins(plugins)
    where = choose_device(device)
    if isinstance(dtype, str):
        if dtype not in list(WeightPrecision):
            raise ConfigError(f"dtype = {dtype}: want {', '.join(WeightPrecision)}, or a torch dtype")
        dtype = choose_dtype(WeightPrecision(dtype), where)
    handle = open_checkpoint(run_path(str(run)))
    return LoadedModel(load_unsharded(handle, where, dtype), handle)


def read_metrics(run: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl: one per step with the loss, one per validation with valid/<name>/loss."""
    return list(read_json_lines(run_path(str(run)) / METRICS_FILE))


def read_events(run: str | Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's events.jsonl: starts, stops, checkpoints and faults with their causes."""
    return list(read_json_lines(run_path(str(run)) / EVENTS_FILE))


def read_config(run: str | Path) -> RootConfig:
    """Returns the config of a run's last start. Keys that its version lacks take their defaults; imports no plugins.

    Raises:
        ConfigError: the config is missing, or does not fit this version.
    """
    return load_frozen(run_path(str(run)) / CONFIG_FILE, complete=False)


class RunData(NamedTuple):
    """Data of a run.

    Attributes:
        train: training samples, an endless sequence; `megads why` prints those of a step.
        valid: validation windows by name of the validation set.
    """

    train: TrainSource
    valid: Mapping[str, ValidationSource]


def read_data(run: str | Path) -> RunData:
    """Opens the data of a run; paths are relative to the folder where the run was started.

    Raises:
        DataError: the data is missing, damaged, or not the data that the run was trained on.
    """
    folder = run_path(str(run))
    return RunData(*open_run_data(read_config(folder), read_record(folder)))


class MetricsTable:
    """metrics.jsonl by column: a row per step. A value is None where its step has none, such as that of a validation.

    Args:
        columns: the values by name, lists of one length.

    Example:
        >>> table = run.metrics
        >>> plt.plot(table["step"], table["loss"])
        >>> table[["step", "valid/held_out/loss"]].dropna()
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._columns = {name: list(values) for name, values in columns.items()}
        assert len(set(map(len, self._columns.values()))) <= 1

    @classmethod
    def of_lines(cls, lines: Sequence[Mapping[str, Any]]) -> MetricsTable:
        """Makes the table of a run's lines, of which one step may have several."""
        rows: dict[int, dict[str, Any]] = {}
        for line in lines:
            rows.setdefault(line["step"], {}).update(line)
        names = dict.fromkeys(name for line in lines for name in line)
        return cls({name: [row.get(name) for row in rows.values()] for name in names})

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self._columns.values()), ()))

    @overload
    def __getitem__(self, name: str) -> list[Any]: ...

    @overload
    def __getitem__(self, name: list[str]) -> MetricsTable: ...

    def __getitem__(self, name: str | list[str]) -> list[Any] | MetricsTable:
        """Returns the values of a column, or the table of some columns.

        Raises:
            KeyError: there is no such column.
        """
        if isinstance(name, list):
            return MetricsTable({each: self[each] for each in name})
        if name not in self._columns:
            raise KeyError(f"{name}; the columns are {', '.join(self._columns)}")
        return list(self._columns[name])

    def dropna(self) -> MetricsTable:
        """Returns the rows that have a value in every column."""
        kept = [row for row in self._rows() if None not in row]
        return MetricsTable({name: [row[place] for row in kept] for place, name in enumerate(self._columns)})

    def tail(self, rows: int = 5) -> MetricsTable:
        """Returns the last rows."""
        return MetricsTable({name: values[max(len(self) - rows, 0) :] for name, values in self._columns.items()})

    def to_dict(self) -> dict[str, list[Any]]:
        """Returns the columns by name."""
        return {name: list(values) for name, values in self._columns.items()}

    def to_pandas(self) -> pandas.DataFrame:
        """Returns the table as a DataFrame, indexed by step.

        Raises:
            ImportError: pandas is not installed; megads does not need it.
        """
        import pandas

        frame = pandas.DataFrame(self.to_dict())
        return frame.set_index("step") if "step" in frame else frame

    def __repr__(self) -> str:
        """The last rows, with as many columns as fit a line."""
        lines = [""] * (min(len(self), _SHOWN_ROWS) + 1)
        for name, values in self._columns.items():
            cells = [name, *map(_cell, values[-_SHOWN_ROWS:])]
            width = max(map(len, cells)) + 2
            if lines[0] and len(lines[0]) + width > _SHOWN_WIDTH:
                lines = [f"{line}  ..." for line in lines]
                break
            lines = [f"{line}{cell:>{width}}" for line, cell in zip(lines, cells, strict=True)]
        return "\n".join([*lines, self._size()])

    def _repr_html_(self) -> str:
        """The last rows, as a notebook shows them."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self._columns)
        rows = [
            "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row) for row in self.tail(_SHOWN_ROWS)._rows()
        ]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div style="overflow-x: auto">{table}</div><p>{self._size()}</p>'

    def _rows(self) -> list[tuple[Any, ...]]:
        return list(zip(*self._columns.values(), strict=True))

    def _size(self) -> str:
        last = f"; the last {_SHOWN_ROWS}" if len(self) > _SHOWN_ROWS else ""
        return f"{len(self)} rows, {len(self._columns)} columns{last}"


def _cell(value: Any) -> str:
    """Returns a value of a table as it is shown."""
    if value is None:
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


class RunHandle:
    """A run, as `megads.train` returns it; its files are read when they are asked for.

    Args:
        run: folder of the run or its name in runs/.
        exit_code: how its last start ended: 0 finished; 5 stopped on request, 6 preempted or out of time, both after
            saving. None if it was not started here.

    Attributes:
        run_dir: the run directory.
    """

    def __init__(self, run: str | os.PathLike[str], exit_code: int | None = None) -> None:
        self.run_dir = run_path(str(run)) if exit_code is None else Path(run)
        self.exit_code = exit_code

    @property
    def metrics(self) -> MetricsTable:
        """The run's metrics by step."""
        return MetricsTable.of_lines(read_metrics(self.run_dir))

    @property
    def events(self) -> list[dict[str, Any]]:
        """Lines of the run's events.jsonl, see `read_events`."""
        return read_events(self.run_dir)

    @property
    def config(self) -> RootConfig:
        """Config of the run's last start, see `read_config`."""
        return read_config(self.run_dir)

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the newest committed checkpoint; None if there is none."""
        found = [path for path in list_checkpoints(self.run_dir).values() if (path / MANIFEST_FILE).exists()]
        return found[-1] if found else None

    def load_model(self, **options: Any) -> LoadedModel:
        """Loads the unsharded model of the newest usable checkpoint; the options are those of `load_model`.

        Raises:
            CheckpointError: there is no usable checkpoint.
        """
        return load_model(self.run_dir, **options)

    def __fspath__(self) -> str:
        """The run directory: the handle may be given wherever a path is."""
        return str(self.run_dir)

    def __str__(self) -> str:
        return str(self.run_dir)

    def __repr__(self) -> str:
        if self.exit_code is None:
            return f"run {self.run_dir}"
        again = "" if self.exit_code == EXIT_OK else "; the same call continues it"
        return f"run {self.run_dir}: {EXIT_CODES[self.exit_code]}{again}"


class RunFailed(MegadsError):
    """A run that `megads.train` started has failed; its output and `megads diagnose` say more.

    Attributes:
        run: the run.
        exit_code: one of the documented exit codes.
    """

    def __init__(self, run: RunHandle) -> None:
        self.run, self.exit_code = run, run.exit_code or self.exit_code
        causes = [event["message"] for event in run.events if event["event"] == "failure"]
        cause = f": {causes[-1]}" if causes else ""
        super().__init__(f"{run.run_dir} ended with exit code {self.exit_code} ({EXIT_CODES[self.exit_code]}){cause}")
