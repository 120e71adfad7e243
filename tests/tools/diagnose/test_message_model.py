"""The model that classifies a log line by its words if no signature matches."""

from __future__ import annotations

import pytest

from megads.tools.diagnose.causes import Cause
from megads.tools.diagnose.decision import CauseBasis, decide
from megads.tools.diagnose.evidence import survey_log
from megads.tools.diagnose.message_model import KnownMessage, MessageModel, known_messages, message_model, stems


def test_stems_are_words_without_what_varies() -> None:
    """Catches numbers, paths and word endings that make two messages of one kind differ."""
    one = stems("CheckpointingException: shape mismatches for key 12 in /a/b/c")
    other = stems("checkpoint exceptions, shapes mismatched for keys 7 in /x/y/z")
    assert {"checkpoint", "shap", "mismatch", "key"} <= one.keys() & other.keys()
    assert not any(any(letter.isdigit() for letter in stem) for stem in one)


def test_frames_count_less_than_the_line() -> None:
    """Catches traceback frames in a library that outweigh the error message itself."""
    frames = '  File "/x/torch/serialization.py", line 3, in _legacy_load\n'
    found = stems("ValueError: bad value", frames)
    assert found["bad"] == 1.0 and 0 < found["legacy"] < 1.0


def test_a_model_of_two_causes() -> None:
    """Catches words that count for the wrong cause, and a cause for a line of unknown words."""
    full = KnownMessage("the disk is full, quota reached", Cause.disk_full, False)
    lost = KnownMessage("the link went down, cable unplugged", Cause.nccl_remote_or_network, True)
    model = MessageModel([full, lost])
    found = model.judge("quota of the disk reached on node 7")
    assert found is not None and found.cause == Cause.disk_full and not found.restartable
    found = model.judge("a cable was unplugged")
    assert found is not None and found.cause == Cause.nccl_remote_or_network and found.restartable
    assert model.judge("xyzzy 12") is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("kernel: the accelerator's memory has an uncorrectable fault, chip quarantined", Cause.cuda_ecc_or_xid),
        ("TrainerPanic: gradients turned into infinite values after the update", Cause.nan_or_loss_divergence),
        ("orchestrator: worker pods never registered at the head, giving up", Cause.port_or_rendezvous),
    ],
)
def test_lines_that_no_signature_knows(line: str, cause: Cause) -> None:
    """Catches a log of another launcher or framework without a cause, and a confidence that is too high for it."""
    found = decide([survey_log("job.log", [line.encode()])])
    assert (found.cause, found.basis) == (cause, CauseBasis.wording)
    assert 0.35 <= found.confidence <= 0.7 and found.evidence[0].text == line


def test_known_messages_cover_every_cause() -> None:
    """Catches a cause that the model can never name, and a duplicate message."""
    messages = known_messages()
    assert {message.cause for message in messages} == {*Cause, None} - {Cause.node_lost}
    assert len({message.text for message in messages}) == len(messages)
    assert message_model().rarity("xyzzy") > message_model().rarity("gpu")
