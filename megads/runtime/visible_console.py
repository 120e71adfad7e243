"""Rich console that escapes control characters. Separate from `terminal_text`, as rich is slow to import."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megads.runtime.terminal_text import visible


class VisibleConsole(Console):
    """Escapes control characters in any text, as `terminal_text.visible`; rich's own codes are kept."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
