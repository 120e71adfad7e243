"""Tests which DeepSpeed releases may run."""

from __future__ import annotations

import pytest

from megads.engine.deepspeed_adapter import require_deepspeed
from megads.errors import ConfigError


@pytest.mark.parametrize("version", ["0.17.6", "0.18.2", "0.18.9", "0.19.2", "0.19.7", "0.19.8rc1", "0.9.5"])
def test_deepspeed_releases_that_train_wrong_are_refused(version: str) -> None:
    """Catches versions compared as strings, and an accepted release that sums or divides pipeline gradients twice, or
    applies non-finite steps."""
    with pytest.raises(ConfigError, match=f"DeepSpeed {version} .*deepspeed>=0.19.8"):
        require_deepspeed(version)


def test_correct_and_installed_deepspeed_releases_pass() -> None:
    """Catches a refusal of a later release, or of one built from source, and an environment whose DeepSpeed trains
    incorrectly."""
    require_deepspeed()
    for version in ("0.19.8", "0.19.9", "0.19.8+unknown", "0.20.0", "1.0"):
        require_deepspeed(version)
