"""What a checkpoint records of the software that wrote it."""

from __future__ import annotations

import torch

from megads.checkpoint.software import software, software_differences


def test_thread_count_and_versions_are_recorded() -> None:
    """Catches a resume under another thread count (other bits, see N5) that passes unnoticed."""
    threads = torch.get_num_threads()
    before = software()
    try:
        torch.set_num_threads(threads + 1)
        assert software_differences(before, software()) == [f"threads: {threads} then, {threads + 1} now"]
    finally:
        torch.set_num_threads(threads)
    assert {"python", "torch", "megads", "threads", "cpu_capability"} <= before.keys()
    assert software_differences(before, software()) == []


def test_unknown_entries_are_no_difference() -> None:
    """Catches a warning at every resume because one side recorded more."""
    assert software_differences({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == []
