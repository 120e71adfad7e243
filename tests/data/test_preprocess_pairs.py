"""`megads preprocess prompt_field=... response_field=...`, and training on what it makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from megads.config import open_run_data
from megads.data.config import PreprocessConfig, TokenizerConfig
from megads.data.indexed import IndexedDataset, bin_path, idx_path, token_dtype
from megads.data.packed import TurnWriter
from megads.data.preprocess import preprocess
from megads.data.tokenizer import train_tokenizer
from megads.errors import ConfigError, DataError
from megads.frozen_config import load_frozen
from tests.command import StartCommand, small_model, steps_of

PAIRS = [(f"question {i} " * (i % 5), f"answer {i * i} é\n" * (1 + i % 7)) for i in range(90)]


def write_inputs(folder: Path) -> tuple[list[str], Path]:
    """The pairs, first half in parquet, the rest in JSON lines with broken ones between them; and a tokenizer."""
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


def test_the_same_as_by_hand(tmp_path: Path) -> None:
    """Catches a prompt that is learnt, an end token after the prompt, and records that lose their other half."""
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


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    """Catches prompts alone that pass for documents, and plain text, which has no fields, taken for one of them."""
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


@pytest.mark.distributed
def test_a_packed_run_learns_the_responses(tmp_path: Path, megads: StartCommand) -> None:
    """Catches pairs that the training takes for one sequence, and so learns the prompts of, or not the ends."""
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
