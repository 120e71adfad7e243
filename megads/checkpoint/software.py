"""What computed a checkpoint: a resume promises equal bits only with the same software and thread count."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version

import torch

import megads
from megads.ops.library import loaded_kernels
from megads.runtime.registry import plugin_versions

_PLUGIN = "plugin "


def software() -> dict[str, str]:
    """Versions of Python, torch, megads and what it requires, the CPU's vector instructions, threads, kernels."""
    versions = {
        "python": platform.python_version(),
        "megads": megads.__version__,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "kernels": loaded_kernels(),
    }
    if torch.cuda.is_available():
        versions |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    for name in _required_distributions():
        try:
            versions.setdefault(name, version(name))
        except PackageNotFoundError:
            continue
    return versions | {f"{_PLUGIN}{name}": found for name, found in plugin_versions().items()}


def _required_distributions() -> list[str]:
    """Names of megads's own requirements; none when it runs from a checkout that is not installed."""
    try:
        requirements = requires("megads") or []
    except PackageNotFoundError:
        return []
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements if "extra ==" not in requirement)
    return [match.group() for match in names if match]


def software_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """One readable line for each entry that both know and that differs, and for each plugin that one of them lacks."""
    shared = [name for name in before if name in now]
    differing = [f"{name}: {before[name]} then, {now[name]} now" for name in shared if before[name] != now[name]]
    differing += [f"{name}: {before[name]} then, not imported now" for name in before if _only(name, now)]
    return differing + [f"{name}: not imported then, {now[name]} now" for name in now if _only(name, before)]


def _only(name: str, others: Mapping[str, str]) -> bool:
    return name.startswith(_PLUGIN) and name not in others
