"""`megads train` inside of a rehearsed job: the config asked for is checked on paper, and a scaled one is trained."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from megads.config import RootConfig, check_config
from megads.data.config import DataConfig, DatasetConfig
from megads.data.prepare.config import TextTokenizerConfig
from megads.errors import ConfigError, MegadsError
from megads.evaluate.config import EvaluationConfig
from megads.launch.initial_weights import find_initial_weights
from megads.launch.preflight import locate_data, place, require_data
from megads.launch.preflight_memory import Machine, memory_line, refuse_unfit, settle_auto
from megads.launch.slurm_ranks import place_ranks
from megads.model.config import ModelConfig
from megads.optim.schedule import ScheduleConfig
from megads.parallel.config import AXES, GRADIENT_STAGES, ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from megads.runtime.config import ClusterConfig, ClusterKind, LoggingConfig, WandbConfig, WandbMode
from megads.runtime.slurm import Allocation, Node, SlurmJob
from megads.tools.doctor.finding import Finding, note, ok, problem
from megads.tools.rehearse.notes import VOCAB_SIZE, Orders, RehearsedStart, read_orders, write_start
from megads.tools.rehearse.paper import of_this_machine, why_unwritable
from megads.train_config import TrainConfig

_AT_START = "the job would end at its start, after its wait in the queue"


def rehearsed(config: RootConfig, choices: Mapping[str, str | None], folder: Path) -> RootConfig:
    """Writes down what a config shows on paper and returns what to train in its place.

    Args:
        config: as composed.
        choices: option taken in each config group.
        folder: of the rehearsal.

    Raises:
        ConfigError: it cannot be run; nothing is trained.
    """
    orders = read_orders(folder)
    found, config = _examine(config, orders)
    config = place(config, choices)
    run_dir = Path(str(config.run.dir))
    found.append(_run_folder(run_dir))
    if config.checkpoint.init_from is not None:
        found.append(_judge("weights", lambda: "; ".join(find_initial_weights(config, config.model)[1])))
    if orders.elsewhere:
        found = of_this_machine(found)
    start = RehearsedStart(tuple(found), str(run_dir))
    if orders.refused or start.refused:
        write_start(folder, start)
        raise ConfigError("refused on paper: see the verdict of megads rehearse")
    # Two starts that name two folders get two; those that name one get one.
    name = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:12]
    scaled = scaled_run(
        config,
        run_dir=folder / "runs" / name,
        data=orders.data,
        last_step=orders.last_step,
        nodes=orders.scaled_nodes,
        max_ranks=orders.max_ranks,
    )
    layout = f"{scaled.parallel.world_size} ranks = {scaled.parallel.product}"
    write_start(folder, dataclasses.replace(start, scaled_run=str(scaled.run.dir), layout=layout))
    return scaled


def _examine(config: RootConfig, orders: Orders) -> tuple[list[Finding], RootConfig]:
    """Checks everything but the folder; returns also the config with its data, as far as it is there."""
    found = [_judge("sizes", lambda: _sizes(config)), _judge("layout", lambda: _layout(config, orders))]
    known = config
    try:
        config, data = locate_data(config)
        known = data.planned(config)
        if data.preparation is None:
            require_data(config)
        found.append(ok("data", data.text))
    except MegadsError as error:
        found.append(problem("data", str(error), _AT_START, "see the message; paths are those that the nodes see"))
    found.append(_memory(known, orders))
    found += _resume(config)
    return found, config


def _judge(check: str, look: Callable[[], str]) -> Finding:
    """Turns a refusal, whose message says what to do, into a problem."""
    try:
        return ok(check, look())
    except MegadsError as error:
        return problem(check, str(error), _AT_START, "see the message")


def _sizes(config: RootConfig) -> str:
    check_config(config)
    return f"{config.model.num_layers} layers, hidden {config.model.hidden_size}, {config.parallel.product}"


def _layout(config: RootConfig, orders: Orders) -> str:
    """Ranks against nodes x GPUs, as they are asked for."""
    if config.cluster.kind is not ClusterKind.slurm:
        raise ConfigError(
            "cluster.kind = local inside of a batch script: only its first node would train, and exit 6 would not be "
            "requeued; write megads train cluster=slurm"
        )
    nodes = tuple(Node(f"node{number}", "") for number in range(1, orders.nodes + 1))
    placement = place_ranks(config, Allocation(SlurmJob("", 0, ""), nodes, orders.gpus_per_node))
    return f"{config.parallel.world_size} ranks, {placement.ranks_per_node} on each of {orders.nodes} nodes"


def _memory(config: RootConfig, orders: Orders) -> Finding:
    """The plan against the GPUs asked for."""
    size = config.cluster.gpu_memory_gib or orders.gpu_memory_gib
    if not orders.gpus_per_node:
        return note(
            "memory", "not checked: the job asks for no GPUs", "", "megads plan device=cpu says what ranks need"
        )
    if size is None:
        remedy = "cluster.gpu_memory_gib=80, or megads rehearse --gpu-memory-gib 80"
        return note("memory", "not checked: how much a GPU has is not known", "", remedy)
    if config.model.vocab_size is None:
        return note(
            "memory", "not checked: the vocabulary is not known before the data is there", "", "correct the data"
        )
    machine = Machine(int(size * 2**30), per_gpu=True)

    def look() -> str:
        chosen, _ = settle_auto(config, machine)
        refuse_unfit(chosen, machine)
        return memory_line(chosen, machine)

    return _judge("memory", look)


def _resume(config: RootConfig) -> list[Finding]:
    """Whether a restart continues, by the config alone."""
    load = config.checkpoint.load
    if load not in ("auto", "none") and not Path(load).is_dir():
        return [problem("checkpoints", f"checkpoint.load = {load}: there is no such folder", _AT_START, "correct it")]
    if load == "none":
        cost = "a job that is submitted again throws away what was trained before; a requeue or a chain does not"
        return [note("checkpoints", "checkpoint.load = none", cost, "checkpoint.load=auto")]
    if not config.checkpoint.every_steps:
        cost = "a lost node, of which nobody warns, throws away everything since the start of the job"
        return [note("checkpoints", "checkpoint.every_steps = 0", cost, "set checkpoint.every_steps to half an hour's")]
    return [ok("checkpoints", f"one every {config.checkpoint.every_steps} steps")]


def _run_folder(run_dir: Path) -> Finding:
    reason = why_unwritable(run_dir)
    if reason:
        remedy = "run.dir=<a folder that all nodes can write to>"
        return problem("run folder", f"{run_dir} {reason}", _AT_START, remedy)
    return ok("run folder", f"{run_dir} can be written to")


_SEQ_LEN = 32
_WINDOW = 8
_MICRO_BATCHES = 2


def scaled_parallel(parallel: ParallelConfig, max_ranks: int) -> ParallelConfig:
    """Returns a layout in which every axis that is split is split in two, as far as the ranks go.

    Args:
        parallel: the layout asked for.
        max_ranks: most ranks; 2 or more.
    """
    sizes = {axis: min(2, getattr(parallel, axis)) for axis in AXES}
    # What is given up first. ZeRO that shards gradients needs ranks to share with; else replicas say least.
    first = ("tp", "pp", "cp", "dp") if parallel.zero_stage in GRADIENT_STAGES else ("dp", "cp", "tp", "pp")
    for axis in first:
        if ParallelConfig(**sizes).world_size > max_ranks:
            sizes[axis] = 1
    recompute = Recompute.none if parallel.recompute is Recompute.auto else parallel.recompute
    return ParallelConfig(
        **sizes,
        # A pipeline of one stage has no schedule to speak of.
        schedule=parallel.schedule if sizes["pp"] > 1 else ScheduleName["1f1b"],
        sequence_parallel=parallel.sequence_parallel,
        rank_order=parallel.rank_order,
        zero_stage=parallel.zero_stage,
        recompute=recompute,
    )


def scaled_run(
    config: RootConfig, *, run_dir: Path, data: str, last_step: int, nodes: int, max_ranks: int
) -> RootConfig:
    """Returns what is really trained in place of a run.

    Kept are the kinds of position, attention, norms, MLP and blocks, dropout, optimizer, precision, ZeRO, schedule and
    recomputation, how the run saves and loads, and its name; everything that has a size is small, and nobody outside is
    told.

    Args:
        config: the run, checked, with run.id.
        run_dir: folder to train in.
        data: prefix of a small dataset of VOCAB_SIZE tokens.
        last_step: of the training.
        nodes: of the scaled job.
        max_ranks: most ranks.
    """
    parallel = scaled_parallel(config.parallel, max_ranks)
    train = TrainConfig(
        global_batch_size=_MICRO_BATCHES * parallel.dp,
        seq_len=_SEQ_LEN,
        steps=last_step,
        precision=config.train.precision,
        seed=config.train.seed,
    )
    # Paths name checkpoints of the full model; what a restart loads is the run's own.
    load = config.checkpoint.load if config.checkpoint.load == "none" else "auto"
    # Both nodes compute where there are ranks for both; a job of one rank keeps its spare.
    spare_nodes = max(0, nodes - parallel.world_size)
    # Afresh: containers and further options of srun are the site's.
    cluster = ClusterConfig(
        kind=config.cluster.kind,
        threads_per_rank=1,
        ranks_per_node=parallel.world_size // (nodes - spare_nodes),
        spare_nodes=spare_nodes,
        # Measuring the CPU takes seconds.
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
        data=DataConfig(train=[DatasetConfig(data)]),
        tokenizer=TextTokenizerConfig(),
        checkpoint=dataclasses.replace(config.checkpoint, load=load, init_from=None),
        evaluation=EvaluationConfig(at_end=False),
        run=dataclasses.replace(config.run, dir=str(run_dir), check_memory=False),
        logging=LoggingConfig(level=config.logging.level, wandb=WandbConfig(mode=WandbMode.disabled)),
        cluster=cluster,
    )


def _scaled_model(model: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """Two blocks a virtual stage of the default sizes, which divide by two."""
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
