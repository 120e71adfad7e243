"""Values on their way between ranks: JSON of a declared type, so that reading what a peer sent runs nothing."""

from __future__ import annotations

import functools
import json
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megads import errors
from megads.errors import MegadsError, UnhealthyNode


@functools.lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def encode(value: Any, kind: Any) -> bytes:
    """A value as JSON. Floats keep their bits, NaN and infinities too.

    Args:
        value: of this type.
        kind: of None, bool, int, float, str, Path, enums, dataclasses and containers of them.

    Raises:
        pydantic_core.PydanticSerializationError: the value is of another type.
    """
    plain = _adapter(kind).dump_python(value, mode="json", warnings="error")
    # A file's name may hold bytes that are no text: a question mark serves, as such names only are in messages.
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def decode(message: bytes, kind: Any, sender: int) -> Any:
    """Reads what `encode` made of a value of the same type.

    Args:
        message: as it came.
        kind: of the value.
        sender: rank that sent it.

    Raises:
        UnhealthyNode: it is anything else.
    """
    try:
        return _adapter(kind).validate_json(message, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        wrong = f"{where}: {first['msg']}" if where else first["msg"]
        raise UnhealthyNode(
            f"rank {sender} sent {message[:40]!r} where {_name(kind)} was expected ({wrong}): do all nodes run the "
            "same version of megads?"
        ) from None


def encode_error(error: MegadsError) -> tuple[str, str]:
    """An error as the name of its class in megads.errors, or of the nearest above it there, and its message."""
    known = next(kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
    return known.__name__, str(error)


def decode_error(name: str, message: str) -> MegadsError:
    """The error of `encode_error`; a name that is no error's makes a plain MegadsError."""
    kind = vars(errors).get(name)
    return kind(message) if isinstance(kind, type) and issubclass(kind, MegadsError) else MegadsError(message)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
