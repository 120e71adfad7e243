"""Supervised fine-tuning of an imported model: from conversations to answers, and to an exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from megads.batch import BatchInfo
from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.run_tokenizer import keep_tokenizer, open_run_tokenizer, tokenizer_of_data
from megads.data.indexed.sidecar import template_beside
from megads.tools.convert import load
from megads.tools.convert.import_config import ImportConfig
from megads.tools.generate import chat_template_of
from megads.tools.prepare.chat import ChatTemplate
from megads.tools.prepare.config import PreprocessConfig
from megads.tools.prepare.preprocess import preprocess
from tests.command import StartCommand, events_of, steps_of
from tests.tools.convert.test_formats import their_folder, their_model
from tests.tools.convert.test_model_folder import write_their_folder
from tests.tools.prepare.test_chat import HEADERS, TALKS, theirs, write_tokenizer

transformers = pytest.importorskip("transformers")
COPIES = 30


def template_with(begin: str) -> str:
    """A chat template that marks answers, as TRL wants it."""
    return (
        begin + "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + '<|turn|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|turn|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    )


def losses(tmp_path: Path, template: str) -> tuple[float, Any, Any]:
    """Returns megads' loss on TALKS with an imported model, and the model and tokenizer of transformers."""
    theirs_folder = write_their_folder(tmp_path / "theirs", template)
    run_dir = load.import_folder(ImportConfig(str(theirs_folder), str(tmp_path / "base"))).folder
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    config = PreprocessConfig(
        input=[str(tmp_path / "talks.jsonl")], tokenizer=str(run_dir / "tokenizer.json"), messages_field="messages",
        output=str(tmp_path / "talks"), end_of_document="</s>",
    )  # fmt: skip
    preprocess(config)
    model = load_unsharded(open_checkpoint(run_dir), torch.device("cpu"), torch.float32)
    dataset = IndexedDataset(tmp_path / "talks")
    found = []
    for number in range(dataset.num_documents):
        first, last = dataset.document_index[number : number + 2]
        learnt = torch.cat(
            [torch.full((int(dataset.sequence_sizes[n]),), bool((n - first) % 2)) for n in range(int(first), int(last))]
        )
        ids = torch.from_numpy(dataset.document_tokens(number).astype("int64"))[None]
        with torch.no_grad():
            logits = model(ids, BatchInfo(torch.arange(1)))[0, :-1]
        found.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[learnt[1:]])
    words = transformers.AutoTokenizer.from_pretrained(theirs_folder)
    return float(torch.cat(found).mean()), transformers.AutoModelForCausalLM.from_pretrained(theirs_folder), words


def test_a_dataset_tells_what_its_template_wrote(tmp_path: Path) -> None:
    """Catches prompts without bos_token for a run on a preprocessed dataset, which has no imported model's settings."""
    folder = write_their_folder(tmp_path / "theirs", template_with("{{ bos_token }}"))
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": TALKS[0]}) + "\n")
    config = PreprocessConfig(
        input=[str(tmp_path / "talks.jsonl")], tokenizer=str(folder / "tokenizer.json"), messages_field="messages",
        output=str(tmp_path / "talks"), end_of_document=None,
    )  # fmt: skip
    preprocess(config)
    source = tokenizer_of_data([str(tmp_path / "talks")], None)
    assert source is not None and source.chat_template is not None
    assert source.record.template_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    keep_tokenizer(tmp_path, source)
    found = open_run_tokenizer(tmp_path, source.record, None, [])
    prompt = chat_template_of(found, source.chat_template).prompt(TALKS[0][:1])
    assert prompt.startswith("<s><|start|>user") and prompt.endswith("<|start|>assistant\n")


BEGINS = pytest.mark.parametrize("begin", ["{{ bos_token }}", ""], ids=["bos", "no bos"])


@BEGINS
def test_loss_on_conversations_is_transformers(begin: str, tmp_path: Path) -> None:
    """Catches a template rendered without the token with which its conversations begin, or loss on other tokens."""
    ours, model, words = losses(tmp_path, template_with(begin))
    found = []
    for talk in TALKS:
        encoded = words.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        ids, learnt = torch.tensor([encoded["input_ids"]]), torch.tensor(encoded["assistant_masks"]).bool()
        assert (words.bos_token_id in encoded["input_ids"]) == bool(begin)
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        found.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[learnt[1:]])
    assert ours == pytest.approx(float(torch.cat(found).mean()), abs=1e-6)


@BEGINS
def test_loss_on_conversations_is_trls(begin: str, tmp_path: Path) -> None:
    """Catches fine-tuning on other tokens than TRL's trainer."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
    from datasets import Dataset

    ours, model, words = losses(tmp_path, template_with(begin))
    config = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), assistant_only_loss=True, per_device_eval_batch_size=len(TALKS), use_cpu=True,
        bf16=False, report_to=[], max_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    talks = Dataset.from_list([{"messages": talk} for talk in TALKS])
    trainer = trl.SFTTrainer(model, config, train_dataset=talks, eval_dataset=talks, processing_class=words)
    assert ours == pytest.approx(trainer.evaluate()["eval_loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.distributed
def test_an_imported_model_can_be_fine_tuned(tmp_path: Path, megads: StartCommand) -> None:
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
    # Other engines stop where generate stopped: at the end of a turn.
    ends = json.loads((tmp_path / "exported" / "generation_config.json").read_bytes())["eos_token_id"]
    assert ends == [0, Tokenizer.from_file(str(tokenizer)).token_to_id("<|im_end|>")]


@pytest.mark.distributed
def test_a_base_model_cannot_chat(tmp_path: Path, megads: StartCommand) -> None:
    """Catches a base model that is prompted with a chat template it has never seen."""
    tokenizer = write_tokenizer(tmp_path / "data")
    model = their_model("bloom", vocab_size=Tokenizer.from_file(str(tokenizer)).get_vocab_size() + 1)
    folder = their_folder(tmp_path / "theirs", tokenizer, model)
    assert megads("import", f"input={folder}", "output=runs/base").end().code == 0
    ended = megads("generate", "run=base", "chat=true", "prompt=a").end()
    assert ended.code == 2 and "there is no chat template next to runs/base/tokenizer.json" in ended.err
