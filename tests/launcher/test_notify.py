"""Tests of ``run.notify``: what people are told of a run, by the supervisors of its nodes."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher.config.loader import load_config
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from launcher.node.programs.notify import label, main
from launcher.plan.serialize import to_json
from node_kit import MakeFolder, python
from peers_kit import Run
from plan_kit import cluster, plan_of
from restart_kit import RestartRun
from test_plan_runfile import spec_of
from waiting import wait_until


class Hook:
    """An HTTP server that keeps what it gets; it answers with the next status of ``answers``, then with 200."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.answers: list[int] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                status = hook.answers.pop(0) if hook.answers else 200
                if status == 200:
                    hook.got.append(json.loads(body))
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(b"no such\nhook" if status != 200 else b"ok")

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


def send(*targets: str, pauses: tuple[float, ...] = (), **env: str) -> dict[int, str]:
    message = {"text": "héllo"}
    return dict(main({"targets": targets, "message": message, "env": env, "pauses": pauses})["errors"])


def test_a_message_reaches_urls_and_commands(hook: Hook, tmp_path: Path) -> None:
    command = f"sh -c 'cat > {tmp_path}/got; echo $WORD >> {tmp_path}/got'"
    assert send(hook.url, "$HOOK", command, HOOK=hook.url, WORD="a $b") == {}
    assert hook.got == [{"text": "héllo"}] * 2
    assert (tmp_path / "got").read_text() == '{"text": "h\\u00e9llo"}a $b\n'


def test_a_message_that_does_not_arrive(hook: Hook) -> None:
    hook.answers = [404, 302, 503]
    others = ("http://127.0.0.1:1/x", "$NO_HOOK", "false", "/no/program a", "$HOOK", "http://me:hush@hooks.lab/x")
    words = send(hook.url, hook.url, hook.url, *others, HOOK="x")
    assert words == {
        0: "127.0.0.1 answered 404 Not Found: no such hook",
        1: "127.0.0.1 answered 302 Found: no such hook",
        2: "127.0.0.1 answered 503 Service Unavailable: no such hook",
        3: "127.0.0.1: [Errno 111] Connection refused",
        4: "$NO_HOOK: the variable NO_HOOK is not set on this host; `env` of the node can set it",
        5: "false ended with exit status 1",
        6: "/no/program: No such file or directory",
        7: "$HOOK is no http:// or https:// address",
        8: "hooks.lab: the address cannot be used; it has no user or password, and may have a port",
    }
    hook.answers = [503, 503, 404]
    assert send(hook.url, pauses=(0.0, 0.0)) == {0: "127.0.0.1 answered 404 Not Found: no such hook"}
    hook.answers = [503]
    assert send(hook.url, pauses=(0.0,)) == {}


def test_names_of_targets_show_no_secret() -> None:
    targets = ("https://user:pw@hooks.lab/T0/secret", "tell.sh --key x", "$HOOK", "${BASE}/T0/secret")
    assert [*map(label, targets)] == ["hooks.lab", "tell.sh", "$HOOK", "${BASE}"]


RESULT = """
import json, os, time
with open("metrics-rank0.jsonl", "w") as file:
    for line in ({"kind": "step", "loss": float("nan"), "epoch": 1, "step": 0, "steps": 1, "seeds": 1},
                 {"kind": "result", "test_accuracy": 0.5, "epochs": 2}):
        file.write(json.dumps({"t": time.time(), **line}) + "\\n")
while not os.path.exists("go"): time.sleep(0.05)
"""


def test_a_nan_and_the_end_are_told_once_each(folder: MakeFolder, hook: Hook) -> None:
    run = folder(notify=[hook.url]).rank(python(RESULT))
    run.start()
    wait_until(lambda: hook.got)
    (run.path / "go").touch()
    assert run.end()["findings"][0]["kind"] == "nan"
    nan, end = hook.got
    assert (nan["event"], nan["state"], nan["rank"]) == ("nan", "running", 0) and "epoch 1" in nan["text"]
    assert (end["event"], end["text"]) == ("end", "gnnfleet test: done: test accuracy 0.5000")
    assert end["result"] == {"test_accuracy": 0.5} and end["cause"] is None


def test_a_failure_is_told_and_a_message_that_did_not_arrive_is_a_finding(folder: MakeFolder, hook: Hook) -> None:
    run = folder(notify=[hook.url, "$NO_HOOK"], notify_on=["failure"]).rank(python("raise ValueError('no column')"))
    result = run.run()
    assert [(one["event"], one["text"], one["cause"]["rank"]) for one in hook.got] == [
        ("failure", "gnnfleet test: failed: rank 0 on node0 raised ValueError: no column", 0)
    ]
    assert result["findings"][0]["text"].startswith("the message `failure` did not arrive: $NO_HOOK: the variable")


def test_a_message_that_is_still_being_sent_outlives_the_ranks(folder: MakeFolder, tmp_path: Path) -> None:
    send = f"touch {tmp_path}/go; sleep 0.7; cat >> {tmp_path}/got"
    run = folder(notify=[f"sh -c '{send}'"], notify_on=["nan"])
    result = run.rank(python(RESULT.replace('"go"', f'"{tmp_path}/go"'))).run()
    assert [one["kind"] for one in result["findings"]] == ["nan"]
    wait_until((tmp_path / "got").exists)
    assert json.loads((tmp_path / "got").read_text())["event"] == "nan"


def kill_lead(run: Run) -> None:
    lead = run.nodes[0].supervisor
    assert lead is not None
    os.kill(lead.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_new_hub_tells_of_the_restart_and_the_end_after_the_lead_node_is_lost(tmp_path: Path, hook: Hook) -> None:
    run = RestartRun(tmp_path, 3, notify=[hook.url])
    try:
        run.stepping()
        kill_lead(run)
        wait_until(lambda: hook.got)
        run.finish(without=(0,))
    finally:
        run.kill()
    assert [one["event"] for one in hook.got] == ["restart", "end"]
    assert hook.got[0]["text"].startswith("gnnfleet test: restart 1 of 3: node0 (gpu0)")


@pytest.mark.slow
def test_one_remaining_node_tells_of_the_end_when_the_lead_node_is_lost(tmp_path: Path, hook: Hook) -> None:
    run = Run(tmp_path, 3, notify=[hook.url])
    try:
        run.start()
        kill_lead(run)
        for node in run.nodes[1:]:
            node.end()
    finally:
        run.kill()
    assert [one["event"] for one in hook.got] == ["failure"]
    assert hook.got[0]["cause"]["node_rank"] == 0


def test_the_plan_shows_no_address_and_a_serving_cluster_tells_nobody() -> None:
    config = cluster(run=RunConfig(notify=("https://hooks.lab/T0K3N",)))
    plan = plan_of(config)
    assert spec_of(plan.nodes[1])["notify"] == ["https://hooks.lab/T0K3N"]
    assert "T0K3N" not in to_json(plan)
    assert spec_of(plan_of(config, serve_only=True).nodes[0])["notify"] == []


def test_mistakes_in_the_config(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yml"
    file.write_text(
        "transport: local\nnodes: 1\ndata: {dataset: synthetic}\nrun:\n"
        "  notify: ['tell \"x', ' ', 'https://ok', 'https://me:hush@ok/x']\n  notify_on: [end, fail]\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert str(raised.value).splitlines()[-4:] == [
        f'{file}:5: run.notify: `tell "x`: No closing quotation',
        f"{file}:5: run.notify: expected a URL, a command or $NAME, found an empty text",
        f"{file}:5: run.notify: a URL with a user or password; put the whole URL into a variable of the node, and name "
        "it: $NAME",
        f"{file}:6: run.notify_on.1: expected one of end, failure, restart, stall, nan, lost, found the text `fail`; "
        "did you mean `failure`?",
    ]
    file.write_text(
        "transport: local\nnodes: 1\ndata: {dataset: synthetic}\nrun: {notify: $HOOK, notify_on: failure}\n"
    )
    assert load_config(file).run.notify_on == ("failure",)
