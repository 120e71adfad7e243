"""The config of a run as it is written down: its digest, the run's name, and the frozen file that the ranks read."""

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

from megads.config import RootConfig
from megads.errors import ConfigError
from megads.runtime.files import read_regular
from megads.runtime.run_dir import CONFIG_FILE, recorded_config, recorded_config_path
from megads.train_config import LENGTHS


def config_dict(config: RootConfig) -> dict[str, Any]:
    """Returns the config as plain dicts, lists, strings and numbers."""
    return cast(dict[str, Any], json.loads(json.dumps(asdict(config))))


def config_digest(config: RootConfig) -> str:
    """Returns the sha256 of the config's canonical JSON, as 64 hex digits."""
    return _sha256(config_dict(config))


def derive_run_id(config: RootConfig, name: str) -> str:
    """Names a run after what it computes, so that the same command again continues the run.

    How long it trains, where and how it writes, what watches it and which kernels compute it are left out: a longer
    training continues the shorter one. Of its checkpoints only the place of its first weights counts.

    Args:
        config: the run's config.
        name: first part of the id.

    Returns:
        `<name>-<8 hex digits>`.
    """
    return f"{name}-{computation_digest(config)[:8]}"


def computation_digest(config: RootConfig) -> str:
    """Returns a sha256, as 64 hex digits, of what a run computes in which layout; see `derive_run_id`."""
    content = config_dict(config)
    for room in ("run", "logging", "cluster", "checkpoint", "ops", "plugins", "hooks", "deepspeed", "resilience"):
        del content[room]
    for length in LENGTHS:
        del content["train"][length]
    for watching in ("tasks", "tasks_folder", "tasks_every_steps", "tasks_limit", "tasks_fewshot"):
        del content["evaluation"][watching]
    del content["model"]["attention"]
    del content["optim"]["impl"]
    if config.checkpoint.init_from is not None:
        content["init_from"] = os.path.normpath(config.checkpoint.init_from)
    # The path of what was prepared says what was read of which files.
    for key in ("history", "extensions", "encoding", "cut_documents", "stream"):
        del content["data"][key]
    return _sha256(_differences(content, config_dict(RootConfig())))


def _differences(content: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults, so that a key which a later version adds renames no run that does not set it."""
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
    """Writes the resolved config as YAML; the file appears whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("w") as file:
        file.write(f"# sha256 {config_digest(config)}\n")
        file.write(OmegaConf.to_yaml(OmegaConf.create(config_dict(config))))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def record_config(config: RootConfig, run_dir: Path) -> None:
    """Freezes a start's config as the run's config.yaml, and keeps a copy for those who ask about its steps later."""
    kept = recorded_config_path(run_dir, config_digest(config))
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        freeze(config, kept)
    freeze(config, run_dir / CONFIG_FILE)


def config_of_start(run_dir: Path, digest: str) -> RootConfig | None:
    """Returns the config with which a run was once started, by its sha256; None where it was not kept.

    Keys that the version of that start did not have take their defaults.
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
        complete: refuse one that lacks keys, as those of earlier versions do; else they take their defaults.

    Raises:
        ConfigError: there is no such file, or it does not fit this version's schema.
    """
    try:
        text = recorded_config(path)
        if not isinstance(yaml.safe_load(text), dict):
            raise ValueError("it holds no keys")
        content = OmegaConf.create(text)
        config = cast(RootConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RootConfig), content)))
        # A missing key would silently become a default.
        if complete and OmegaConf.to_container(content) != config_dict(config):
            raise ValueError("keys are missing")
        return config
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: it is written by megads train at its start") from None
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a config of this version of megads ({str(error).splitlines()[0]}): "
            "start the run again with its command line, which writes the file anew"
        ) from error
