"""NVIDIA apex (https://github.com/NVIDIA/apex): whether it is installed with the compiled extensions that megads uses.

The check does not import apex. The package of that name on PyPI is another project; both are distributions called
`apex`, and are distinguished by the modules in their folder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from enum import StrEnum
from importlib.machinery import PathFinder
from types import ModuleType

from megads.errors import ConfigError

AMP, NORMS = "amp_C", "fused_layer_norm_cuda"
EXTENSIONS = (AMP, NORMS)
"""Compiled modules that megads uses; apex's own packages need them, and `--cuda_ext` builds both."""
NVIDIAS_PARTS = ("apex.normalization", "apex.optimizers", "apex.multi_tensor_apply")
"""Modules in every release of NVIDIA's apex, built with extensions or without, that the other project does not have."""
BUILD = (
    "git clone https://github.com/NVIDIA/apex, and in that folder: pip install -v --disable-pip-version-check "
    '--no-cache-dir --no-build-isolation --config-settings "--build-option=--cpp_ext" --config-settings '
    '"--build-option=--cuda_ext" ./'
)
INT32_ELEMENTS = 2**31
"""Apex's kernels use 32-bit indices: tensors must have fewer elements than this."""


class ApexState(StrEnum):
    """State of the package that is importable as apex."""

    absent = "absent"
    wrong_package = "wrong package"
    python_only = "python-only"
    present = "present"


@dataclass(frozen=True)
class Apex:
    """The installed apex package, if any.

    Attributes:
        state: state of the package.
        version: version of the distribution; empty if it has no metadata.
        missing: extensions in EXTENSIONS that are missing.
    """

    state: ApexState
    version: str = ""
    missing: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Description in one line."""
        named = f"apex {self.version}".strip()
        return {
            ApexState.absent: "NVIDIA apex is not installed",
            ApexState.wrong_package: f"{named} is not NVIDIA's: PyPI's package of that name is another project, "
            "for the web framework Pyramid",
            ApexState.python_only: f"NVIDIA's {named} was built without {' and '.join(self.missing)}",
            ApexState.present: f"NVIDIA's {named} with {', '.join(EXTENSIONS)}",
        }[self.state]

    @property
    def remedy(self) -> str:
        """How to install it; empty if it is present."""
        return {
            ApexState.absent: f"build it from NVIDIA's sources ({BUILD})",
            ApexState.wrong_package: f"pip uninstall apex, then build NVIDIA's from its sources ({BUILD})",
            ApexState.python_only: f"build it again with --cpp_ext and --cuda_ext ({BUILD})",
            ApexState.present: "",
        }[self.state]


def find_apex() -> Apex:
    """Finds apex through the import system's search, without importing or running any of it."""
    package = importlib.util.find_spec("apex")
    if package is None:
        return Apex(ApexState.absent)
    folders = list(package.submodule_search_locations or ())
    version = _version()
    # importlib.util.find_spec would import the parent package.
    if not all(PathFinder.find_spec(part, folders) for part in NVIDIAS_PARTS):
        return Apex(ApexState.wrong_package, version)
    missing = tuple(name for name in EXTENSIONS if importlib.util.find_spec(name) is None)
    return Apex(ApexState.python_only if missing else ApexState.present, version, missing)


def _version() -> str:
    try:
        return importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        return ""


def require_apex(key: str, *, cuda: bool) -> None:
    """Checks that apex can be used.

    Args:
        key: config key that requests it.
        cuda: whether the model is on GPUs.

    Raises:
        ConfigError: apex or its extensions are missing, or the model is not on GPUs.
    """
    found = find_apex()
    if not cuda:
        raise ConfigError(
            f"{key} = apex cannot run: apex has kernels for GPUs only, and this run is on CPUs (here: {found.text}); "
            f"use {key}=auto"
        )
    if found.state is not ApexState.present:
        raise ConfigError(f"{key} = apex cannot run: {found.text}; {found.remedy}; or use {key}=auto")


def load_apex(key: str) -> None:
    """Loads the extensions into this process, after `require_apex`.

    Args:
        key: config key that requests them.

    Raises:
        ConfigError: an extension is not compatible with this PyTorch.
    """
    for name in EXTENSIONS:
        try:
            extension(name)
        except ImportError as error:
            raise ConfigError(
                f"{key} = apex cannot run: its extension {name} cannot be loaded ({error}), as when it was built for "
                f"another torch; build it again ({BUILD}), or use {key}=auto"
            ) from None


def extension(name: str) -> ModuleType:
    """Returns a compiled module of apex.

    Args:
        name: one of EXTENSIONS.

    Raises:
        ImportError: the module is not compatible with this PyTorch.
    """
    # The extensions need PyTorch's symbols, which are available once torch is imported.
    import torch  # noqa: F401

    return importlib.import_module(name)
