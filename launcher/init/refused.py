"""Why hosts could not be looked at, and what to do: in the flags of ``gnnfleet init``, and with the hosts as typed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from launcher.errors import HostKeyError, NodeError
from launcher.init.request import Wish, config_of
from launcher.preflight.finding import login_words

_NAMED = 3  #: hosts whose logins are written out


def is_unknown(error: NodeError) -> bool:
    """Whether the host, or one on the way to it, shows a key that was never seen."""
    return isinstance(error, HostKeyError) and "is not known" in error.message


def reasons(wish: Wish, errors: Mapping[int, NodeError]) -> Iterator[str]:
    """A line for each host, less what ``common_cure`` says."""
    common = common_cure(wish, errors)
    for k, error in errors.items():
        words = error.message if common and is_unknown(error) else reason(wish, k, error)
        yield f"{wish.hosts[k]}: {words}"


def common_cure(wish: Wish, errors: Mapping[int, NodeError]) -> str:
    """What to do about all unknown keys together; '' where there are not several."""
    unknown = [k for k, error in errors.items() if is_unknown(error)]
    return _cure(wish, unknown) if len(unknown) > 1 else ""


def reason(wish: Wish, k: int, error: NodeError) -> str:
    """Of one host, without its name."""
    remedy = _cure(wish, [k]) if is_unknown(error) else error.remedy
    return error.message + (f" – {remedy}" if remedy else "")


def _cure(wish: Wish, ranks: list[int]) -> str:
    nodes = config_of(wish).nodes
    logins = [shlex.join(login_words(config_of(wish), nodes[k])) for k in ranks]
    fingerprints = "compare the fingerprint" + ("s" if len(ranks) > 1 else "")
    shown = ", ".join(f"`{login}`" for login in logins[:_NAMED]) + (", …" if len(logins) > _NAMED else "")
    return f"{fingerprints} and log in once ({shown}), or repeat this with --host-keys accept-new"
