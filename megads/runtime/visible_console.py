"""Rich's console, for text of ranks, files and users. Apart from `terminal_text`: rich takes longer to import."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from megads.runtime.terminal_text import visible


class VisibleConsole(Console):
    """Writes control characters of any text out, as terminal_text.visible does; rich's own codes stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
