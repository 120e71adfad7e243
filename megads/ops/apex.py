"""NVIDIA apex (https://github.com/NVIDIA/apex): whether it is here, with the compiled extensions that megads calls.

Nothing of apex is imported to find out. The package of that name on PyPI is another project, which is told apart by
what lies in its folder: both are distributions called `apex`.
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
"""Compiled modules that megads calls; apex' own packages need them, and `--cuda_ext` makes both."""
NVIDIAS_PARTS = ("apex.normalization", "apex.optimizers", "apex.multi_tensor_apply")
"""What every release of NVIDIA's has had, built with extensions or without, and the other project has not."""
BUILD = (
    "git clone https://github.com/NVIDIA/apex, and in that folder: pip install -v --disable-pip-version-check "
    '--no-cache-dir --no-build-isolation --config-settings "--build-option=--cpp_ext" --config-settings '
    '"--build-option=--cuda_ext" ./'
)
INT32_ELEMENTS = 2**31
"""Apex' kernels count with 32 bits: what has as many elements or more is not for them."""


class ApexState(StrEnum):
    """What is importable under the name apex."""

    absent = "absent"
    wrong_package = "wrong package"
    python_only = "python-only"
    present = "present"


@dataclass(frozen=True)
class Apex:
    """What was found.

    Attributes:
        state: what it is.
        version: of the distribution of that name; empty where it has no metadata.
        missing: extensions of EXTENSIONS that are not there.
    """

    state: ApexState
    version: str = ""
    missing: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What is there, in one line."""
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
        """What to do to have it; empty where it is there."""
        return {
            ApexState.absent: f"build it from NVIDIA's sources ({BUILD})",
            ApexState.wrong_package: f"pip uninstall apex, then build NVIDIA's from its sources ({BUILD})",
            ApexState.python_only: f"build it again with --cpp_ext and --cuda_ext ({BUILD})",
            ApexState.present: "",
        }[self.state]


def find_apex() -> Apex:
    """What is importable here, by the import system's own search; imports nothing and runs nothing of it."""
    package = importlib.util.find_spec("apex")
    if package is None:
        return Apex(ApexState.absent)
    folders = list(package.submodule_search_locations or ())
    version = _version()
    # Not by importlib.util.find_spec, which would import the package around them.
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
    """Refuses apex where it cannot compute.

    Args:
        key: of the config, which asks for it.
        cuda: the model is on GPUs.

    Raises:
        ConfigError: it is not there, or not whole, or there is no GPU.
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
    """Loads the extensions into this process; `require_apex` let them pass.

    Args:
        key: of the config, which asks for them.

    Raises:
        ConfigError: they do not fit this torch.
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
        ImportError: it does not fit this torch.
    """
    # Their libraries want torch's own symbols, which are there once it is imported.
    import torch  # noqa: F401

    return importlib.import_module(name)
