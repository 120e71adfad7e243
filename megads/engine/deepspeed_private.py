"""Attributes of DeepSpeed that megads uses although DeepSpeed does not document them, and whether they are still there.

A release may rename them. Overriding a method that no longer exists has no effect and raises nothing, so
`megads doctor` compares this list with the installed DeepSpeed.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version


def _seen(version: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, version)


PRIVATE: Mapping[str, Mapping[str, str]] = {
    "deepspeed.ops": _seen("0.19.8", "__compatible_ops__"),
    "deepspeed.runtime.bf16_optimizer:BF16_Optimizer": _seen(
        "0.19.8",
        "bf16_groups",
        "fp32_groups_flat_partition",
        "fp32_groups_gradient_flat_partition",
        "fp32_groups_gradients",
        "overflow",
        "real_dp_process_group",
        "update_lp_params",
    ),
    "deepspeed.runtime.engine:DeepSpeedEngine": _seen("0.19.8", "_global_grad_norm", "optimizer"),
    "deepspeed.runtime.pipe.engine:PipelineEngine": _seen(
        "0.19.8",
        "_INSTRUCTION_MAP",
        "_exec_optimizer_step",
        "_exec_reduce_grads",
        "_exec_reduce_tied_grads",
        "_train_schedule",
        "dynamic_shape",
        "loss",
        "micro_batches",
        "optimizer",
        "pipe_buffers",
        "reset_activation_shape",
        "total_loss",
    ),
    "deepspeed.runtime.pipe.module:PipelineModule": _seen(
        "0.19.8",
        "_local_start",
        "_partition_layers",
        "_set_bounds",
        "_synchronize_tied_weights",
        "_topo",
        "forward_funcs",
        "global_rank",
        "parts",
        "tied_comms",
    ),
    "deepspeed.runtime.pipe.topology:ProcessTopology": _seen("0.19.8", "ProcessCoord", "get_coord", "mapping"),
    "deepspeed.runtime.zero.partition_parameters": _seen("0.19.8", "all_gather", "ds_shape", "partition_numel"),
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": _seen(
        "0.19.8",
        "_release_preflattened_grad_buffers",
        "all_grad_tensors",
        "averaged_gradients",
        "bit16_groups",
        "gradient_average",
        "overflow",
        "real_dp_process_group",
        "single_partition_of_fp32_groups",
        "update_lp_params",
    ),
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": _seen(
        "0.19.8",
        "_partition_all_parameters",
        "_pre_step",
        "_reassign_or_swap_out_partitioned_parameters",
        "dp_process_group",
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "grad_partitions_flat_buffer",
        "overflow",
        "persistent_parameters",
    ),
}
"""Names, each with the newest version of DeepSpeed in which it was seen, by module, or by module and class. A module
without a class lists names of the module, and attributes that it sets on objects of others."""


NEWEST_SEEN = max((version for names in PRIVATE.values() for version in names.values()), key=Version)
"""The newest version of DeepSpeed that the list was compared with."""


def moved_attributes(listed: Mapping[str, Mapping[str, str]] = PRIVATE) -> list[str]:
    """Returns the listed attributes that the installed DeepSpeed does not have, with their owners; imports DeepSpeed.

    Instance attributes are looked for in the source: an assignment to `self.<name>` in the class or a base class.

    Args:
        listed: names by owner, see PRIVATE.

    Raises:
        OSError: the source of DeepSpeed cannot be read.
    """
    moved = []
    for owner, names in listed.items():
        module, _, class_name = owner.partition(":")
        try:
            found = set(attribute_names(importlib.import_module(module), class_name))
        except (ImportError, AttributeError):
            found = set()
        moved += [f"{owner.replace(':', '.')}.{name}" for name in names if name not in found]
    return moved


def attribute_names(module: ModuleType, class_name: str) -> Iterator[str]:
    """Yields the names of a module and those that it sets on any object, or those of a class and its instances."""
    if not class_name:
        yield from vars(module)
        yield from _assigned(_source_of(module))
        # globals()["name"], for names that are only computed when they are read.
        keys = (node.slice for node in ast.walk(_source_of(module)) if isinstance(node, ast.Subscript))
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
        return
    for kind in getattr(module, class_name).__mro__:
        yield from vars(kind)
        if kind.__module__.startswith("deepspeed"):
            tree = _source_of(importlib.import_module(kind.__module__))
            own = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
            for node in own:
                yield from _assigned(node, "self")


def _assigned(tree: ast.AST, receiver: str | None = None) -> Iterator[str]:
    """Names of the attributes that code assigns, of any object or of the one with a given name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            value: Any = node.value
            if receiver is None or (isinstance(value, ast.Name) and value.id == receiver):
                yield node.attr


@cache
def _source_of(module: ModuleType) -> ast.Module:
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
