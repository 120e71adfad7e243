from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from megads.data.config import PreprocessConfig, TokenizerConfig
from megads.data.indexed import IndexedDataset
from megads.data.preprocess import preprocess
from megads.data.sidecar import read_sidecar
from megads.data.tokenizer import load_tokenizer, train_tokenizer
from megads.errors import ConfigError, DataError, MegadsError

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
