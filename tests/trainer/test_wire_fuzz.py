"""Fuzz tests of messages between graph servers and clients: a value or a clear error, never a crash or a hang.

``GNNFLEET_FUZZ_SECONDS`` sets how long each test runs (default 1), ``GNNFLEET_FUZZ_SEED`` selects other cases.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from forked import Forked
from partition_kit import spec
from train_kit import environment
from trainer.partition.make import make_partition
from wire_fuzz_kit import replies, requests, streams

SECONDS = float(os.environ.get("GNNFLEET_FUZZ_SECONDS") or 1)
SEED = int(os.environ.get("GNNFLEET_FUZZ_SEED") or 0)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wire") / "parts"
    make_partition(spec(folder))
    return folder


@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.parametrize("reader", [requests, replies, streams], ids=lambda reader: reader.__name__)
def test_a_damaged_message_is_read_or_refused(reader: Callable[[Path, int, float], None], parts: Path) -> None:
    process = Forked(reader, (parts, SEED, SECONDS), environment())
    with suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS + 120)
    status, output = process.returncode, process.output[-3000:]
    process.kill()
    assert status == 0, f"ended by {status} (None: it hangs): {output}"
    word, tried, refused = output.splitlines()[-1].split()
    assert word == "done" and 0 < int(refused) < int(tried), output
