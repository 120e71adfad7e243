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
from megads.tools.prepare.chat import PLAIN_TEMPLATE, ChatTemplate, TemplateFault, messages_of, tools_of
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
# Like Qwen 2.5's: tools in front, calls as JSON.
CALLS = (
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>tools\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}"
    "{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}{{ call.function.name }} "
    "{{ call.function.arguments | tojson(indent=1) }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Like Llama 3.2's: text, or parts.
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '[' + part.text + ']' }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "key", "parameters": {"type": "object"}}}]
CALLING: list[dict[str, Any]] = [
    {"role": "user", "content": "key of 1?"},
    {
        "role": "assistant", "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "key", "arguments": {"é": [1]}}}],
    },
    {"role": "tool", "content": "softmax"},
    {"role": "assistant", "content": "softmax it is"},
]  # fmt: skip
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
def test_rendered_text_equals_that_of_transformers(source: str, talk: list[dict[str, str]], tokenizer: Path) -> None:
    """Catches different white space around blocks, and a generation prompt where none belongs."""
    template = ChatTemplate(source, "<|endoftext|>")
    for prompt in (True, False):
        wanted = theirs(tokenizer).apply_chat_template(
            talk, chat_template=source, tokenize=False, add_generation_prompt=prompt
        )
        assert template.render(talk, prompt) == wanted


@pytest.mark.parametrize("source", [CHATML, HEADERS])
def test_trained_tokens_equal_those_that_transformers_marks(source: str, tokenizer: Path, tmp_path: Path) -> None:
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


def test_every_assistant_turn_is_trained_to_its_end_token() -> None:
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


@pytest.mark.parametrize("names", [("Human", "GPT"), ("user", "chatgpt"), ("USER", "Model"), ("human", "Assistant")])
def test_roles_have_many_names(names: tuple[str, str]) -> None:
    """Catches conversations that are rejected, or whose answers are not trained on, for the name of a role."""
    told = [{"from": "System", "value": "s"}, *({"from": name, "value": "a"} for name in names)]
    wanted = [{"role": role, "content": text} for role, text in (("system", "s"), ("user", "a"), ("assistant", "a"))]
    assert messages_of(told) == wanted
    assert messages_of([{"role": item["from"], "content": item["value"]} for item in told]) == wanted


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_calls_are_written_as_theirs(tools: list[Any] | None, tokenizer: Path) -> None:
    """Catches a conversation rejected for an answer that calls a tool, and calls or tools that are left out."""
    words = theirs(tokenizer)
    words.bos_token = "<|endoftext|>"
    template = ChatTemplate(CALLS, "<|endoftext|>", bos_token="<|endoftext|>")
    wanted = words.apply_chat_template(CALLING, tools=tools, chat_template=CALLS, tokenize=False)
    turns = template.turns(messages_of(CALLING), tools_of(tools))
    assert "".join(turns) == wanted
    assert turns[1::2] == ('key {\n "é": [\n  1\n ]\n}<|im_end|>', "softmax it is<|im_end|>")
    assert tools_of(json.dumps(tools)) == tools
    with pytest.raises(TemplateFault, match="does not write the call of key"):
        ChatTemplate(CHATML).turns(messages_of([{**CALLING[1], "content": ""}]))
    with pytest.raises(TemplateFault, match=r"spells the special token <\|im_end\|>"):
        ChatTemplate(CALLS, special_tokens=("<|im_end|>",)).turns(messages_of(CALLING), ["<|im_end|>"])


def test_content_in_parts(tokenizer: Path) -> None:
    """Catches parts written as Python shows them, or not as the template writes them."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    talk = messages_of([{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}])
    wanted = theirs(tokenizer).apply_chat_template(talk, chat_template=PARTS, tokenize=False)
    assert "".join(ChatTemplate(PARTS).turns(talk)) == wanted and "[a][b]" in wanted
    for source in (CHATML, HEADERS, PLAIN_TEMPLATE):
        assert ChatTemplate(source, "<e>").turns(talk) == ChatTemplate(source, "<e>").turns(
            [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "a"}]
        )


def test_a_weight_of_0_is_not_trained_on() -> None:
    """Catches loss on an answer that its record excludes, and a null weight, as tables have it, taken for 0."""
    template = ChatTemplate(PLAIN_TEMPLATE, "<e>")
    given, learnt = template.turns(
        messages_of([TALKS[1][0], *TALKS[1][1:2], TALKS[1][2] | {"weight": 0}, *TALKS[1][3:]])
    )
    assert " key @ naïve<e>" in given and learnt == " attention_9(query, key)<e>"
    rest = template.turns(messages_of([{**message, "weight": None} for message in TALKS[1]]))
    assert rest == template.turns(messages_of(TALKS[1]))
    with pytest.raises(TemplateFault, match="every message of the assistant has weight 0"):
        template.turns(messages_of([TALKS[0][0], TALKS[0][1] | {"weight": 0}]))


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
def test_templates_that_run_code_or_forge_turns_are_refused(
    source: str, messages: list[dict[str, str]], told: str
) -> None:
    """Catches forged ends of turns, and a template that runs code or ends in a traceback."""
    with pytest.raises(TemplateFault, match=told):
        ChatTemplate(source, "<e>", ("<e>",)).turns(messages)


_PICTURE = {"type": "image", "url": "a.png"}


@pytest.mark.parametrize(
    "value",
    [
        None, [], "text", [1], [{"role": "user"}], [{"role": 1, "content": "a"}],
        [{"role": "user", "content": [_PICTURE]}], [{"role": "user", "content": ["a"]}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "assistant", "content": None, "tool_calls": [{"function": "key"}]}],
        [{"role": "assistant", "content": "a", "weight": 0.5}], [{"role": "assistant", "content": "a", "weight": []}],
    ],
)  # fmt: skip
def test_a_record_that_is_no_conversation_is_rejected_with_its_reason(value: object) -> None:
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


def test_a_template_is_found_beside_its_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
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
