"""Imports DeepSpeed, as most tests of engines do."""

from __future__ import annotations

import tests.deepspeed_import  # noqa: F401
