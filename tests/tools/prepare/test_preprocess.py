from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from megads.config.frozen import load_frozen
from megads.config.root import open_run_data
from megads.data.config import TextSpecialTokens
from megads.data.indexed.dataset import IndexedDataset, bin_path, idx_path, token_dtype
from megads.data.indexed.sidecar import find_tokenizer, load_tokenizer, read_sidecar
from megads.data.indexed.writer import TurnWriter
from megads.errors import ConfigError, DataError, MegadsError
from megads.tools.prepare.block_tokenizer import BlockTokenizer, TokenizeSettings
from megads.tools.prepare.blocks import Lines
from megads.tools.prepare.config import PreprocessConfig, TokenizerConfig
from megads.tools.prepare.preprocess import preprocess
from megads.tools.prepare.tokenizer import train_tokenizer
from tests.command import StartCommand, small_model, steps_of

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


@pytest.mark.always
def test_preprocess_keeps_every_document_in_order(config: PreprocessConfig) -> None:
    """Catches lost, reordered or changed documents, missing end-of-document tokens, and text that forges one."""
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
    assert "5 documents" in str(report) and "1 line rejected" in str(report)
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
def test_special_tokens_are_parsed_on_request(chat: PreprocessConfig, setting: TextSpecialTokens, turns: int) -> None:
    """Catches chat turns encoded as ordinary text although special tokens were requested, the reverse, and a prompt
    that is tokenized differently from the dataset."""
    chat.text_special_tokens = setting
    assert preprocess(chat).sidecar.text_special_tokens == setting.value
    [*ids, end_of_document] = IndexedDataset(chat.output).document_tokens(0).tolist()
    tokenizer = load_tokenizer(chat.tokenizer)
    marks = [tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert [ids.count(mark) for mark in marks] == [turns, turns] and end_of_document == 0
    assert tokenizer.decode(ids, skip_special_tokens=False) == CHAT
    assert find_tokenizer([Path(chat.output)], None).tokenizer.encode(CHAT, add_special_tokens=False).ids == ids


def test_parts_made_with_other_special_tokens_are_not_reused(chat: PreprocessConfig, tmp_path: Path) -> None:
    """Catches a restart that reuses parts in which special tokens were read differently."""
    digest = hashlib.sha256(Path(chat.tokenizer).read_bytes()).hexdigest()
    block = Lines(chat.input[0], Path(chat.input[0]).read_bytes(), True, 0)
    kept = [
        BlockTokenizer(TokenizeSettings(chat.tokenizer, digest, ("text",), 0, "<u2", "hf", setting), tmp_path)(0, block)
        for setting in ("ignore", "ignore", "parse", "parse", "ignore")
    ]
    assert [made.kept for made in kept] == [False, True, False, True, False]


def test_end_of_document_tokens_can_be_disabled(config: PreprocessConfig) -> None:
    """Catches an end-of-document token that is appended although it is disabled."""
    config.end_of_document = None
    assert preprocess(config).sidecar.end_of_document_id is None
    assert 0 not in IndexedDataset(config.output).stream(range(len(TEXTS)))


def test_every_document_begins_with_the_wanted_token(config: PreprocessConfig, tmp_path: Path) -> None:
    """Catches a token that is missing, comes twice, stands at the beginning of every piece of a long document, or
    changes anything else."""
    long = "".join(f"{number} words, " for number in range(100_000))  # two blocks
    (tmp_path / "long.txt").write_text(long)
    config.input.append(str(tmp_path / "long.txt"))
    preprocess(config)
    plain = IndexedDataset(config.output)
    config.begin_of_document, config.output = "<|endoftext|>", str(tmp_path / "begun")
    report = preprocess(config)
    begun = IndexedDataset(config.output)
    assert report.sidecar.begin_of_document_id == 0 == find_tokenizer([Path(config.output)], None).begin_of_document_id
    assert begun.num_documents == plain.num_documents == len(TEXTS) + 1
    for number in range(begun.num_documents):
        assert begun.document_tokens(number).tolist() == [0, *plain.document_tokens(number).tolist()]
    config.begin_of_document, config.overwrite = "<s>", True
    with pytest.raises(ConfigError, match=r"begin_of_document = <s>: not a token of .*begin_of_document=null"):
        preprocess(config)


def test_overwriting_must_be_asked_for(config: PreprocessConfig) -> None:
    """Catches a dataset of many hours overwritten by a repeated command."""
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
    """Catches a dataset without the tokenizer that decodes it, and a rebuild with the carried tokenizer that deletes
    it."""
    preprocess(config)
    carried = f"{config.output}.tokenizer.json"
    content = Path(config.tokenizer).read_bytes()
    assert Path(carried).read_bytes() == content
    config.tokenizer, config.overwrite = carried, True
    preprocess(config)
    assert Path(carried).read_bytes() == content


def test_an_input_is_never_overwritten(config: PreprocessConfig, tmp_path: Path) -> None:
    """Catches the sidecar overwriting the raw text: <output>.json may be an input."""
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
def test_bad_inputs_are_refused_and_leave_no_dataset(
    config: PreprocessConfig, change: dict[str, object], kind: type[MegadsError], exit_code: int, message: str
) -> None:
    """Catches a wrong exit code, a traceback, or a partial dataset left behind."""
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(kind, match=message) as caught:
        preprocess(config)
    assert caught.value.exit_code == exit_code
    folder = Path(config.output).parent
    assert not folder.exists() or not list(folder.iterdir())


PAIRS = [(f"question {i} " * (i % 5), f"answer {i * i} é\n" * (1 + i % 7)) for i in range(90)]


def write_inputs(folder: Path) -> tuple[list[str], Path]:
    """Writes the pairs, half as parquet, the rest as JSON lines with invalid ones between them; and a tokenizer."""
    half = len(PAIRS) // 2
    prompts, responses = zip(*PAIRS[:half], strict=True)
    pq.write_table(pa.table({"q": prompts, "a": responses, "id": list(range(half))}), folder / "a.parquet")
    lines = [json.dumps({"q": q, "a": a, "text": "not this"}) for q, a in PAIRS[half:]]
    lines[3:3] = ['{"q": "no response"}', '{"q": "x", "a": ""}', '{"q": 7, "a": "x"}']
    (folder / "b.jsonl").write_text("\n".join(lines))
    (folder / "all.txt").write_text("".join(q + a for q, a in PAIRS))
    tokenizer = folder / "t.json"
    train_tokenizer(TokenizerConfig(input=[str(folder / "all.txt")], output=str(tokenizer), vocab_size=300))
    return [str(folder / "a.parquet"), str(folder / "b.jsonl")], tokenizer


def test_pairs_equal_those_tokenized_by_hand(tmp_path: Path) -> None:
    """Catches a prompt stored as a response, an end token after the prompt, and records kept without their other
    half."""
    inputs, tokenizer_file = write_inputs(tmp_path)
    config = PreprocessConfig(
        input=inputs, tokenizer=str(tokenizer_file), output=str(tmp_path / "out"), prompt_field="q", response_field="a"
    )
    made = preprocess(config).sidecar
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end = tokenizer.token_to_id("<|endoftext|>")
    with TurnWriter(tmp_path / "hand", token_dtype(300)) as writer:
        for prompt, response in PAIRS:
            writer.append_turns(tokenizer.encode(prompt).ids, [*tokenizer.encode(response).ids, end])
    for path in (bin_path, idx_path):
        assert path(tmp_path / "out").read_bytes() == path(tmp_path / "hand").read_bytes()
    assert (made.documents, made.rejected_lines) == (len(PAIRS), 3)
    assert made.rejected_reasons == {"no field 'a'": 1, "empty field 'a'": 1, "field 'q' is not text": 1}
    assert made.rejected_examples[0] == f"{tmp_path}/b.jsonl:4: no field 'a'"


ALPACA: list[dict[str, str | None]] = [
    {"instruction": "def query", "input": "key", "output": "softmax"},
    {"instruction": "return", "input": "", "output": "attention"},
    {"instruction": "key", "input": None, "output": "query"},
]


def write_alpaca(folder: Path, kind: str) -> str:
    path = folder / f"alpaca.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in [*ALPACA, {"instruction": "a", "output": "b"}]))
    elif kind == "csv":
        rows = [",".join(record[name] or "" for name in record) for record in ALPACA]
        path.write_text("\n".join(["instruction,input,output", *rows]) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist(ALPACA), path)
    return str(path)


def test_only_the_prompt_of_a_pair_begins_with_the_token(tmp_path: Path) -> None:
    """Catches a token between a prompt and its response."""
    inputs, tokenizer_file = write_inputs(tmp_path)
    given = PreprocessConfig(
        input=inputs,
        tokenizer=str(tokenizer_file),
        output=str(tmp_path / "plain"),
        prompt_field="q",
        response_field="a",
    )
    preprocess(given)
    given.begin_of_document, given.output = "<|endoftext|>", str(tmp_path / "begun")
    end = Tokenizer.from_file(str(tokenizer_file)).token_to_id("<|endoftext|>")
    assert end is not None and preprocess(given).sidecar.begin_of_document_id == end
    plain, begun = IndexedDataset(tmp_path / "plain"), IndexedDataset(given.output)
    assert begun.sequence_sizes.tolist() == [size + 1 - n % 2 for n, size in enumerate(plain.sequence_sizes.tolist())]
    for number in range(plain.num_documents):
        assert begun.document_tokens(number).tolist() == [end, *plain.document_tokens(number).tolist()]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_the_input_of_alpaca_is_a_part_of_the_prompt(kind: str, tmp_path: Path) -> None:
    """Catches instructions that are trained on without the text that they are about."""
    _, tokenizer_file = write_inputs(tmp_path)
    config = PreprocessConfig(
        input=[write_alpaca(tmp_path, kind)], tokenizer=str(tokenizer_file), output=str(tmp_path / "out"),
        prompt_field="instruction", response_field="output", end_of_document=None,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"'input' would be left out .*input_field=input"):
        preprocess(config)
    config.input_field = "input"
    made = preprocess(config).sidecar
    assert made.documents == len(ALPACA) + (kind == "jsonl") and not made.rejected_lines
    dataset, tokenizer = IndexedDataset(tmp_path / "out"), Tokenizer.from_file(str(tokenizer_file))
    wanted = ("def query\n\nkey", "softmax", "return", "attention", "key", "query")
    for number, text in enumerate(wanted):
        assert tokenizer.decode(dataset.tokens(number).tolist()) == text
    config.prompt_field = config.response_field = None
    with pytest.raises(ConfigError, match="input_field = input: belongs to a prompt"):
        config.check()


def test_a_prompt_without_a_response_field_is_refused(tmp_path: Path) -> None:
    """Catches prompts alone accepted as documents, and plain text, which has no fields, accepted as a prompt or
    response."""
    inputs, tokenizer = write_inputs(tmp_path)
    config = PreprocessConfig(input=inputs, tokenizer=str(tokenizer), output=str(tmp_path / "out"), prompt_field="q")
    with pytest.raises(ConfigError, match="prompt_field = q and response_field = None: a pair needs both"):
        preprocess(config)
    config.response_field = "a"
    config.input = [*inputs, str(tmp_path / "all.txt")]
    with pytest.raises(DataError, match=r"all\.txt: plain text has no fields q, a: leave it out of input"):
        preprocess(config)
    config.input, config.response_field = inputs, "b"
    with pytest.raises(DataError, match=r"no column 'b'; it has q, a, id: .*prompt_field, response_field"):
        preprocess(config)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_packed_run_trains_on_responses_only(tmp_path: Path, megads: StartCommand) -> None:
    """Catches pairs that training treats as one sequence, so that it trains on prompts or not on end tokens."""
    inputs, tokenizer_file = write_inputs(tmp_path)
    given = (f"input={json.dumps(inputs)}", f"tokenizer={tokenizer_file}", "output=pairs")
    ended = megads("preprocess", *given, "prompt_field=q", "response_field=a", "workers=1").end()
    assert ended.code == 0, ended.err
    packed = {"data__packing": "best_fit", "data__document_mask": "true", "data__reset_positions": "true"}
    changes = {"train__seq_len": 48, "train__steps": 2, "run__dir": "run", "model__vocab_size": 300}
    ended = megads("train", *small_model(tmp_path / "pairs", **packed, **changes)).end()
    assert ended.code == 0, ended.err
    source, _ = open_run_data(load_frozen(tmp_path / "run" / "config.yaml"))
    documents = np.concatenate([runs.documents for runs in source.runs(np.arange(12))]).tolist()
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    learnt = 0
    for prompt, response in (PAIRS[document] for document in documents):
        place, count = len(tokenizer.encode(prompt).ids), len(tokenizer.encode(response).ids) + 1
        learnt += min(place + count, 49) - max(place, 1)
    assert steps_of(tmp_path / "run")[0]["tokens"] == learnt
    assert IndexedDataset(tmp_path / "pairs").num_sequences == 2 * len(PAIRS)
