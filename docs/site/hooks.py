"""Hooks of mkdocs: add templates/ and examples/ to the site, and import all commands for cli.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from launcher.cli.main import with_all_commands

FOLDERS = {"templates": "*.yml", "examples": "*.py"}


def on_config(config: Any) -> Any:
    with_all_commands()  # docs/cli.md is made from them
    return config


def on_files(files: Files, config: Any) -> Files:
    root = Path(config["config_file_path"]).parent
    for folder, pattern in FOLDERS.items():
        for path in sorted((root / folder).glob(pattern)):
            files.append(File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    return html.replace("<code>Sentinel.UNSET</code>", "")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite links to templates/ and examples/, which are at the top level of the site."""
    return re.sub(rf"\]\(\.\./({'|'.join(FOLDERS)})/", r"](\1/", markdown)
