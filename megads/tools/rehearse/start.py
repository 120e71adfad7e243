"""`megads train` inside a rehearsed job: checks the requested config without running it, and trains a scaled one."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from megads.api import (
    AXES,
    GRADIENT_STAGES,
    Allocation,
    ClusterKind,
    ConfigError,
    DataConfig,
    DatasetConfig,
    EvaluationConfig,
    LoggingConfig,
    Machine,
    MegadsError,
    ModelConfig,
    ParallelConfig,
    Recompute,
    RootConfig,
    ScheduleName,
    SlurmJob,
    TextTokenizerConfig,
    TrainConfig,
    WandbConfig,
    WandbMode,
    resolve_auto,
    run_planner,
)
from megads.config.root import check_config
from megads.launch.initial_weights import find_initial_weights
from megads.launch.preflight import locate_data, place, require_data
from megads.launch.slurm_ranks import assign_ranks_to_nodes
from megads.optim.schedule import ScheduleConfig
from megads.runtime.config import ClusterConfig
from megads.runtime.slurm import Node
from megads.tools.doctor.finding import Finding, Status, note, ok, problem
from megads.tools.plan.run_plan import memory_text
from megads.tools.rehearse.notes import VOCAB_SIZE, Orders, RehearsedStart, read_orders, write_start
from megads.tools.rehearse.paper import of_this_machine, why_unwritable

_AT_START = "the job would fail at its start, after waiting in the queue"


def rehearsed(config: RootConfig, choices: Mapping[str, str | None], folder: Path) -> RootConfig:
    """Checks a config without running it, records the findings and returns the scaled config to train instead.

    Args:
        config: the composed config.
        choices: chosen option of each config group.
        folder: the rehearsal's folder.

    Raises:
        ConfigError: there is a problem, so nothing is trained.
    """
    orders = read_orders(folder)

    def sizes() -> str:
        check_config(config)
        return f"{config.model.num_layers} layers, hidden {config.model.hidden_size}, {config.parallel.product}"

    found = [_judge("sizes", sizes), _judge("layout", lambda: _layout(config, orders))]
    known = config
    try:
        config, data = locate_data(config)
        known = data.planned(config)
        if data.preparation is None:
            require_data(config)
        found.append(ok("data", data.text))
    except MegadsError as error:
        found.append(problem("data", str(error), _AT_START, "see the message; paths must be visible on the nodes"))
    found += [_memory(known, orders), _resume(config)]
    config = place(config, choices)
    run_dir = Path(str(config.run.dir))
    if reason := why_unwritable(run_dir):
        remedy = "run.dir=<a folder that all nodes can write to>"
        found.append(problem("run folder", f"{run_dir} {reason}", _AT_START, remedy))
    else:
        found.append(ok("run folder", f"{run_dir} can be written to"))
    if config.checkpoint.init_from is not None:
        found.append(_judge("weights", lambda: "; ".join(find_initial_weights(config, config.model)[1])))
    if orders.elsewhere:
        found = of_this_machine(found)
    start = RehearsedStart(tuple(found), str(run_dir))
    if orders.refused or any(finding.status is Status.problem for finding in found):
        write_start(folder, start)
        raise ConfigError("a check failed before training: see the table of megads rehearse")
    # Starts with different run directories get different folders; starts with the same one share a folder.
    name = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:12]
    scaled = scaled_run(config, orders, folder / "runs" / name)
    layout = f"{scaled.parallel.world_size} ranks = {scaled.parallel.product}"
    write_start(folder, dataclasses.replace(start, scaled_run=str(scaled.run.dir), layout=layout))
    return scaled


def _judge(check: str, look: Callable[[], str]) -> Finding:
    """Returns an ok finding, or a problem if the check raises a MegadsError, whose message names the remedy."""
    try:
        return ok(check, look())
    except MegadsError as error:
        return problem(check, str(error), _AT_START, "see the message")


def _layout(config: RootConfig, orders: Orders) -> str:
    """Checks that the ranks fit the requested nodes x GPUs."""
    if config.cluster.kind is not ClusterKind.slurm:
        raise ConfigError(
            "cluster.kind = local inside a batch script: only its first node would train, and exit 6 would not requeue "
            "the job; use megads train cluster=slurm"
        )
    nodes = tuple(Node(f"node{number}", "") for number in range(1, orders.nodes + 1))
    placement = assign_ranks_to_nodes(config, Allocation(SlurmJob("", 0, ""), nodes, orders.gpus_per_node))
    return f"{config.parallel.world_size} ranks, {placement.ranks_per_node} on each of {orders.nodes} nodes"


def _memory(config: RootConfig, orders: Orders) -> Finding:
    """Checks that the planned memory fits the requested GPUs."""
    # What is asked for on the command line is meant for this rehearsal, whatever the experiment sets.
    size = orders.gpu_memory_gib or config.cluster.gpu_memory_gib
    if not orders.gpus_per_node:
        remedy = "megads plan device=cpu prints memory per rank"
        return note("memory", "not checked: the job requests no GPUs", "", remedy)
    if size is None:
        remedy = "set cluster.gpu_memory_gib=80, or megads rehearse --gpu-memory-gib 80"
        return note("memory", "not checked: the GPU's memory is unknown", "", remedy)
    if config.model.vocab_size is None:
        return note("memory", "not checked: the vocabulary size is unknown without the data", "", "correct the data")
    machine = Machine(int(size * 2**30), per_gpu=True, ranks_per_gpu=config.cluster.ranks_per_gpu)

    def look() -> str:
        chosen, _ = resolve_auto(config, machine)
        run_planner().refuse_unfit(chosen, machine)
        return memory_text(chosen, machine)

    return _judge("memory", look)


def _resume(config: RootConfig) -> Finding:
    """Checks from the config alone whether a restart resumes."""
    load = config.checkpoint.load
    if load not in ("auto", "none") and not Path(load).is_dir():
        return problem("checkpoints", f"checkpoint.load = {load}: there is no such folder", _AT_START, "correct it")
    if load == "none":
        cost = "a resubmitted job starts from step 0; a requeued job or the next job of a chain resumes"
        return note("checkpoints", "checkpoint.load = none", cost, "checkpoint.load=auto")
    if not config.checkpoint.every_steps and not math.isfinite(config.checkpoint.interval_s()):
        cost = "a node failure, which sends no signal, loses everything since the start of the job"
        return note("checkpoints", "checkpoint.every_minutes = 0", cost, "remove it, or set checkpoint.every_steps")
    return ok("checkpoints", config.checkpoint.when)


_SEQ_LEN = 32
_WINDOW = 8
_MICRO_BATCHES = 2


def scaled_parallel(parallel: ParallelConfig, max_ranks: int) -> ParallelConfig:
    """Returns a layout in which every axis above 1 becomes 2, as far as `max_ranks` allows.

    Args:
        parallel: the requested layout.
        max_ranks: most ranks; 2 or more.
    """
    sizes = {axis: min(2, getattr(parallel, axis)) for axis in AXES}
    # The order in which axes are reduced to 1. ZeRO stages that shard gradients need data-parallel ranks; otherwise
    # data parallelism is the axis least worth testing.
    first = ("tp", "pp", "cp", "dp") if parallel.zero_stage in GRADIENT_STAGES else ("dp", "cp", "tp", "pp")
    for axis in first:
        if ParallelConfig(**sizes).world_size > max_ranks:
            sizes[axis] = 1
    recompute = Recompute.none if parallel.recompute is Recompute.auto else parallel.recompute
    return ParallelConfig(
        **sizes,
        # With one stage the schedule has no effect.
        schedule=parallel.schedule if sizes["pp"] > 1 else ScheduleName["1f1b"],
        sequence_parallel=parallel.sequence_parallel,
        rank_order=parallel.rank_order,
        zero_stage=parallel.zero_stage,
        recompute=recompute,
    )


def scaled_run(config: RootConfig, orders: Orders, run_dir: Path) -> RootConfig:
    """Returns the scaled config that is trained instead of a run.

    It keeps the position embedding, attention, norm, MLP and block types, dropout, optimizer, precision, ZeRO stage,
    schedule, recomputation, checkpoint settings and run name. All sizes are small; wandb is disabled.

    Args:
        config: the checked config of the run, with run.id.
        orders: nodes, ranks, data and last step of the scaled run.
        run_dir: folder to train in.
    """
    parallel = scaled_parallel(config.parallel, orders.max_ranks)
    train = TrainConfig(
        global_batch_size=_MICRO_BATCHES * parallel.dp,
        seq_len=_SEQ_LEN,
        steps=orders.last_step,
        precision=config.train.precision,
        seed=config.train.seed,
    )
    # A path names a checkpoint of the full model; with "auto" a restart loads the scaled run's own checkpoint.
    load = config.checkpoint.load if config.checkpoint.load == "none" else "auto"
    # Both nodes get ranks if there are enough; a job with one rank has a spare node.
    spare_nodes = max(0, orders.scaled_nodes - parallel.world_size)
    # A new config: cluster.wrapper and cluster.srun_options are site-specific.
    cluster = ClusterConfig(
        kind=config.cluster.kind,
        threads_per_rank=1,
        ranks_per_node=parallel.world_size // (orders.scaled_nodes - spare_nodes),
        spare_nodes=spare_nodes,
        # Any value: measuring the CPU's would take seconds.
        peak_tflops=1.0,
        max_requeues=config.cluster.max_requeues,
        chain=config.cluster.chain,
        timeout_s=config.cluster.timeout_s,
    )
    return dataclasses.replace(
        config,
        model=_scaled_model(config.model, parallel),
        parallel=parallel,
        train=train,
        schedule=ScheduleConfig(name=config.schedule.name, options=config.schedule.options, warmup_steps=1),
        data=DataConfig(train=[DatasetConfig(orders.data)]),
        tokenizer=TextTokenizerConfig(),
        checkpoint=dataclasses.replace(config.checkpoint, load=load, init_from=None),
        evaluation=EvaluationConfig(at_end=False),
        run=dataclasses.replace(config.run, dir=str(run_dir), check_memory=False),
        logging=LoggingConfig(level=config.logging.level, wandb=WandbConfig(mode=WandbMode.disabled)),
        cluster=cluster,
    )


def _scaled_model(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Returns a model with two blocks per virtual stage and the default sizes, which are divisible by two."""
    return ModelConfig(
        num_layers=2 * parallel.num_stages,
        vocab_size=VOCAB_SIZE,
        num_kv_heads=None if model.queries_per_kv == 1 else 2,
        position=model.position,
        window=None if model.window is None else min(model.window, _WINDOW),
        norm=model.norm,
        mlp=model.mlp,
        parallel_block=model.parallel_block,
        block=model.block,
        bias=model.bias,
        embedding_norm=model.embedding_norm,
        tie_embeddings=model.tie_embeddings,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
    )
