"""Tests that threads may read a type for the first time at once, where msgspec alone refuses valid data or crashes."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from fast_cases import fast_cases
from forked import REPOSITORY, Forked
from service_kit import server_environment

THREADS = 16


def read_a_batch_request() -> None:
    from trainer.core.schema import HOMO_EDGE, HOMO_NODE
    from trainer.sampler.subgraph_sampler import BatchWork
    from trainer.sampler.types import SampleSettings, SeedSet
    from trainer.service.messages import BatchRequest
    from trainer.service.remote_graph import client_name

    seeds = SeedSet({HOMO_NODE: np.arange(9)})
    work = BatchWork(SampleSettings({HOMO_EDGE: (5, 5)}), seeds, 3, {HOMO_NODE: ("x",)})
    sent = BatchRequest(work, client_name("one")).message()
    at_once(lambda: BatchRequest.read(sent).client.name.startswith("one"))


def read_files_of_a_node() -> None:
    from launcher.sync.collect import _Files
    from trainer.core.typed import convert

    sent = {"files": {"a": {"bytes": 1, "mtime_ns": 2, "data": None}}, "errors": {}}
    at_once(lambda: convert(sent, _Files).files["a"].mtime_ns == 2)


def at_once(right: Callable[[], bool]) -> None:
    """Call ``right`` in all threads at once, which change as often as they can. It must always return True."""
    sys.setswitchinterval(1e-6)
    gate, found = threading.Barrier(THREADS), []

    def calls() -> None:
        gate.wait()
        found.extend(right() for _ in range(20))

    threads = [threading.Thread(target=calls) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * THREADS * 20, f"{len(found)} right answers"


@pytest.mark.parametrize("work", fast_cases([read_a_batch_request, read_files_of_a_node], read_a_batch_request))
def test_threads_may_read_a_type_for_the_first_time_at_once(work: Callable[[], None]) -> None:
    # in new processes, each of which crashed or refused the data in 20 to 40 % of all cases
    for _ in range(6):
        process = Forked(work, (), server_environment())
        assert process.wait() == 0, process.output


def test_no_other_module_makes_types_known_to_msgspec() -> None:
    reads = re.compile(r"msgspec\.(convert|Decoder|json\.(decode|Decoder)|msgpack\.(decode|Decoder))\(")
    plain = "type=list|type=tuple.str, list.int., str.|data, ext_hook"  # no classes
    for path in (*REPOSITORY.glob("launcher/**/*.py"), *REPOSITORY.glob("trainer/**/*.py")):
        if path.name != "typed.py":
            lines = [line for line in path.read_text().splitlines() if reads.search(line)]
            assert all(re.search(plain, line) for line in lines), f"{path}: {lines}"
