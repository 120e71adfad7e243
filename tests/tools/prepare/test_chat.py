"""Conversations, compared with what transformers makes of them with the same templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from megads.data.config import TextSpecialTokens
from megads.data.indexed.dataset import IndexedDataset
from megads.data.indexed.sidecar import template_beside
from megads.errors import ConfigError, DataError
from megads.tools.prepare.chat import PLAIN_TEMPLATE, ChatTemplate, TemplateFault, messages_of
from megads.tools.prepare.config import PreprocessConfig
from megads.tools.prepare.preprocess import preprocess
from tests.small_run import write_dataset

transformers = pytest.importorskip("transformers")

CHATML = """{% for message in messages %}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}
{% generation %}
{{ message.content | trim }}<|im_end|>
{% endgeneration %}
{% else %}
{{ message.content | trim }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
# Like Llama 3's: a header, two newlines, and a token at the end of each turn.
HEADERS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)
# Like Qwen 3's: only the last answer has a thinking block.
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALKS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "attention 1?"}, {"role": "assistant", "content": "softmax 漢字 🚀"}],
    [
        {"role": "system", "content": "def"}, {"role": "user", "content": " query "},
        {"role": "assistant", "content": "key @ naïve"}, {"role": "user", "content": "return"},
        {"role": "assistant", "content": "attention_9(query, key)"}, {"role": "user", "content": "left out"},
    ],
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("data"))


def write_tokenizer(folder: Path) -> Path:
    """A trained one with the templates' special tokens."""
    path = Path(f"{write_dataset(folder)}.tokenizer.json")
    words = Tokenizer.from_file(str(path))
    words.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    words.save(str(path))
    return path


def theirs(tokenizer: Path) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<|endoftext|>")


@pytest.mark.parametrize("source", [CHATML, HEADERS, THINKS, PLAIN_TEMPLATE])
@pytest.mark.parametrize("talk", TALKS)
def test_text_is_theirs(source: str, talk: list[dict[str, str]], tokenizer: Path) -> None:
    """Catches different white space around blocks, and a generation prompt where none belongs."""
    template = ChatTemplate(source, "<|endoftext|>")
    for prompt in (True, False):
        wanted = theirs(tokenizer).apply_chat_template(
            talk, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        assert template.render(talk, prompt) == wanted


@pytest.mark.parametrize("source", [CHATML, HEADERS])
def test_what_is_learnt_is_what_they_mark(source: str, tokenizer: Path, tmp_path: Path) -> None:
    """Catches loss on prompts, no loss on an answer's end token, and turns that are not in one document."""
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    (tmp_path / "chat.jinja").write_text(source)
    config = PreprocessConfig(
        input=[str(tmp_path / "talks.jsonl")], tokenizer=str(tokenizer), output=str(tmp_path / "talks"),
        messages_field="messages", chat_template=str(tmp_path / "chat.jinja"),
    )  # fmt: skip
    preprocess(config)
    dataset = IndexedDataset(tmp_path / "talks")
    assert dataset.num_documents == len(TALKS)
    for number, talk in enumerate(TALKS):
        heard = talk[: max(place for place, message in enumerate(talk) if message["role"] == "assistant") + 1]
        wanted = theirs(tokenizer).apply_chat_template(
            heard, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert dataset.document_tokens(number).tolist() == wanted["input_ids"]
        first, last = dataset.document_index[number : number + 2]
        learnt = np.concatenate(
            [np.full(dataset.sequence_sizes[n], (n - first) % 2) for n in range(int(first), int(last))]
        )
        assert learnt.tolist() == wanted["assistant_masks"]
    assert template_beside(tmp_path / "talks.tokenizer.json") == source


def test_turns() -> None:
    """Catches loss on text that the model never generates, and no loss on an answer's end token."""
    template = ChatTemplate(PLAIN_TEMPLATE, "<e>")
    assert template.turns(TALKS[1]) == (
        "System: def\nUser:  query \nAssistant:", " key @ naïve<e>",
        "User: return\nAssistant:", " attention_9(query, key)<e>",
    )  # fmt: skip
    given, learnt = ChatTemplate(THINKS).turns(TALKS[1])
    assert "key @ naïve<|im_end|>" in given and learnt.startswith("<think>") and "attention_9" in learnt
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert messages_of(shared) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("source", "messages", "told"),
    [
        (PLAIN_TEMPLATE, [{"role": "user", "content": "a"}], "no message of the assistant"),
        (PLAIN_TEMPLATE, [{"role": "assistant", "content": "<e>"}], "spells the special token <e>"),
        ("{{ raise_exception('roles must alternate') }}", TALKS[0], "roles must alternate"),
        ("{{ messages[0].nothing.more }}", TALKS[0], "UndefinedError"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", TALKS[0], "SecurityError"),
        ("{{ messages.append(1) }}", TALKS[0], "SecurityError"),
        ("{{ messages | length }}", TALKS[0], "does not put an answer behind its generation prompt"),
    ],
)
def test_what_a_template_refuses(source: str, messages: list[dict[str, str]], told: str) -> None:
    """Catches forged ends of turns, and a template that runs code or ends in a traceback."""
    with pytest.raises(TemplateFault, match=told):
        ChatTemplate(source, "<e>", ("<e>",)).turns(messages)


@pytest.mark.parametrize("value", [None, [], "text", [1], [{"role": "user"}], [{"role": 1, "content": "a"}]])
def test_what_is_no_conversation(value: object) -> None:
    """Catches a record that ends in a traceback."""
    with pytest.raises(TemplateFault, match="message"):
        messages_of(value)


def test_bad_records_are_counted_and_bad_templates_named(tokenizer: Path, tmp_path: Path) -> None:
    """Catches a file rejected for one bad record, and a bad template reported for every record."""
    records = [{"messages": TALKS[0]}, {"other": 1}, {"messages": [{"role": "user", "content": "<|im_end|>"}]}]
    talks = tmp_path / "talks.jsonl"
    talks.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = PreprocessConfig(
        input=[str(talks)], tokenizer=str(tokenizer), output=str(tmp_path / "talks"), messages_field="messages",
        max_rejected=1,
    )  # fmt: skip
    made = preprocess(config).sidecar
    assert made.documents == 1 and made.rejected_reasons == {"no field 'messages'": 1, "no conversation": 1}
    assert "spells the special token <|im_end|>" in made.rejected_examples[1]
    config.overwrite, config.text_special_tokens = True, TextSpecialTokens.parse
    assert "no message of the assistant" in preprocess(config).sidecar.rejected_examples[1]
    config.chat_template = str(tmp_path / "chat.jinja")
    with pytest.raises(ConfigError, match=r"chat_template = .*: cannot be read"):
        preprocess(config)
    Path(config.chat_template).write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template = .*: is not a valid Jinja template"):
        preprocess(config)
    config.chat_template, config.input = None, [str(tmp_path / "talks.csv")]
    (tmp_path / "talks.csv").write_text("messages\n1\n")
    with pytest.raises(DataError, match="messages are read from JSON lines only"):
        preprocess(config)


def test_a_template_comes_with_its_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    """Catches a template that is not found in a downloaded folder, in each place where tools put it."""
    beside = tmp_path / "tokenizer.json"
    assert template_beside(beside) is None
    for found in (CHATML, [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
        assert template_beside(beside) == CHATML
    (tmp_path / "chat_template.jinja").write_text(HEADERS)
    assert template_beside(beside) == HEADERS
    words = Tokenizer.from_file(str(tokenizer))
    assert ChatTemplate(CHATML).end_of_answer(words) == ChatTemplate(THINKS).end_of_answer(words) == "<|im_end|>"
    assert ChatTemplate(PLAIN_TEMPLATE).end_of_answer(words) is None
