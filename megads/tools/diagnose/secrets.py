"""Leaves secrets out of text that is to go to another machine."""

from __future__ import annotations

import ipaddress
import re

_MASKS = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), "<key>"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), "<token>"),
    (
        re.compile(r"\b(?:hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|pypi-|nvapi-|wandb_v1_)[\w-]{8,}"),
        "<token>",
    ),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), "<token>"),
    (re.compile(r"(://)[^\s/@:]+(?::[^\s/@]*)?@"), r"\1<user>@"),
    (re.compile(r"\b(Bearer|Basic|Token)\s+[\w.~+/=-]{6,}", re.IGNORECASE), r"\1 <token>"),
    (
        re.compile(
            r"([\w-]*(?:api[_-]?key|access[_-]?key|secret|token|passw(?:or)?d|passwd|pwd|credential|authorization|private[_-]?key)"
            r"[\w-]*[\"']?\s*(?:[=:]|\s-+>)\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"'}\])]+)",
            re.IGNORECASE,
        ),
        r"\1<secret>",
    ),
    (re.compile(r"(--(?:\w+[-_])*(?:key|token|password|secret)\s+)\S+", re.IGNORECASE), r"\1<secret>"),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"), "<mail>"),
    (re.compile(r"((?:/(?:home|Users|root|u|user)/|\\Users\\))[^\s/\\'\":]+"), r"\1<user>"),
    (
        re.compile(r"(\b(?:user(?:name)?|login|owner|account|uid)[\"']?\s*[=:]\s*[\"']?)[\w.-]+", re.IGNORECASE),
        r"\1<user>",
    ),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b"), "<address>"),
    (re.compile(r"\b[0-9a-f]{32,}\b", re.IGNORECASE), "<hex>"),
    (re.compile(r"\b(?=[\w+/-]*\d)(?=[\w+/-]*[A-Z])(?=[\w+/-]*[a-z])[A-Za-z0-9+_-]{36,}={0,2}"), "<token>"),
)


_COLONS = re.compile(r"(?<![\w:.])[0-9a-f]*:[0-9a-f:]*:[0-9a-f:.]*", re.IGNORECASE)


def mask_secrets(text: str) -> str:
    """Returns a text without tokens, keys, passwords, user names, mail and network addresses."""
    text = _COLONS.sub(lambda found: "<address>" if _is_address(found[0]) else found[0], text)
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return text


def _is_address(text: str) -> bool:
    """Whether it is an address of version 6: times of day and PCI addresses have colons too."""
    try:
        return len(text) > 2 and ipaddress.ip_address(text.rstrip(".")).version == 6
    except ValueError:
        return False
