"""The console of ps-worker: shows the lines of its workers as they arrive, and the progress of the run.

On a terminal the progress is one live line under the others; elsewhere it is a plain line every few seconds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from narrows.protocols.runtime.cli.output import STDERR, CommandConsole, stdout

PLAIN_S = 2.0  # from one plain line of progress to the next
LIVE_S = 0.25  # from one update of the live line to the next
AGAIN_S = 60.0  # the same text within this time comes from another worker, and is not shown again


class Console(CommandConsole):
    """Prints lines of the workers to stdout, and all other lines to stderr. `close` restores the terminal."""

    def __init__(self) -> None:
        super().__init__("ps-worker")
        self.live: Any = None  # rich's live line; None: stderr is no terminal
        self.stdout = stdout(self.say)
        self.next_shown_s = 0.0  # the time before which no progress is shown, monotonic seconds
        self.said_at: dict[str, float] = {}  # the time of the newest `doing` of each text
        self.quiet = False  # a worker is in a debugger, which uses the terminal
        if _is_terminal(sys.stderr):
            from rich.console import Console as Terminal
            from rich.live import Live

            # A stdout that is a file or pipe gets its lines unchanged, not through rich.
            self.live = Live(
                console=Terminal(stderr=True),
                transient=True,
                auto_refresh=False,
                redirect_stdout=_is_terminal(sys.stdout),
            )

    def out(self, line: str, of: str = "") -> None:
        """Print a line of a script's stdout. A terminal also shows `of`, the name of its worker; a pipe or file does not."""
        self.stdout.line(of + line if _is_terminal(sys.stdout) else line)

    def err(self, line: str) -> None:
        STDERR.line(line)

    def doing(self, text: str, quiet: bool = False) -> None:
        """Show a step of the start or the end of a run. A text that several workers send is shown once.

        Args:
            text: the step. A text that ends with "..." is under way; on a terminal the live line shows it.
            quiet: show no progress of the run from now on.
        """
        now = time.monotonic()
        before, self.said_at[text] = self.said_at.get(text, -AGAIN_S), now
        if quiet:
            self.close()
            self.quiet = True
        if now - before < AGAIN_S:
            return
        if self.live is None or not text.endswith("..."):
            self.say(text)
        else:
            self.next_shown_s = 0.0
            self.progress(text)

    def progress(self, line: str) -> None:
        """Show the progress of the run, unless it was just shown."""
        now = time.monotonic()
        if now < self.next_shown_s or self.quiet:
            return
        if self.live is None:
            self.err(line)
        else:
            from rich.text import Text

            try:
                self.live.start()
                self.live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            except OSError:  # the terminal is gone
                self.close()
                self.live = None
        self.next_shown_s = now + (PLAIN_S if self.live is None else LIVE_S)

    def close(self) -> None:
        if self.live is not None:
            with contextlib.suppress(OSError):
                self.live.stop()


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()
