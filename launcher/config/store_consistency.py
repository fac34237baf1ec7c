"""Checks the settings of ``data.store``."""

from __future__ import annotations

import re

from launcher.config.cache_size import parse_bytes
from launcher.config.schema import ClusterConfig
from launcher.config.validation import Reader

_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]+/?.*|file:///.+", re.IGNORECASE)

_CREDENTIALS = frozenset(["key", "secret", "token", "password", "secret_key", "access_key", "account_key", "sas_token"])


def check_store(config: ClusterConfig, reader: Reader) -> None:
    """Report a URL, options or a limit that cannot be used; values that are already reported are skipped."""
    data = config.data
    if data.store is not None and not _URL.fullmatch(data.store) and reader.good(("data", "store")):
        reader.report(
            ("data", "store"),
            f"data.store: expected the URL of a folder (s3://bucket/products), found `{data.store}`; for a folder that "
            "all nodes can read, use `data.mode: verify`",
        )
    if data.store is not None and data.mode == "verify" and reader.good(("data", "mode"), ("data", "store")):
        reader.report(
            ("data", "store"),
            "data.store: with `data.mode: verify` nodes read their parts in place; leave out store, or mode",
        )
    for name in sorted(_CREDENTIALS & data.store_options.keys()):
        reader.report(
            ("data", "store_options"),
            f"data.store_options.{name}: credentials do not belong here; put them into the environment of the "
            "nodes, or into the file in which this kind of store looks for them (~/.aws/credentials)",
        )
    if data.store_limit is not None and reader.good(("data", "store_limit")):
        try:
            parse_bytes(data.store_limit)
        except ValueError as error:
            reader.report(("data", "store_limit"), f"data.store_limit: {error}")
