"""Mutual TLS from files, read again when they change.

A server asks for its files at every handshake, so a renewed certificate holds for the next connection. A client reads
them when it makes a channel. A change that cannot be read yet, half written for instance, leaves the last good one.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from specdec.config import TlsSettings
from specdec.errors import ConfigError


def read_files(tls: TlsSettings) -> tuple[bytes, bytes, bytes]:
    """(key, certificate chain, authorities). ConfigError when one cannot be read, or key and certificate are of
    different pairs."""
    try:
        key, chain, authorities = (path.read_bytes() for path in _paths(tls))
    except OSError as error:
        raise ConfigError(f"TLS file {error.filename} cannot be read: {error.strerror}") from error
    for path, data in zip(_paths(tls), (key, chain, authorities)):
        if b"-----BEGIN " not in data:
            raise ConfigError(f"TLS file {path} is not PEM: it must hold a -----BEGIN line")
    _check(tls, authorities)
    return key, chain, authorities


def _check(tls: TlsSettings, authorities: bytes) -> None:
    """Has OpenSSL read the files, since gRPC does not say what it refuses. Raises ConfigError."""
    assert tls.ssl_keyfile and tls.ssl_certfile
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # which keys are strong enough is left to gRPC
    names = f"--ssl-keyfile {tls.ssl_keyfile} and --ssl-certfile {tls.ssl_certfile}"
    try:
        context.load_cert_chain(tls.ssl_certfile, tls.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        if reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{names} do not match: the key is not that of the certificate") from None
        words = reason.replace("_", " ").lower()
        raise ConfigError(f"{names} cannot be used: {words}; the key must have no passphrase") from None
    try:
        context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(f"--ssl-ca-certs {tls.ssl_ca_certs} holds no certificate: {reason}") from None


def _paths(tls: TlsSettings) -> tuple[Path, Path, Path]:
    assert tls.ssl_keyfile and tls.ssl_certfile and tls.ssl_ca_certs
    return tls.ssl_keyfile, tls.ssl_certfile, tls.ssl_ca_certs


class ServerCertificates:
    """The certificates of a server. gRPC calls `changed` from its own threads, one handshake at a time."""

    def __init__(self, tls: TlsSettings) -> None:
        self._tls = tls
        self._version = self._file_versions()
        self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that demand a certificate of every client."""
        return grpc.dynamic_ssl_server_credentials(self._read(), self.changed, require_client_authentication=True)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The files as they are, or None to keep the last ones: unchanged, or not readable at this moment."""
        try:
            version = self._file_versions()
            if version == self._version:
                return None
            configuration = self._read()
        except (OSError, ConfigError):
            return None
        self._version = version
        return configuration

    def _file_versions(self) -> tuple[tuple[int, int, int], ...]:
        """Differs whenever a file was written or replaced. Zeros for a missing file: reading it says why."""
        stats = [path.stat() if path.exists() else None for path in _paths(self._tls)]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) if stat else (0, 0, 0) for stat in stats)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        key, chain, authorities = read_files(self._tls)
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    """Credentials of a client, from the files as they are."""
    key, chain, authorities = read_files(tls)
    return grpc.ssl_channel_credentials(authorities, key, chain)
