from __future__ import annotations

import json
from pathlib import Path

import pytest

from megads.data.indexed.sidecar import Sidecar, carried_path, find_tokenizer, read_sidecar, sidecar_path, write_sidecar
from megads.errors import DataError
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import train_tokenizer

SIDECAR = Sidecar("ab" * 32, 300, 299, 0, 5, 100, 400, 1, {"not JSON": 1}, ["a:1: not JSON"], ["a"])


def test_every_field_of_a_sidecar_survives_a_round_trip(tmp_path: Path) -> None:
    """Catches a field that is not written or not read."""
    assert read_sidecar(tmp_path / "d") is None
    write_sidecar(tmp_path / "d", SIDECAR)
    assert read_sidecar(tmp_path / "d") == SIDECAR


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    """Catches an added field that makes every older release refuse the dataset."""
    write_sidecar(tmp_path / "d", SIDECAR)
    content = json.loads((tmp_path / "d.json").read_text())
    (tmp_path / "d.json").write_text(json.dumps({**content, "new_field": 1}))
    assert read_sidecar(tmp_path / "d") == SIDECAR


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format_version": 1}', '{"format_version": 99}'])
def test_a_damaged_or_foreign_sidecar_is_refused(tmp_path: Path, content: str) -> None:
    """Catches a traceback for a truncated sidecar, and an unknown version read as if known."""
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(DataError, match=r"d.json: is no sidecar"):
        read_sidecar(tmp_path / "d")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tokenizers and a dataset made with the first; read only."""
    folder = tmp_path_factory.mktemp("data")
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"number {i} of many words"}) + "\n" for i in range(30)))
    for name, size in (("mine", 270), ("other", 265)):
        train_tokenizer(TokenizerConfig(input=[str(text)], output=str(folder / f"{name}.json"), vocab_size=size))
    preprocess(
        PreprocessConfig(input=[str(text)], tokenizer=str(folder / "mine.json"), output=str(folder / "set" / "corpus"))
    )
    return folder


@pytest.fixture
def prefix(made: Path, tmp_path: Path) -> Path:
    """A copy of the dataset's small files, to be damaged."""
    for path in (made / "set").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path / "corpus"


def test_a_datasets_tokenizer_is_found_beside_it(prefix: Path, tmp_path: Path) -> None:
    """Catches a search that stops at the first folder, and text that is encoded as a special token."""
    found = find_tokenizer([tmp_path / "nowhere" / "corpus", prefix], None)
    assert (found.path, found.vocab_size, found.end_of_document_id, found.verified) == (
        carried_path(prefix), 270, 0, True,
    )  # fmt: skip
    assert 0 not in found.tokenizer.encode("an <|endoftext|> in the text", add_special_tokens=False).ids


@pytest.mark.fault(16)
def test_another_tokenizer_is_refused(prefix: Path, made: Path) -> None:
    """Catches text decoded with another vocabulary, which looks like that of a badly trained model."""
    assert find_tokenizer([prefix], str(made / "mine.json")).verified
    with pytest.raises(DataError, match=r"other.json is not the tokenizer with which .*corpus was made"):
        find_tokenizer([prefix], str(made / "other.json"))
    carried_path(prefix).write_bytes((made / "other.json").read_bytes())
    with pytest.raises(DataError, match=r"corpus.tokenizer.json is not the tokenizer"):
        find_tokenizer([prefix], None)


def test_a_tokenizer_beside_an_older_dataset_is_checked(prefix: Path, made: Path) -> None:
    """Catches older datasets that cannot be used, and a tokenizer beside the dataset that is used unchecked."""
    carried_path(prefix).unlink()
    neighbour = prefix.parent / "tokenizer.json"
    neighbour.write_bytes((made / "other.json").read_bytes())
    with pytest.raises(DataError, match=r"no tokenizer found \(looked for .*corpus.tokenizer.json\): give tokenizer="):
        find_tokenizer([prefix], None)
    neighbour.write_bytes((made / "mine.json").read_bytes())
    assert find_tokenizer([prefix], None).path == neighbour
    sidecar_path(prefix).unlink()
    given = find_tokenizer([prefix], str(made / "other.json"))
    assert not given.verified and given.end_of_document_id is None
    with pytest.raises(DataError, match="a data path in the run's config"):
        find_tokenizer([], None)
