"""Small real datasets, as for the tests of data."""

from __future__ import annotations

from tests.data.conftest import make_dataset

__all__ = ["make_dataset"]
