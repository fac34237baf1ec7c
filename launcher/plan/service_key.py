"""Creates the key pair of an encrypted graph service (read by ``trainer.service.service_keys``)."""

from __future__ import annotations

import base64
import datetime
import secrets


def new_key_pair() -> dict[str, str]:
    """Return ``{"public": …, "secret": …}``: a self-signed certificate and its private key (PKCS #8), DER in base64.

    The certificate never expires (RFC 5280, section 4.1.2.5), so clocks do not matter. To revoke it, remove it from the
    lists of certificates that each side accepts.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"gnnfleet-{secrets.token_hex(8)}")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    public = certificate.public_bytes(Encoding.DER)
    return {"public": base64.b64encode(public).decode(), "secret": base64.b64encode(secret).decode()}
