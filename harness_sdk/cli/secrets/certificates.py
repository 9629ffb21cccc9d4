"""An authority of one deployment and the certificates that it signs: P-256, by `cryptography`."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence

from harness_sdk.errors import ConfigError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise ConfigError(
        "certificates need the package cryptography",
        remedy="pip install 'octopus-agents[rollout]'",
    ) from error


class Authority:
    """A new authority.

    Args:
        days: How long it and what it signs hold.
    """

    def __init__(self, *, days: int = 730) -> None:
        self._days = days
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Octopus authority")
        public = self._key.public_key()
        self._certificate = (
            self._builder(self._name, public)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def files(self) -> dict[str, bytes]:
        """`ca.pem` and `ca.key`."""
        return {"ca.pem": _pem(self._certificate), "ca.key": _key_pem(self._key)}

    def issue(self, name: str, hosts: Sequence[str]) -> dict[str, bytes]:
        """`NAME.pem` and `NAME.key`, for a server under any of `hosts` and for a client.

        Args:
            name: Name of the service.
            hosts: Host names and addresses.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key()
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            self._builder(_name(name), public)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(signer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return {f"{name}.pem": _pem(certificate), f"{name}.key": _key_pem(key)}

    def _builder(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            # Clocks of several machines differ a little.
            .not_valid_before(now - datetime.timedelta(minutes=10))
            .not_valid_after(now + datetime.timedelta(days=self._days))
        )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs, crl_sign=signs,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
