"""Key pairs for CURVE."""

from __future__ import annotations


def new_key_pair() -> dict[str, str]:
    """``{"public", "secret"}`` in z85."""
    import zmq

    public, secret = zmq.curve_keypair()
    return {"public": public.decode(), "secret": secret.decode()}
