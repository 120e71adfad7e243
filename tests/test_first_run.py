"""The first command of the tutorial, on English text that is part of every Python."""

from __future__ import annotations

import pydoc_data.topics

import pytest

from tests.command import StartCommand, validations_of


@pytest.mark.slow
@pytest.mark.distributed
def test_the_first_run_learns(megads: StartCommand) -> None:
    """Catches a tutorial that trains on noise: its held-out loss must be well below the unigram loss."""
    (megads.folder / "notes").mkdir()
    for name, text in pydoc_data.topics.topics.items():
        (megads.folder / "notes" / f"{name.replace('/', '-')}.txt").write_text(text)
    trained = megads("train", "experiment=first", "run.id=first", "cluster.peak_tflops=1").end()
    assert trained.code == 0, trained.err
    last = validations_of(megads.folder / "runs" / "first")[-1]
    # On a slow machine the two minutes are the shorter of the two.
    told = ("train.steps = auto: ", "train.minutes = 2: ")
    assert any(text in trained.out for text in told) and f"finished at step {last['step']}:" in trained.out
    assert last["valid/held_out/loss"] < last["valid/held_out/unigram_loss"] - 0.8
    said = megads("generate", "run=runs/first", "prompt=The ", "max_new_tokens=60", "temperature=0.5").end()
    assert said.code == 0, said.err
    known = set(" ".join(pydoc_data.topics.topics.values()).split())
    words = said.out.split()
    assert sum(word in known for word in words) > len(words) / 2, said.out
