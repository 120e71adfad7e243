from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from megads.data.block_tokenizer import BlockTokenizer, TokenizeSettings
from megads.data.blocks import Lines
from megads.data.carried_tokenizer import find_tokenizer
from megads.data.config import PreprocessConfig, TextSpecialTokens, TokenizerConfig
from megads.data.indexed import IndexedDataset
from megads.data.preprocess import preprocess
from megads.data.sidecar import read_sidecar
from megads.data.tokenizer import load_tokenizer, train_tokenizer
from megads.errors import ConfigError, DataError, MegadsError

CHAT = "<|im_start|>user\nWhat is 1 < 2?<|im_end|>\n<|im_start|>assistant\nTrue.<|im_end|>\n"
TEXTS = ["import torch\n", "naïve 🚀 text", "ends with <|endoftext|> in the middle", "x" * 3000, " "]


@pytest.fixture
def config(tmp_path: Path) -> PreprocessConfig:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "text.jsonl").write_text("\n".join([*lines[:2], "broken", *lines[2:]]))
    tokenizer = str(tmp_path / "tokenizer.json")
    train_tokenizer(TokenizerConfig(input=[str(tmp_path / "text.jsonl")], output=tokenizer, vocab_size=280))
    return PreprocessConfig(
        input=[str(tmp_path / "text.jsonl")], tokenizer=tokenizer, output=str(tmp_path / "new" / "corpus")
    )


def test_end_to_end(config: PreprocessConfig) -> None:
    """Catches lost, reordered or changed documents, missing ends, and text that forges an end of document."""
    report = preprocess(config)
    dataset = IndexedDataset(config.output)
    tokenizer = load_tokenizer(config.tokenizer)
    assert dataset.dtype == "<u2"
    assert dataset.num_documents == len(TEXTS)
    for document, text in enumerate(TEXTS):
        ids = dataset.document_tokens(document).tolist()
        assert ids[-1] == 0 and 0 not in ids[:-1]
        assert tokenizer.decode(ids[:-1], skip_special_tokens=False) == text
    made = report.sidecar
    assert made == read_sidecar(config.output)
    assert (made.documents, made.tokens) == (dataset.num_documents, dataset.num_tokens)
    assert made.max_token_id == int(dataset.stream(range(len(TEXTS))).max())
    assert made.vocab_size == tokenizer.get_vocab_size()
    assert made.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert made.tokenizer_sha256 == hashlib.sha256(Path(config.tokenizer).read_bytes()).hexdigest()
    assert made.rejected_lines == 1 and "text.jsonl:3: not JSON" in made.rejected_examples[0]
    assert "5 documents" in str(report) and "1 lines rejected" in str(report)
    assert sorted(path.name for path in Path(config.output).parent.iterdir()) == [
        "corpus.bin", "corpus.idx", "corpus.json", "corpus.tokenizer.json",
    ]  # fmt: skip


@pytest.fixture
def chat(tmp_path: Path) -> PreprocessConfig:
    """One rendered conversation, and a tokenizer with the special tokens of its template."""
    (tmp_path / "chat.jsonl").write_text(json.dumps({"text": CHAT}) + "\n")
    path = str(tmp_path / "tokenizer.json")
    train_tokenizer(TokenizerConfig(input=[str(tmp_path / "chat.jsonl")], output=path, vocab_size=300))
    tokenizer = load_tokenizer(path)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(path)
    return PreprocessConfig(input=[str(tmp_path / "chat.jsonl")], tokenizer=path, output=str(tmp_path / "chat"))


@pytest.mark.parametrize(("setting", "turns"), [(TextSpecialTokens.ignore, 0), (TextSpecialTokens.parse, 2)])
def test_special_tokens_of_a_chat_template(chat: PreprocessConfig, setting: TextSpecialTokens, turns: int) -> None:
    """Catches turns of a chat that are ordinary text though tokens were asked for, the other way round, and a prompt
    that is read otherwise than the dataset was."""
    chat.text_special_tokens = setting
    assert preprocess(chat).sidecar.text_special_tokens == setting.value
    [*ids, end_of_document] = IndexedDataset(chat.output).document_tokens(0).tolist()
    tokenizer = load_tokenizer(chat.tokenizer)
    marks = [tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert [ids.count(mark) for mark in marks] == [turns, turns] and end_of_document == 0
    assert tokenizer.decode(ids, skip_special_tokens=False) == CHAT
    assert find_tokenizer([Path(chat.output)], None).tokenizer.encode(CHAT, add_special_tokens=False).ids == ids


def test_parts_with_the_other_special_tokens_are_not_taken(chat: PreprocessConfig, tmp_path: Path) -> None:
    """Catches a start that goes on from parts in which special tokens were read otherwise."""
    digest = hashlib.sha256(Path(chat.tokenizer).read_bytes()).hexdigest()
    block = Lines(chat.input[0], Path(chat.input[0]).read_bytes(), True, 0)
    kept = [
        BlockTokenizer(TokenizeSettings(chat.tokenizer, digest, ("text",), 0, "<u2", "hf", setting), tmp_path)(0, block)
        for setting in ("ignore", "ignore", "parse", "parse", "ignore")
    ]
    assert [made.kept for made in kept] == [False, True, False, True, False]


def test_no_end_of_document_where_none_is_wanted(config: PreprocessConfig) -> None:
    """Catches an end that is appended regardless."""
    config.end_of_document = None
    assert preprocess(config).sidecar.end_of_document_id is None
    assert 0 not in IndexedDataset(config.output).stream(range(len(TEXTS)))


def test_overwriting_must_be_asked_for(config: PreprocessConfig) -> None:
    """Catches a dataset of many hours lost to a repeated command."""
    preprocess(config)
    before = IndexedDataset(config.output).fingerprint()
    config.end_of_document = None
    with pytest.raises(ConfigError, match=r"corpus.bin exists; choose another output or give overwrite=true"):
        preprocess(config)
    assert IndexedDataset(config.output).fingerprint() == before
    config.overwrite = True
    preprocess(config)
    assert IndexedDataset(config.output).fingerprint() != before


def test_the_dataset_carries_its_tokenizer(config: PreprocessConfig) -> None:
    """Catches a dataset whose text nobody can read back, and a rebuild with the carried tokenizer that deletes it."""
    preprocess(config)
    carried = f"{config.output}.tokenizer.json"
    content = Path(config.tokenizer).read_bytes()
    assert Path(carried).read_bytes() == content
    config.tokenizer, config.overwrite = carried, True
    preprocess(config)
    assert Path(carried).read_bytes() == content


def test_an_input_is_never_overwritten(config: PreprocessConfig, tmp_path: Path) -> None:
    """Catches the sidecar replacing the raw text: <output>.json may be an input."""
    raw = tmp_path / "corpus.json"
    raw.write_bytes((tmp_path / "text.jsonl").read_bytes())
    config.input, config.output, config.overwrite = [str(raw)], str(tmp_path / "corpus"), True
    with pytest.raises(ConfigError, match=r"corpus.json is an input and would be lost"):
        preprocess(config)
    assert raw.read_bytes() == (tmp_path / "text.jsonl").read_bytes()


BAD_INPUTS: list[tuple[dict[str, object], type[MegadsError], int, str]] = [
    ({"end_of_document": "</s>"}, ConfigError, 2, "end_of_document = </s>: not a token of"),
    ({"tokenizer": "/nonexistent.json"}, DataError, 3, "no such tokenizer file"),
    ({"input": ["/nonexistent/*.jsonl"]}, DataError, 3, "matches no file"),
    ({"text_field": "body"}, DataError, 3, "no documents"),
    ({"output": "/proc/nonexistent/corpus"}, DataError, 3, "writing failed"),
]


@pytest.mark.parametrize("change,kind,exit_code,message", BAD_INPUTS)
def test_bad_inputs(
    config: PreprocessConfig, change: dict[str, object], kind: type[MegadsError], exit_code: int, message: str
) -> None:
    """Catches a wrong exit code, a traceback, or half a dataset left behind."""
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(kind, match=message) as caught:
        preprocess(config)
    assert caught.value.exit_code == exit_code
    folder = Path(config.output).parent
    assert not folder.exists() or not list(folder.iterdir())
