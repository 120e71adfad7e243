"""A run scaled down to what two cores train in seconds, its layout and its choices kept in kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megads.config import RootConfig, TrainConfig
from megads.data.config import DataConfig, DatasetConfig
from megads.data.prepare.config import TextTokenizerConfig
from megads.evaluate.config import EvaluationConfig
from megads.model.config import ModelConfig
from megads.optim.config import ScheduleConfig
from megads.parallel.config import AXES, GRADIENT_STAGES, ParallelConfig, Recompute
from megads.parallel.schedule import ScheduleName
from megads.runtime.config import ClusterConfig, LoggingConfig, WandbConfig, WandbMode

VOCAB_SIZE = 512
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
    # A path names a checkpoint of the full model; what a restart loads is the run's own.
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
        schedule=ScheduleConfig(name=config.schedule.name, options=config.schedule.options),
        data=DataConfig(train=[DatasetConfig(data)]),
        tokenizer=TextTokenizerConfig(),
        checkpoint=dataclasses.replace(config.checkpoint, load=load),
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
