"""The list of DeepSpeed's undocumented attributes, compared with the installed DeepSpeed and with what megads uses."""

from __future__ import annotations

import ast
import gc
import importlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from megads.engine import deepspeed_private
from megads.engine.deepspeed_private import NEWEST_SEEN, PRIVATE, attribute_names, moved_attributes

ENGINE = Path(deepspeed_private.__file__).parent
LISTED = {name for names in PRIVATE.values() for name in names}

HOLDERS = {"deepspeed", "engine", "optimizer", "_optimizer"}
"""Names under which the adapters hold DeepSpeed's objects."""
DOCUMENTED = {
    # deepspeed
    "comm", "init_distributed", "initialize", "ops", "zero", "Init", "load", "__version__",
    # ProcessTopology
    "pipe",
    # LayerSpec, DeepSpeedEngine, PipelineEngine, PipelineModule
    "backward", "build", "device", "eval_batch", "get_global_grad_norm", "is_first_stage", "is_last_stage", "module",
    "mpu", "num_pipe_buffers", "set_gradient_accumulation_boundary", "steps", "train_batch",
    "zero_optimization_stage",
    # deepspeed.runtime.pipe.schedule
    "BackwardPass", "ForwardPass", "LoadMicroBatch", "OptimizerStep", "RecvActivation", "RecvGrad", "ReduceGrads",
    "ReduceTiedGrads", "SendActivation", "SendGrad", "TrainSchedule",
}  # fmt: skip
"""Names of DeepSpeed's documentation that the adapters use."""


def adapters() -> list[tuple[Path, ast.Module]]:
    """The files of megads that import DeepSpeed, parsed."""
    parsed = [(path, ast.parse(path.read_text())) for path in sorted(ENGINE.glob("*.py"))]
    return [(path, tree) for path, tree in parsed if deepspeed_imports(tree)]


def deepspeed_imports(tree: ast.Module) -> dict[str, str]:
    """Modules of the names that a file imports from DeepSpeed."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "deepspeed":
            found |= {alias.asname or alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name: alias.name for alias in node.names if alias.name == "deepspeed"}
    return found


def last_name(node: ast.expr) -> str:
    """The name that an expression ends with, for example _optimizer for self._optimizer."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def own_names(kind: ast.ClassDef) -> set[str]:
    """Names that a class defines: methods, class attributes, and attributes that it sets on itself."""
    found = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)}
    found |= {last_name(node.target) for node in kind.body if isinstance(node, ast.AnnAssign)}
    found |= {last_name(target) for node in kind.body if isinstance(node, ast.Assign) for target in node.targets}
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and last_name(node.value) == "self":
            found.add(node.attr)
    return found


def used_names(tree: ast.Module) -> Iterator[str]:
    """Names of DeepSpeed's attributes that a file uses: of objects in HOLDERS, those that subclasses inherit or
    override, and any other that neither torch, Python nor megads defines."""
    imported, classes = deepspeed_imports(tree), [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and last_name(node.value) in HOLDERS:
            yield node.attr
        elif isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "setattr", "hasattr"):
            yield from (item.value for item in node.args[1:2] if isinstance(item, ast.Constant))
        elif isinstance(node, ast.Attribute) and node.attr not in known_names():
            yield node.attr
    for kind in classes:
        bases = [last_name(base) for base in kind.bases if last_name(base) in imported]
        for base in (getattr(importlib.import_module(imported[name]), name) for name in bases):
            inherited = {*attribute_names(importlib.import_module(base.__module__), base.__name__)} - set(
                dir(nn.Module)
            )
            own = own_names(kind)
            yield from own & inherited
            for node in ast.walk(kind):
                if isinstance(node, ast.Attribute):
                    is_self, is_super = last_name(node.value) == "self", isinstance(node.value, ast.Call)
                    if (is_self and node.attr not in own) or (is_super and node.attr in inherited):
                        yield node.attr


def known_names() -> set[str]:
    """Names of attributes that torch, Python or megads define."""
    if not KNOWN:
        others = (torch, torch.Tensor, nn, nn.Module, nn.Parameter, Optimizer, dist, gc, logging, logging.Logger)
        KNOWN.update(name for other in (*others, dict, list, str, tuple, set) for name in dir(other))
        folders = (ENGINE, *(ENGINE.parent / package for package in ("parallel", "model", "optim", "ops")))
        for path in (ENGINE.parent / "batch.py", *(path for folder in folders for path in folder.glob("*.py"))):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    KNOWN.update({node.name}, own_names(node))
                elif isinstance(node, ast.FunctionDef):
                    KNOWN.add(node.name)
                elif isinstance(node, ast.alias):
                    KNOWN.update(node.name.split("."))
    return KNOWN


KNOWN: set[str] = set()


def test_the_installed_deepspeed_has_every_listed_private_attribute() -> None:
    """Catches a listed attribute that DeepSpeed does not have, and one that is looked for in the wrong place."""
    assert moved_attributes() == []


def test_the_list_of_private_attributes_names_the_pinned_version() -> None:
    """Catches another pinned DeepSpeed without a look at the list."""
    pinned = re.search(r"^deepspeed==(\S+)", (ENGINE.parents[1] / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] == NEWEST_SEEN


def test_a_missing_private_attribute_is_named() -> None:
    """Catches a check that finds everything: of instances, base classes, modules, and of a class that is gone."""
    optimizer, gone = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3", "deepspeed.runtime.engine:Engine"
    listed = {
        optimizer: {"fp16_groups": "0", "fp17_groups": "0"},
        "deepspeed.runtime.pipe.engine:PipelineEngine": {"_exec_schedule": "0", "basic_optimizer": "0", "basic": "0"},
        "deepspeed.ops": {"__compatible_ops__": "0", "__ops__": "0"},
        gone: {"step": "0"},
    }
    assert moved_attributes(listed) == [
        f"{optimizer.replace(':', '.')}.fp17_groups",
        "deepspeed.runtime.pipe.engine.PipelineEngine.basic",
        "deepspeed.ops.__ops__",
        "deepspeed.runtime.engine.Engine.step",
    ]


def test_every_private_attribute_that_adapters_use_is_listed() -> None:
    """Catches an undocumented attribute of DeepSpeed that doctor does not look for."""
    of_torch = {name for kind in (nn.Module, Optimizer) for name in dir(kind)} | {"param_groups", "state"}
    listed = LISTED | DOCUMENTED | of_torch
    # What deepspeed_adam uses is in a compiled extension, where doctor cannot look for it.
    files = [(path, tree) for path, tree in adapters() if path.stem != "deepspeed_adam"]
    missing = {f"{path.name}: {name}" for path, tree in files for name in {*used_names(tree)} - listed}
    assert sorted(missing) == []


def test_every_listed_private_attribute_is_used() -> None:
    """Catches an attribute that stays in the list after megads stopped using it."""
    used = {node.attr for _, tree in adapters() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for _, tree in adapters():
        used |= {name for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef) for name in own_names(kind)}
        used |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    # stage_pipeline, which does not import DeepSpeed, reads the shape of a parameter that ZeRO-3 has partitioned.
    assert LISTED - used == {"ds_shape"} and '"ds_shape"' in (ENGINE / "stage_pipeline.py").read_text()
