"""Checks the settings of ``data.store``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from launcher.config.schema import ClusterConfig
from launcher.config.validation import Reader
from launcher.errors import UsageError
from trainer.core.remote_settings import parse_bytes

_URL = re.compile(r"[a-z][a-z0-9+.:-]*://[^\s/]+/?.*|file:///.+", re.IGNORECASE)

#: Options of fsspec, s3fs, gcsfs and adlfs, and of what they hand on, that are no credentials.
_OPTIONS = frozenset(
    """
    access account_host account_name addressing addressing_style anon auto_mkdir block_size cache_regions cache_timeout
    cache_type client_kwargs config_kwargs connect_timeout consistency default_block_size default_cache_type
    default_fill_cache default_location endpoint endpoint_url fixed_upload_size host listings_expiry_time max_attempts
    max_concurrency max_pool_connections mode payload_signing_enabled port profile project protocol read_timeout region
    region_name request_checksum_calculation requester_pays requests_timeout response_checksum_validation retries s3
    signature_version skip_instance_cache socket_timeout tcp_keepalive timeout total_max_attempts
    use_accelerate_endpoint use_dualstack_endpoint use_listings_cache use_ssl user username verify version_aware
    """.split()
)

_IN_URL = re.compile(r"://[^/]*:[^/]*@|://[^/]*:(?!\d*(/|$))|[?#]")  # password, or a query, which may hold a token

_LOGIN = re.compile("[^/@]*:[^/@]*@")  # before a host, without a scheme

_ELSEWHERE = (
    "put them into the environment of the nodes, or into the file in which this kind of store looks for them "
    "(~/.aws/credentials)"
)

_NOT_IN_FILES = (
    "credentials do not belong into the cluster file, from which they would reach scripts and manifests; " + _ELSEWHERE
)

_NOT_ON_COMMAND_LINES = (
    "credentials do not belong on a command line, which every user of this machine can read; " + _ELSEWHERE
)


def check_words(url: str, options: Mapping[str, Any]) -> None:
    """Raise UsageError if the URL of a store or its options, given on a command line, are or may be credentials."""
    if "://" in url and _IN_URL.search(unquote(url)):
        raise UsageError(f"the URL of the store has a password or a query; {_NOT_ON_COMMAND_LINES}")
    for name, complaint in _doubtful(options):
        raise UsageError(f"--store-option {name[1:]}: {complaint}; {_NOT_ON_COMMAND_LINES}")


def _doubtful(options: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name, and a complaint, of each option that is or may be a credential, at any depth."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            inner = f"{name}.{key}"
            if str(key) in _OPTIONS:
                yield from _doubtful(value, inner)
            else:
                yield inner, "not one of the options that are known to hold no secret"
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from _doubtful(value, name)
    elif isinstance(options, str) and (_IN_URL.search if "://" in options else _LOGIN.match)(unquote(options)):
        yield name, "a URL with a password or a query"


def check_store(config: ClusterConfig, reader: Reader) -> None:
    """Report a URL, options or a limit that cannot be used; values that are already reported are skipped."""
    data = config.data
    if data.store is not None and _URL.fullmatch(data.store) and _IN_URL.search(unquote(data.store)):
        if reader.good(("data", "store")):
            reader.report(("data", "store"), f"data.store: a URL with a password or a query; {_NOT_IN_FILES}")
        return
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
    for name, complaint in _doubtful(data.store_options):
        reader.report(("data", "store_options"), f"data.store_options{name}: {complaint}; {_NOT_IN_FILES}")
    if data.store_limit is not None and reader.good(("data", "store_limit")):
        try:
            parse_bytes(data.store_limit)
        except ValueError as error:
            reader.report(("data", "store_limit"), f"data.store_limit: {error}")
