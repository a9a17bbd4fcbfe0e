"""Certificates for tests: an authority, and its certificates for this machine."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from specdec.config import TlsSettings

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates that hold for 127.0.0.1 and localhost, as servers and as clients."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = (
            self._builder(self._name, self._key).add_extension(constraints, True).sign(self._key, hashes.SHA256())
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
        )

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        folder: Path,
        trusted: bytes | None = None,
        common_name: str = "specdec test",
        dns: str = "localhost",
        has_address: bool = True,
    ) -> TlsSettings:
        """Writes key, certificate and the authorities trusted (this one's by default) into `folder`. The certificate
        has the name `dns`, and loopback's address if `has_address`."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        here = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))] if has_address else []
        names = x509.SubjectAlternativeName([x509.DNSName(dns), *here])
        certificate = self._builder(subject, key).add_extension(names, False).sign(self._key, hashes.SHA256())
        folder.mkdir(parents=True, exist_ok=True)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _replace(folder / "key.pem", private)
        _replace(folder / "cert.pem", certificate.public_bytes(serialization.Encoding.PEM))
        _replace(folder / "ca.pem", self.pem if trusted is None else trusted)
        return TlsSettings(
            ssl_keyfile=folder / "key.pem", ssl_certfile=folder / "cert.pem", ssl_ca_certs=folder / "ca.pem"
        )


def _replace(path: Path, data: bytes) -> None:
    """As certificate managers do: written beside, then renamed."""
    beside = path.with_suffix(".part")
    beside.write_bytes(data)
    os.replace(beside, path)
