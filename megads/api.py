"""What tools, plugins and notebooks use of megads: the names that two of them need.

`from megads.api import ModelConfig` imports `megads.model.config` and nothing else: the names below are imported when
they are used. docs/api.md lists them with what they are for. What is not here may change without notice.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megads.batch import (
        BatchInfo,
        MicroBatch,
    )
    from megads.checkpoint.config import (
        CheckpointConfig,
        checkpoints_folder,
        list_checkpoints,
    )
    from megads.checkpoint.image import (
        allocate,
    )
    from megads.checkpoint.manifest import (
        MANIFEST_FILE,
        Manifest,
        RunRecord,
        read_manifest,
    )
    from megads.checkpoint.read import (
        CheckpointHandle,
        check_model,
        load_unsharded,
        model_config_of,
        open_checkpoint,
        read_into,
    )
    from megads.checkpoint.store import (
        save_parts,
    )
    from megads.config.frozen import (
        config_dict,
        config_digest,
        config_of_start,
        load_frozen,
    )
    from megads.config.identity import (
        ChangeClass,
        change_class,
    )
    from megads.config.root import (
        RootConfig,
        batch_size_schedule,
        best_loss_key,
        check_attention,
        check_shape,
        config_at,
        open_run_data,
        phase_config,
        planned_steps,
    )
    from megads.config.train import (
        Precision,
        TrainConfig,
    )
    from megads.data.config import (
        DataConfig,
        DatasetConfig,
        TextSpecialTokens,
    )
    from megads.data.indexed.dataset import (
        Array,
        IndexedDataset,
        IntArray,
        bin_path,
        idx_path,
        token_dtype,
    )
    from megads.data.indexed.recorded import (
        read_record,
        written_checksums,
    )
    from megads.data.indexed.run_tokenizer import (
        open_run_tokenizer,
    )
    from megads.data.indexed.sidecar import (
        KEPT_EXAMPLES,
        TOKENIZER_CONFIG_FILE,
        FoundTokenizer,
        Sidecar,
        carried_path,
        embedding_rows,
        file_checksum,
        find_tokenizer,
        load_tokenizer,
        named_tokens,
        read_sidecar,
        sidecar_path,
        template_beside,
        template_path,
        tokenizing,
        write_carried,
        write_sidecar,
    )
    from megads.data.indexed.writer import (
        IndexedDatasetAppender,
        IndexedDatasetWriter,
    )
    from megads.data.sampling.loader import (
        LoaderShare,
        Packing,
        step_ids,
    )
    from megads.data.sampling.runs import (
        TrainSource,
        ValidationSource,
    )
    from megads.data.sampling.sampler import (
        micro_batch_ids,
    )
    from megads.data.sampling.samples import (
        TrainSamples,
    )
    from megads.data.tokenizer_config import (
        Engine,
        TextTokenizerConfig,
    )
    from megads.engine import (
        build_train_engine,
    )
    from megads.engine.interface import (
        EngineSpec,
        PassTimes,
        Shard,
        TrainEngine,
    )
    from megads.errors import (
        EXIT_BUG,
        EXIT_CODES,
        EXIT_OK,
        CheckpointError,
        ConfigError,
        DataError,
        MegadsError,
        NumericalError,
        Preempted,
        RankKilled,
        StopRequested,
        UnhealthyNode,
        reason_of,
    )
    from megads.evaluate.config import (
        EvaluationConfig,
        WeightPrecision,
    )
    from megads.evaluate.generation import (
        GenerationSpeed,
        Sampling,
        TextGenerator,
        choose_device,
        choose_dtype,
    )
    from megads.launch.launcher import (
        EXIT_KILLED,
        LaunchSpec,
        launch,
    )
    from megads.launch.layout import (
        Machine,
        resolve_auto,
        run_planner,
    )
    from megads.launch.rank import (
        leave_signals_to_the_launcher,
        run_rank,
        start_rank,
    )
    from megads.model.attention import (
        Attention,
        AttentionCore,
    )
    from megads.model.config import (
        EMBEDDING,
        HEAD,
        TIED_COPY,
        TIED_PARAMETER,
        MLPKind,
        ModelConfig,
        NormKind,
        NormPlacement,
        Position,
        QKNormWidth,
    )
    from megads.model.gpt import (
        GPT,
        token_losses,
    )
    from megads.model.layers import (
        Dropout,
        Norm,
    )
    from megads.model.model_size import (
        parameter_count,
        parameter_shapes,
        router_state_shapes,
    )
    from megads.model.moe_config import (
        MoEConfig,
        RouterScore,
    )
    from megads.model.sharding import (
        context_kinds,
    )
    from megads.monitor.console import (
        Console,
        render_event,
    )
    from megads.monitor.hooks import (
        HookContext,
    )
    from megads.monitor.trackers import (
        RunDescription,
        Tracker,
        is_step,
    )
    from megads.ops.activation import (
        gelu,
    )
    from megads.ops.attention_kinds import (
        AttentionKind,
        AttentionWork,
        flash_in_ring,
        unsupported_reason,
    )
    from megads.ops.build import (
        KernelsUnavailable,
    )
    from megads.ops.config import (
        FUSED,
        KEYS_AT_ONCE,
        LEAST_GRAPHS_SAVING,
        TORCH,
        Float8,
        Float8Recipe,
        Implementation,
        Kernels,
        OpsConfig,
        chunk_tokens,
    )
    from megads.ops.linear import (
        add_weight_gradient,
    )
    from megads.ops.processor import (
        describe_gemm,
    )
    from megads.ops.resolve import (
        load,
    )
    from megads.optim.config import (
        OptimConfig,
        OptimizerName,
    )
    from megads.optim.groups import (
        AVERAGE,
        BucketLayout,
        Member,
        bucket_layouts,
        parameter_role,
    )
    from megads.optim.masters import (
        Update,
    )
    from megads.parallel.config import (
        AXES,
        GRADIENT_STAGES,
        ContextParallelKind,
        EngineKind,
        GridCoordinate,
        ParallelConfig,
        Partition,
        Recompute,
        exchanged_kv_heads,
        padded_rows,
        place_of,
        resolve_engine,
    )
    from megads.parallel.grid import (
        ParallelGrid,
        build_grid,
        single_rank_grid,
    )
    from megads.parallel.partition import (
        Cut,
        ParallelStyle,
        ShardingTable,
        stage_bounds,
    )
    from megads.parallel.pipeline_actions import (
        ActionKind,
        Schedule,
    )
    from megads.parallel.ring_shifts import (
        ring_shifts,
    )
    from megads.parallel.schedule import (
        ScheduleName,
    )
    from megads.parallel.schedule_simulation import (
        simulate_schedule,
    )
    from megads.runtime.config import (
        LONGEST_WAIT_S,
        ClusterKind,
        LoggingConfig,
        MlflowConfig,
        WandbConfig,
        WandbMode,
    )
    from megads.runtime.distributed import (
        ControlPlane,
        decode,
        encode,
        world,
    )
    from megads.runtime.environment import (
        available_core_numbers,
        available_cores,
        child_environment,
        for_srun,
        loopback_variables,
        node_name,
        rank_environment,
        rank_variables,
        requested_threads,
        user_cache_dir,
        user_name,
    )
    from megads.runtime.files import (
        Tail,
        atomic_writer,
        open_regular,
        parse_json,
        read_json,
        read_regular,
        sync_directory,
        temporary_path,
    )
    from megads.runtime.heartbeat import (
        Heartbeat,
    )
    from megads.runtime.hooks import (
        Hook,
        Span,
        StepInfo,
        TrainState,
    )
    from megads.runtime.lease import (
        claimed,
        is_in_use,
    )
    from megads.runtime.machine_memory import (
        PROCESS_BYTES,
        available_memory,
        gib,
    )
    from megads.runtime.metrics import (
        EventWriter,
        JsonLinesWriter,
        MetricHistory,
        read_json_lines,
    )
    from megads.runtime.own_folder import (
        make_own,
        own_path,
    )
    from megads.runtime.ports import (
        Secret,
        listen,
    )
    from megads.runtime.process import (
        start_child,
    )
    from megads.runtime.progress import (
        Progress,
        render_duration,
    )
    from megads.runtime.registry import (
        import_plugins,
        register_hook,
        register_model,
        register_optimizer,
        register_reader,
        register_schedule,
        register_tracker,
    )
    from megads.runtime.rich_console import (
        VisibleConsole,
        output_width,
    )
    from megads.runtime.run_dir import (
        CONFIG_FILE,
        DATA_FILE,
        EVENTS_FILE,
        HUGGING_FACE_FOLDER,
        METRICS_FILE,
        STARTS_FOLDER,
        TOKENIZER_FILE,
        find_run,
        is_run_dir,
        rank_log_path,
        recorded_config,
        slowdowns_path,
    )
    from megads.runtime.slurm import (
        Allocation,
        SlurmJob,
        ask,
        step_options,
    )
    from megads.runtime.url import (
        check_url,
        is_url,
    )
    from megads.train.setup import (
        rank_device,
    )


def _homes() -> dict[str, str]:
    """Module of each name above, which stands in this file only."""
    found: dict[str, str] = {}
    for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If):
            for line in node.body:
                if isinstance(line, ast.ImportFrom):
                    found |= {alias.name: str(line.module) for alias in line.names}
    return found


_HOMES = _homes()
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megads.api' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
