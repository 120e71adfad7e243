"""The files beside a dataset that describe how it was made.

`<prefix>.json`, the sidecar, holds its counts and checksums. `<prefix>.tokenizer.json` is a copy of its tokenizer,
whose sha256 is in the sidecar. `<prefix>.chat_template.jinja` is the template that rendered the data's conversations,
if any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash
from tokenizers import Tokenizer

from megads.data.config import TextSpecialTokens
from megads.errors import ConfigError, DataError, reason_of
from megads.runtime.files import atomic_writer, read_json, read_regular
from megads.runtime.run_dir import HUGGING_FACE_FOLDER

FORMAT_VERSION = 1
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Names that Hugging Face gives to special tokens of a tokenizer."""
KEPT_EXAMPLES = 100
"""Number of rejected lines that a sidecar lists with file, line and reason."""
_PROBE = "A text with 1 number,\n\ta tab, and naïve 漢字 🚀."


@dataclass(frozen=True)
class Sidecar:
    """Description of a preprocessed dataset."""

    tokenizer_sha256: str
    """sha256 of the tokenizer file."""
    vocab_size: int
    """Embedding rows that this tokenizer needs: its largest id + 1."""
    max_token_id: int
    """Largest token id in the dataset."""
    end_of_document_id: int | None
    """Token appended to every document, if any."""
    documents: int
    """Number of documents in the dataset."""
    tokens: int
    """Number of tokens in the dataset."""
    text_bytes: int
    """Size of their text in UTF-8."""
    rejected_lines: int
    """Number of input lines without a document, and of rejected files."""
    rejected_reasons: dict[str, int]
    """Number of rejections by reason."""
    rejected_examples: list[str]
    """File, line and reason of the first rejections."""
    input_files: list[str]
    """Input files, in order."""
    bin_checksum: str | None = None
    """XXH3 of the .bin file, 16 hex digits; None for datasets of older versions."""
    idx_checksum: str | None = None
    """XXH3 of the .idx file."""
    index: str | None = None
    """Hash of the index, see `IndexedDataset.fingerprint`; None for datasets of older versions."""
    content: str | None = None
    """XXH3 of .bin, or of pieces of a large one, see `recorded.content_digest`."""
    text_special_tokens: str = "ignore"
    """How text that spells special tokens was tokenized; parse if that holds for any part of the data."""
    rejected_files: int = 0
    """Number of whole files among rejected_lines, which have an unknown encoding."""
    converted_files: dict[str, str] = field(default_factory=dict)
    """Encodings of the files that were not UTF-8 and were converted."""
    input_identity: str | None = None
    """Hash of the settings and of the names and sizes of the input files; None for other inputs, and for datasets of
    older versions."""
    template_tokens: dict[str, str] = field(default_factory=dict)
    """bos_token and eos_token of the chat template that rendered the data's conversations, empty for none."""
    begin_of_document_id: int | None = None
    """Token before every document; None if there is none."""
    format_version: int = FORMAT_VERSION
    """Version of the sidecar format."""


def sidecar_path(prefix: str | Path) -> Path:
    """Returns the sidecar file of the dataset at `prefix`."""
    return Path(f"{prefix}.json")


def file_checksum(path: Path) -> str:
    """Returns the XXH3 of a file, 16 hex digits; raises DataError if it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}; copy the dataset again") from error


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Writes the sidecar; raises DataError if it cannot be written."""
    path = sidecar_path(prefix)
    try:
        with atomic_writer(path) as file:
            file.write((json.dumps(asdict(sidecar), indent=2) + "\n").encode())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {reason_of(error)}; free space there") from error


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Returns the sidecar; None for a dataset without one, such as those of Megatron's own tools.

    Raises:
        DataError: the file exists and is not a sidecar.
    """
    path = sidecar_path(prefix)
    if not path.is_file():
        return None
    try:
        content = read_json(path)
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version {version}, only {FORMAT_VERSION} is known")
        known = {item.name for item in fields(Sidecar)}
        return Sidecar(**{name: value for name, value in content.items() if name in known})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: is no sidecar of `megads preprocess`: {error}; delete it to use the dataset unchecked, "
            "or make the dataset anew"
        ) from error


def embedding_rows(tokenizer: Tokenizer) -> int:
    """Returns the number of embedding rows that a tokenizer needs: its largest id + 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads a tokenizer file.

    Args:
        path: a file in the format of Hugging Face `tokenizers`.

    Returns:
        The tokenizer, with truncation and padding off, since either would change documents silently.

    Raises:
        DataError: the file is missing, is not a tokenizer, or fails on a test text.
    """
    if not Path(path).is_file():
        hint = f"make one with `megads tokenizer input=<files> output={path}`"
        if not Path(path).suffix:
            hint += (
                f", or, if it is a name of the Hugging Face hub: hf download {path} tokenizer.json, and give the file"
            )
        raise DataError(f"{path}: no such tokenizer file; {hint}")
    with tokenizing(path):
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # Many defects of a file only show when it is used.
        tokenizer.decode(tokenizer.encode(_PROBE).ids)
    if not tokenizer.get_vocab_size(with_added_tokens=True):
        raise DataError(f"{path}: the tokenizer has no tokens; make one with `megads tokenizer`")
    return tokenizer


@contextmanager
def tokenizing(path: str | Path) -> Iterator[None]:
    """Context manager that reports errors of a tokenizer with the name of its file.

    A pattern that takes too many steps on some text, or a part with a dangling reference, makes the library panic. The
    panic is a BaseException of a class that cannot be imported, so ordinary handlers do not catch it.

    Args:
        path: the tokenizer file.

    Raises:
        DataError: in place of the library's exception.
    """
    try:
        yield
    except BaseException as error:
        # The library's other errors are plain Exception, not a subclass.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{path}: is not a tokenizer file of Hugging Face `tokenizers`, or is damaged: {error}; "
            "copy it again or make it anew with `megads tokenizer`"
        ) from error


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer and its properties.

    Attributes:
        tokenizer: the tokenizer; treats text that spells a special token as in the dataset: as ordinary text, or with
            text_special_tokens=parse as the token.
        path: its file.
        vocab_size: its largest id + 1.
        end_of_document_id: token that ends every document of the dataset; None if no sidecar records it.
        verified: whether a dataset's sidecar names this tokenizer.
        template_tokens: bos_token and eos_token of the chat template; empty if there are none.
        end_ids: further tokens at which generation ends, by the generation settings of an imported model.
        adds_special_tokens: whether a text gets the special tokens that the tokenizer's post-processor adds, such as
            Llama's BOS, as in the training.
        begin_of_document_id: token before every document of the dataset; None if there is none.
    """

    tokenizer: Tokenizer
    path: Path
    vocab_size: int
    end_of_document_id: int | None
    verified: bool
    template_tokens: Mapping[str, str] = field(default_factory=dict)
    end_ids: tuple[int, ...] = ()
    adds_special_tokens: bool = False
    begin_of_document_id: int | None = None

    @property
    def first_token_id(self) -> int | None:
        """The token that precedes a text without context: that of the dataset's documents, or else the model's
        bos_token, or else end_of_document_id."""
        if self.begin_of_document_id is not None:
            return self.begin_of_document_id
        bos: int | None = self.tokenizer.token_to_id(self.template_tokens.get("bos_token", ""))
        return self.end_of_document_id if bos is None else bos

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text as the training had it: with the tokens that come before it there."""
        return self.begun(self.tokenizer.encode(text, add_special_tokens=self.adds_special_tokens).ids)

    def begun(self, ids: list[int]) -> list[int]:
        """Returns the ids with the token that began the documents of the training before them, unless it is there."""
        first = self.begin_of_document_id
        return ids if first is None or ids[:1] == [first] else [first, *ids]


def carried_path(prefix: str | Path) -> Path:
    """Returns the path of the tokenizer copy of the dataset at `prefix`."""
    return Path(f"{prefix}.tokenizer.json")


def write_carried(prefix: str | Path, content: bytes, chat_template: str | None = None) -> None:
    """Writes a dataset's copy of its tokenizer, and the chat template of its conversations.

    Raises:
        DataError: the file cannot be written.
    """
    path = carried_path(prefix)
    try:
        with atomic_writer(path) as file:
            file.write(content)
        if chat_template is None:
            template_path(path).unlink(missing_ok=True)
            return
        with atomic_writer(template_path(path)) as file:
            file.write(chat_template.encode())
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {reason_of(error)}; free space there") from error


def template_path(tokenizer_file: Path) -> Path:
    """Returns the path of the chat template that belongs to a tokenizer file."""
    prefix = tokenizer_file.name.removesuffix("tokenizer.json")
    return tokenizer_file.with_name(f"{prefix}{TEMPLATE_FILE}")


def template_beside(tokenizer_file: Path) -> str | None:
    """Returns the chat template that belongs to a tokenizer file; None if there is none.

    In a run directory that is the template of the run's conversations, or else the one of the model that the run
    started from.

    Raises:
        ConfigError: it cannot be read.
    """
    own = own_template(tokenizer_file)
    return own_template(tokenizer_file.parent / HUGGING_FACE_FOLDER / "tokenizer.json") if own is None else own


def own_template(tokenizer_file: Path) -> str | None:
    """As `template_beside`, without the template of the model that a run started from."""
    try:
        if (path := template_path(tokenizer_file)).is_file():
            return path.read_text(encoding="utf-8")
        found = read_settings(tokenizer_file.with_name(TOKENIZER_CONFIG_FILE)).get("chat_template")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template beside {tokenizer_file} cannot be read: {error}") from error
    if isinstance(found, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def named_tokens(tokenizer_file: Path) -> dict[str, str]:
    """Returns the special tokens that the settings beside a tokenizer file name, such as bos_token.

    Raises:
        ConfigError: the settings cannot be read.
    """
    found: dict[str, str] = {}
    for folder in (tokenizer_file.parent, tokenizer_file.parent / HUGGING_FACE_FOLDER):
        for path in (folder / TOKENIZER_CONFIG_FILE, folder / SPECIAL_TOKENS_FILE):
            try:
                content = read_settings(path)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path}: cannot be read: {error}") from error
            for name in TOKEN_NAMES:
                token = content.get(name)
                # As saved by AddedToken.__getstate__: with its flags.
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str):
                    found.setdefault(name, token)
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file; empty if there is no such file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no JSON object.
    """
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("holds no JSON object")
    return content


def find_tokenizer(prefixes: Sequence[Path], given: str | None) -> FoundTokenizer:
    """Finds the tokenizer with which a dataset was made.

    Args:
        prefixes: possible prefixes of a run's dataset, best first; the first with a sidecar or tokenizer is used.
        given: tokenizer file to use instead; it must be the same tokenizer if a sidecar records it.

    Raises:
        DataError: there is no tokenizer, it is damaged, or it is not the dataset's.
    """
    prefix = next((p for p in prefixes if sidecar_path(p).is_file() or carried_path(p).is_file()), None)
    sidecar = None if prefix is None else read_sidecar(prefix)
    path = Path(given) if given is not None else None
    if path is None and prefix is not None:
        path = tokenizer_beside(prefix, sidecar)
    if path is None:
        looked = ", ".join(str(carried_path(p)) for p in prefixes) or "a data path in the run's config.yaml"
        raise DataError(f"no tokenizer found (looked for {looked}): give tokenizer=<file>")
    tokenizer = load_tokenizer(path)
    if prefix is not None and sidecar is not None and (found := tokenizer_sha256(path)) != sidecar.tokenizer_sha256:
        raise DataError(
            f"{path} is not the tokenizer with which {prefix} was made: its sha256 starts with {found[:8]}, "
            f"{sidecar_path(prefix)} says {sidecar.tokenizer_sha256[:8]}; give tokenizer=<file> with the right one"
        )
    parsed = sidecar is not None and sidecar.text_special_tokens == TextSpecialTokens.parse
    tokenizer.encode_special_tokens = not parsed
    return FoundTokenizer(
        tokenizer,
        path,
        vocab_size=embedding_rows(tokenizer),
        end_of_document_id=sidecar.end_of_document_id if sidecar else None,
        begin_of_document_id=sidecar.begin_of_document_id if sidecar else None,
        verified=sidecar is not None,
        template_tokens=(sidecar.template_tokens if sidecar else None) or named_tokens(path),
    )


def tokenizer_beside(prefix: Path, sidecar: Sidecar | None) -> Path | None:
    """Returns the dataset's tokenizer copy; for older datasets, a tokenizer.json in the same folder with the right
    sha256."""
    if carried_path(prefix).is_file():
        return carried_path(prefix)
    neighbour = prefix.parent / "tokenizer.json"
    fits = sidecar is not None and neighbour.is_file() and tokenizer_sha256(neighbour) == sidecar.tokenizer_sha256
    return neighbour if fits else None


def tokenizer_sha256(path: Path) -> str:
    """Returns the sha256 of a tokenizer file, which identifies it."""
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: the tokenizer cannot be read: {reason_of(error)}; copy it again") from error
