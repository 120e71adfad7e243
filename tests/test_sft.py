"""Supervised fine-tuning of an imported model: from conversations to answers, and to an exported folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megads.data.indexed.sidecar import template_beside
from megads.tools.prepare.chat import ChatTemplate
from tests.command import StartCommand, events_of, steps_of
from tests.tools.convert.test_formats import their_folder, their_model
from tests.tools.prepare.test_chat import HEADERS, TALKS, theirs, write_tokenizer

pytest.importorskip("transformers")
COPIES = 30


@pytest.mark.slow
@pytest.mark.distributed
def test_fine_tuning_from_an_imported_model(tmp_path: Path, megads: StartCommand) -> None:
    """Catches prompts in the loss, weights or a chat template that are lost on the way, and answers without an end."""
    tokenizer = write_tokenizer(tmp_path / "data")
    rows = Tokenizer.from_file(str(tokenizer)).get_vocab_size() + 1
    model = their_model("qwen3", vocab_size=rows, num_key_value_heads=2)
    folder = their_folder(tmp_path / "theirs", tokenizer, model)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": HEADERS}))
    (tmp_path / "conversations.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS * COPIES)
    )
    assert megads("import", f"input={folder}", "output=runs/base").end().code == 0
    given = ("--config-dir=runs/base", "experiment=sft", "model=imported", "checkpoint.init_from=runs/base")
    short = ("train.epochs=1", "train.global_batch_size=2", "train.seq_len=127", "parallel.tp=2", "run.id=chat")
    ended = megads("train", *given, *short, "data.split=[1,0]").end()
    assert ended.code == 0, ended.err
    words = theirs(tokenizer)
    answers = [text for talk in TALKS for text in ChatTemplate(HEADERS).turns(talk)[1::2]]
    learnt = sum(len(words(text, add_special_tokens=False).input_ids) for text in answers)
    run_dir = tmp_path / "runs" / "chat"
    steps = steps_of(run_dir)
    # A sample may be left over, as an epoch need not be whole batches.
    assert steps[-1]["tokens"] == pytest.approx(learnt * COPIES, rel=0.1)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert events_of(run_dir, "init_from")
    asked = ("run=chat", "chat=true", "temperature=0", "max_new_tokens=8")
    ended = megads("generate", *asked, "prompt=attention 1?").end()
    assert ended.code == 0 and "<|im_" not in ended.out, ended.err
    ended = megads("generate", *asked, "prompt=a <|im_end|>").end()
    assert ended.code == 2 and "spells the special token <|im_end|>" in ended.err
    assert megads("export", "run=chat", "output=exported").end().code == 0
    for place in (run_dir, tmp_path / "exported"):
        assert template_beside(place / "tokenizer.json") == HEADERS


@pytest.mark.distributed
def test_a_run_without_conversations_cannot_chat(tmp_path: Path, megads: StartCommand) -> None:
    """Catches a base model that is prompted with a chat template it has never seen."""
    tokenizer = write_tokenizer(tmp_path / "data")
    model = their_model("bloom", vocab_size=Tokenizer.from_file(str(tokenizer)).get_vocab_size() + 1)
    folder = their_folder(tmp_path / "theirs", tokenizer, model)
    assert megads("import", f"input={folder}", "output=runs/base").end().code == 0
    ended = megads("generate", "run=base", "chat=true", "prompt=a").end()
    assert ended.code == 2 and "there is no chat template next to runs/base/tokenizer.json" in ended.err
