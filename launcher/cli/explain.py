"""``gnnfleet explain``: prints the cause and the fix of an error message."""

from __future__ import annotations

import click

from launcher.cli.options import examples
from launcher.errors import UsageError
from launcher.text import say


@click.command(epilog=examples("explain host-key-unknown", "explain disk"))
@click.argument("words", nargs=-1, metavar="[CODE|WORDS]...")
def explain(words: tuple[str, ...]) -> None:
    """Print the cause and the fix of an error.

    The line after an error names its CODE, where there is more to say than the message does. WORDS search codes,
    causes and fixes. Without arguments all codes are listed.
    """
    from launcher.report.explain import as_text, search, sections

    if not words:
        for section in sections():
            say(f"{section.title}: {', '.join(entry.code for entry in section.entries)}", stderr=False)
        return
    found = search(" ".join(words))
    if not found:
        raise UsageError(f"no explanation has {' '.join(words)!r}; `gnnfleet explain` lists all codes")
    if len(found) > 5:
        say(f"{len(found)} explanations: {', '.join(entry.code for entry in found)}", stderr=False)
        return
    say("\n\n".join(map(as_text, found)), stderr=False)
