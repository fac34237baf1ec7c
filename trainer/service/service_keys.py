"""Keys of an encrypted graph service: mutual TLS 1.3 with pinned certificates, without a certificate authority.

A key file (mode 0600) contains a self-signed certificate and its private key. The servers and ranks of a run share one
key file. A server also admits runs and notebooks that are attached to a serving cluster. Their certificates are in
``clients/*.key`` in the folder of the server's key file, one per line, as base64 of DER.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import ssl
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainer.core.errors import ServiceError
from trainer.core.files import parse_json, read_regular

_GUESTS = "clients"

_REREAD = 0.5  #: seconds between reads of the folder of admitted certificates

_MAX_KEY_FILE = 1 << 20  #: bytes

_MAX_CERTIFICATE = 1 << 14  #: characters


@dataclass(frozen=True)
class ServiceKeys:
    """The content of a key file. Certificates and keys are base64 of DER. Fields with a default may be missing."""

    public: str  #: certificate
    secret: str = field(repr=False)  #: private key (PKCS #8)
    server: str = ""  #: certificate of the servers; empty: ``public``, as in a run that is not attached
    endpoints: tuple[str, ...] = ()  #: endpoints of the servers; only in a key file for a notebook
    name: str = ""  #: name of the serving cluster
    guests: Path | None = field(default=None, compare=False)  #: folder of further certificates that a server admits

    def client_context(self) -> ssl.SSLContext:
        """Return a TLS context that accepts only servers with the certificate ``server`` (if empty: ``public``).

        Raises ``ssl.SSLError``.
        """
        return _context(ssl.PROTOCOL_TLS_CLIENT, self, [self.server or self.public])


def _context(side: int, keys: ServiceKeys, admitted: list[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is pinned; names and addresses change
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata="\n".join(_pem("CERTIFICATE", one) for one in admitted))
    pair = _pem("CERTIFICATE", keys.public) + _pem("PRIVATE KEY", keys.secret)
    memory = os.memfd_create("service.key")  # ssl loads key pairs only from files
    try:
        os.write(memory, pair.encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


def _pem(label: str, base64_der: str) -> str:
    lines = (base64_der[at : at + 64] for at in range(0, len(base64_der), 64))
    return "\n".join([f"-----BEGIN {label}-----", *lines, f"-----END {label}-----", ""])


def is_pinned(connection: ssl.SSLSocket, admitted: frozenset[str] | set[str]) -> bool:
    """Return whether the other side of a TLS connection has one of the certificates ``admitted``."""
    shown = connection.getpeercert(binary_form=True)
    return shown is not None and base64.b64encode(shown).decode() in admitted


class Admission:
    """The certificates that a server admits: its own, and those in the folder ``clients`` beside its key file.

    Not thread-safe.
    """

    def __init__(self, keys: ServiceKeys):
        self.admitted = frozenset({keys.public})  #: certificates, base64 of DER
        self._keys = keys
        self._context = _server_context(keys, self.admitted)
        self._read_at = -math.inf

    def context(self) -> ssl.SSLContext:
        """Return the TLS context for the next connection.

        Reads the folder ``clients`` again if it was last read at least ``_REREAD`` seconds ago. Invalid lines and
        unreadable files are skipped.
        """
        if time.monotonic() - self._read_at >= _REREAD:
            found = {self._keys.public}
            for path in sorted(self._keys.guests.glob("*.key")) if self._keys.guests is not None else ():
                try:
                    lines = read_regular(path, _MAX_KEY_FILE).decode("ascii", "replace").split()
                except OSError as error:  # just removed, or not readable
                    print(f"key file {path} of a client cannot be read: {error.strerror}", file=sys.stderr, flush=True)
                    continue
                found.update(line for line in lines if _is_certificate(line))
            admitted = frozenset(found)
            if admitted != self.admitted:
                self._context, self.admitted = _server_context(self._keys, admitted), admitted
            self._read_at = time.monotonic()
        return self._context


def _server_context(keys: ServiceKeys, admitted: frozenset[str]) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, keys, sorted(admitted))
    context.num_tickets = 0  # clients do not resume sessions
    return context


def _is_certificate(text: str) -> bool:
    if len(text) > _MAX_CERTIFICATE:
        return False
    try:
        base64.b64decode(text, validate=True)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=_pem("CERTIFICATE", text))
    except (ssl.SSLError, ValueError):
        return False
    return True


def read_key_file(path: str | Path) -> ServiceKeys:
    """Read a key file.

    Raises ``ServiceError`` if the file is missing, readable by others, or without a valid certificate and private key.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode & 0o777
        text = read_regular(path, _MAX_KEY_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ServiceError(
            f"service key {path} cannot be read: {why}; the launcher writes the key file of a run, and `gnnfleet "
            "serve key NAME -o FILE` writes one for a notebook"
        ) from None
    if mode & 0o077:
        raise ServiceError(f"service key {path} has mode {mode:04o}, so others may read it; run: chmod 600 {path}")
    try:
        value = parse_json(text)
        public, secret, server = (str(value.get(name, "")) for name in ("public", "secret", "server"))
        for base64_der in (public, secret, server):
            base64.b64decode(base64_der, validate=True)
        endpoints = tuple(map(str, value.get("endpoints", ())))
        keys = ServiceKeys(public, secret, server, endpoints, str(value.get("name", "")), path.parent / _GUESTS)
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ServiceError(f"service key {path} is no key file: {type(error).__name__}") from None
    try:
        keys.client_context()
    except ssl.SSLError as error:
        if "MISMATCH" in str(error):
            raise ServiceError(f"service key {path}: certificate and private key do not belong together") from None
        raise ServiceError(
            f"service key {path} is no key file of this version of gnnfleet ({error.reason}); make it again"
        ) from None
    return keys
