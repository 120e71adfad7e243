"""lm-eval's tasks: found in folders of YAML files, loaded, and evaluated on a model.

lm-eval is imported inside functions, so that it is only needed for evaluations.
"""

from __future__ import annotations

import bisect
import contextlib
import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megads.api import ConfigError, DataError, MegadsError, Progress
from megads.tools.evaluate.config import EvaluateConfig

if TYPE_CHECKING:
    from megads.tools.evaluate.harness import HarnessModel
    from megads.tools.evaluate.scoring import TokenCounter

EXAMPLES = Path(__file__).parent / "tasks"
"""Tasks that are part of megads."""
EXTRA = "pip install 'megads[evaluate]'"
_SHOWN = 8
_FEWSHOT_SEED = 1234
"""lm-eval's default seed."""


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their documents.

    Attributes:
        tasks: lm-eval's task objects by name, including those in groups.
        groups: lm-eval's group objects by name.
        children: names of the direct members of each group.
    """

    tasks: Mapping[str, Any]
    groups: Mapping[str, Any]
    children: Mapping[str, Sequence[str]]


def load_tasks(names: Sequence[str], folder: Path | None, num_fewshot: int | None = None) -> LoadedTasks:
    """Loads tasks by name.

    Args:
        names: names of tasks, groups or tags.
        folder: folder of the user's YAML files; None for only megads' and lm-eval's own tasks. File paths in a task are
            relative to the folder of its YAML file.
        num_fewshot: few-shot examples per document; None uses the tasks' defaults.

    Raises:
        ConfigError: lm-eval is not installed, the folder holds no task, or a task does not exist.
        DataError: a task cannot be loaded, or has no documents.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"tasks are evaluated by lm-eval, which is not installed: {EXTRA}")
    if folder is not None and not any(folder.glob("**/*.yaml")):
        what = "holds no YAML file of a task" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"tasks_folder = {folder}: {what}")
    with _quiet():
        manager = _manager(names, [EXAMPLES, *([folder.absolute()] if folder is not None else [])])
        groups, tasks, children = dict[str, Any](), dict[str, Any](), dict[str, Sequence[str]]()
        for name in names:
            loaded = _load(manager, name)
            tasks |= loaded["tasks"]
            groups |= loaded.get("groups", {})
            children |= loaded.get("group_map", {})
        # The settings that lm-eval's command line applies before an evaluation.
        for name, task in tasks.items():
            if not len(task.eval_docs):
                raise DataError(f"task {name}: has no documents")
            given = task.get_config("num_fewshot")
            if num_fewshot is not None and given != 0:
                task.set_config(key="num_fewshot", value=num_fewshot)
            elif given is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)
    return LoadedTasks(tasks, groups, children)


def _manager(names: Sequence[str], own: list[Path]) -> Any:
    """Loads lm-eval's own thousands of tasks only if one of them is named, since that takes seconds."""
    from lm_eval.tasks import TaskManager, _factory

    class Factory(_factory.TaskFactory):
        """Resolves file paths in a task relative to the folder of its YAML file."""

        def _build_task(self, entry: Any, overrides: dict[str, Any] | None) -> Any:
            with _in_yaml_folder(entry):
                return super()._build_task(entry, overrides)

    manager = TaskManager(include_path=own, include_defaults=False)
    local = list(manager.all_tasks)
    if not set(names) <= set(local):
        with Progress("reading lm-eval's own tasks"):
            manager = TaskManager(include_path=own)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, _SHOWN) or local[:_SHOWN]
            raise ConfigError(f"tasks = {name}: there is no such task; there are {', '.join(near)}")
    manager._factory = Factory(meta=manager.metadata)
    return manager


def _in_yaml_folder(entry: Any) -> contextlib.AbstractContextManager[None]:
    source = entry.yaml_path
    return contextlib.chdir(source.parent) if source is not None else contextlib.nullcontext()


def _load(manager: Any, name: str) -> Any:
    try:
        with _in_yaml_folder(manager.task_index[name]):
            return manager.load([name])
    except MegadsError:
        raise
    # Raised by datasets and lm-eval if there is no first row.
    except (StopIteration, IndexError) as error:
        raise DataError(f"task {name}: has no documents") from error
    # Any error of a YAML file, a function beside it, a file reader or a download.
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise DataError(
            f"task {name}: lm-eval cannot load it: {type(error).__name__}: {first}; a dataset_path of json, csv, "
            "parquet or text reads the files of dataset_kwargs.data_files, relative to the task's YAML file"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses log messages and progress bars of lm-eval and datasets."""
    import datasets

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def lm_eval_results(
    model: HarnessModel,
    loaded: LoadedTasks,
    bootstrap_iters: int,
    *,
    limit: int | None = None,
    samples: dict[str, list[int]] | None = None,
    log_samples: bool = False,
) -> dict[str, Any]:
    """Evaluates tasks by lm-eval, without touching random states of the process.

    Args:
        model: the model to evaluate.
        loaded: the tasks.
        bootstrap_iters: bootstrap iterations for errors of metrics without a formula; 0 for no errors.
        limit: documents per task; None is all.
        samples: indices of the documents per task; None is all.
        log_samples: whether the results have every document and answer.

    Returns:
        The result of lm-eval's `evaluate`.
    """
    from lm_eval.evaluator import evaluate

    tasks = {"tasks": dict(loaded.tasks), "groups": dict(loaded.groups), "group_map": dict(loaded.children)}
    with _quiet():
        results: Any = evaluate(
            model, tasks, limit=limit, samples=samples, bootstrap_iters=bootstrap_iters, log_samples=log_samples
        )
    return dict(results)


def documents_per_task(
    model: HarnessModel, counter: TokenCounter, loaded: LoadedTasks, most_tokens: int | None, limit: int | None
) -> dict[str, int]:
    """Returns how many documents of each task may be evaluated within a limit of tokens.

    Args:
        model: model whose scorer counts tokens.
        counter: the scorer's counter.
        loaded: the tasks, which get equal shares of the tokens.
        most_tokens: maximum number of tokens of all tasks together; None applies only `limit`.
        limit: maximum number of documents per task; None is all.

    Raises:
        ConfigError: one document of a task exceeds its share.
    """
    found = {}
    for name, task in loaded.tasks.items():
        most = min(len(task.eval_docs), len(task.eval_docs) if limit is None else limit)
        share = None if most_tokens is None else most_tokens // len(loaded.tasks)
        # A document takes at least one token.
        most = most if share is None else min(most, max(share, 1))
        with _quiet():
            task.build_all_requests(limit=most, rank=0, world_size=1)
        cost = partial(_tokens_of, model, counter, list(task.instances))
        found[name] = most if share is None else bisect.bisect_right(range(1, most + 1), share, key=cost)
        if not found[name]:
            raise ConfigError(
                f"evaluation.tasks: one document of {name} takes {cost(1):,} tokens where the tasks may take "
                f"{most_tokens:,} together, so as not to take longer than a validation: take tasks with shorter texts "
                "or completions, or a larger validation set (evaluation.max_tokens)"
            )
    return found


def _tokens_of(model: HarnessModel, counter: TokenCounter, instances: Sequence[Any], documents: int) -> int:
    counter.tokens = 0
    for kind, some in _by_kind([instance for instance in instances if instance.doc_id < documents]).items():
        getattr(model, kind)(some)
    return counter.tokens


def _by_kind(instances: Sequence[Any]) -> dict[str, list[Any]]:
    """Groups requests by kind, each repeated as often as lm-eval asks it."""
    kinds: dict[str, list[Any]] = {}
    for instance in instances:
        kinds.setdefault(instance.request_type, []).extend([instance] * (instance.repeats or 1))
    return kinds


def documents_digest(task: Any, limit: int | None) -> str:
    """Returns a hash of the documents that a task's results depend on: evaluated ones, and sources of few-shot
    examples.

    Args:
        task: one of `LoadedTasks.tasks`.
        limit: maximum number of documents; None is all.
    """
    digest = hashlib.sha256()
    with _quiet():
        examples = task.fewshot_docs() if int(task.get_config("num_fewshot") or 0) else ()
        for document in chain(islice(task.eval_docs, limit), examples):
            digest.update(json.dumps(document, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def requests_of(loaded: LoadedTasks, name: str, limit: int | None) -> dict[str, list[Any]]:
    """Returns lm-eval's requests of a task by kind.

    Args:
        loaded: loaded tasks.
        name: name of the task.
        limit: maximum number of documents; None is all.
    """
    task = loaded.tasks[name]
    with _quiet():
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        return _by_kind(task.instances)


def join_results(loaded: LoadedTasks, measured: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Joins the results of individual tasks, and aggregates those of groups.

    Args:
        loaded: the tasks.
        measured: result of `lm_eval_results` by task, with samples.

    Returns:
        The result that lm-eval's `evaluate` returns for all tasks.
    """
    from lm_eval.evaluator_utils import EvalAcc, aggregate_groups

    found = EvalAcc(groups=dict(loaded.groups))
    for name in loaded.tasks:
        one = measured[name]
        found.metrics[name], found.configs[name] = one["results"][name], one["configs"][name]
        found.versions[name], found.num_fewshot[name] = one["versions"][name], one["n-shot"][name]
        found.higher_is_better[name], found.n_samples[name] = one["higher_is_better"][name], one["n-samples"][name]
        found.samples[name] = one["samples"][name]
    with _quiet():
        return dict(aggregate_groups(found)._to_eval_results(samples=found.samples))


def write_results(
    results: dict[str, Any], output: Path, about: Mapping[str, Any], config: EvaluateConfig, seconds: float
) -> Path:
    """Writes lm-eval's files.

    Args:
        results: result of lm-eval's `evaluate`, with samples.
        output: folder of the files, which appear only when complete.
        about: description of the model, for users and lm-eval's records; `pretrained` is its name.
        config: config of the evaluation.
        seconds: duration, for the records.

    Returns:
        Path of the results file.
    """
    from lm_eval.loggers import EvaluationTracker

    partial = output / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with _quiet():
            tracker = EvaluationTracker(output_path=str(partial / "results.json"))
            tracker.general_config_tracker.start_time -= seconds
            tracker.general_config_tracker.log_experiment_args("megads", dict(about), None, None, False)
            samples = results.pop("samples")
            how = {key: getattr(config, key) for key in ("batch_size", "limit", "bootstrap_iters")}
            results["config"] = {"model": "megads", "model_args": dict(about), **how, "fewshot_seed": _FEWSHOT_SEED}
            results["date"], results["lm_eval_version"] = time.time(), importlib.metadata.version("lm_eval")
            # The results include hashes of all samples in either case.
            tracker.save_results_aggregated(results=results, samples=samples)
            for name in results["configs"] if config.log_samples else ():
                tracker.save_results_samples(task_name=name, samples=samples[name])
        files = sorted(partial.glob("*.json*"), key=lambda path: path.suffix == ".json")
        if not files or files[-1].suffix != ".json":
            raise ConfigError(f"output = {output}: lm-eval could not write its results there")
        # The results file appears last.
        for path in files:
            path.replace(output / path.name)
        return output / files[-1].name
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def metric_values(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of lm-eval's results as "<task>/<metric>", followed by the filter's name if there is one."""
    found = {}
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if chosen and isinstance(value, (int, float)) and not isinstance(value, bool):
                found[f"{task}/{metric}" if chosen == "none" else f"{task}/{metric}/{chosen}"] = float(value)
    return found
