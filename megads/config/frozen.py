"""Serialization of a run's config: its digest, the run id derived from it, and the frozen file that the ranks read."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megads.config.root import RootConfig
from megads.config.train import LENGTHS, rename_keys
from megads.errors import ConfigError
from megads.runtime.files import read_regular
from megads.runtime.run_dir import CONFIG_FILE, recorded_config, recorded_config_path


def config_dict(config: RootConfig) -> dict[str, Any]:
    """Returns the config as plain dicts, lists, strings and numbers."""
    return cast(dict[str, Any], json.loads(json.dumps(asdict(config))))


def config_digest(config: RootConfig) -> str:
    """Returns the sha256 of the config's canonical JSON, as 64 hex digits."""
    return _sha256(config_dict(config))


def derive_run_id(config: RootConfig, name: str) -> str:
    """Derives a run id from what the run computes, so that repeating the command continues the run.

    Length, output location and format, monitoring, engine and kernels are excluded, so a longer training continues a
    shorter one. Of the section `checkpoint` only init_from is included.

    Args:
        config: config of the run.
        name: first part of the id.

    Returns:
        `<name>-<8 hex digits>`.
    """
    return f"{name}-{computation_digest(config)[:8]}"


def computation_digest(config: RootConfig) -> str:
    """Returns a sha256, as 64 hex digits, of the settings that determine the computation and the layout; see
    `derive_run_id`."""
    content = config_dict(config)
    excluded = ("run", "logging", "cluster", "checkpoint", "ops", "plugins", "hooks", "engine", "deepspeed")
    # Of the dial, the values count that follow from it.
    for section in (*excluded, "resilience", "dial"):
        del content[section]
    for length in (*LENGTHS, "min_steps"):
        del content["train"][length]
    for watching in ("tasks", "tasks_folder", "tasks_every_steps", "tasks_limit", "tasks_fewshot"):
        del content["evaluation"][watching]
    del content["model"]["attention"]
    for kind in content["model"]["layer_pattern"]:
        del kind["attention"]
    del content["optim"]["impl"]
    if config.checkpoint.init_from is not None:
        content["init_from"] = os.path.normpath(config.checkpoint.init_from)
    # The path of the prepared data already depends on the files and how they were read.
    for key in ("history", "extensions", "encoding", "cut_documents", "stream"):
        del content["data"][key]
    found = _differences(content, config_dict(RootConfig()))
    # Hashed under its former name, as the ids of existing runs depend on it.
    if phases := found.get("train", {}).pop("phases", None):
        found["train"]["stages"] = phases
    return _sha256(found)


def _differences(content: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Values that differ from the defaults, so that a key added by a later version does not change existing run ids."""
    found = {}
    for key, value in content.items():
        usual = default.get(key)
        if isinstance(value, dict) and isinstance(usual, dict):
            if inner := _differences(value, usual):
                found[key] = inner
        elif value != usual:
            found[key] = value
    return found


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def freeze(config: RootConfig, path: Path) -> None:
    """Writes the resolved config as YAML, atomically."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("w") as file:
        file.write(f"# sha256 {config_digest(config)}\n")
        file.write(OmegaConf.to_yaml(OmegaConf.create(config_dict(config))))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def record_config(config: RootConfig, run_dir: Path) -> None:
    """Freezes a start's config as the run's config.yaml, and keeps a copy by digest for later lookups."""
    kept = recorded_config_path(run_dir, config_digest(config))
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        freeze(config, kept)
    freeze(config, run_dir / CONFIG_FILE)


def config_of_start(run_dir: Path, digest: str) -> RootConfig | None:
    """Returns the config of an earlier start of a run, by its sha256; None if it was not kept.

    Keys that did not exist in the version of that start get their defaults.
    """
    for path in (recorded_config_path(run_dir, digest), run_dir / CONFIG_FILE):
        with suppress(OSError, ValueError, ConfigError):
            if read_regular(path).decode().startswith(f"# sha256 {digest}\n"):
                return load_frozen(path, complete=False)
    return None


def load_frozen(path: Path, *, complete: bool = True) -> RootConfig:
    """Reads a config written by `freeze`.

    Args:
        path: the file.
        complete: whether to reject a config with missing keys, as earlier versions wrote; else they get their defaults.

    Raises:
        ConfigError: the file does not exist, or does not match this version's schema.
    """
    try:
        text = recorded_config(path)
        if not isinstance(yaml.safe_load(text), dict):
            raise ValueError("it holds no keys")
        keys = cast(dict[Any, Any], OmegaConf.to_container(OmegaConf.create(text)))
        rename_keys(keys, str(path))
        content = OmegaConf.create(keys)
        config = cast(RootConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RootConfig), content)))
        # A missing key would silently become a default.
        if complete and keys != config_dict(config):
            raise ValueError("keys are missing")
        return config
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: megads train writes it when it starts") from None
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a config of this version of megads ({str(error).splitlines()[0]}): "
            "start the run again with its command line, which rewrites the file"
        ) from error
