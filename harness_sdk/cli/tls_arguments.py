"""The options of commands that look at replicas which speak TLS."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness_sdk.options import TlsOptions


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--tls-ca`, `--tls-cert` and `--tls-key`."""
    for name, text in (
        ("ca", "PEM of the authority that signed the replicas; turns TLS on"),
        ("cert", "PEM of the client's certificate, for mutual TLS"),
        ("key", "PEM of the client's private key"),
    ):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help=text)


def tls_options(ca: Path | None, cert: Path | None, key: Path | None) -> TlsOptions | None:
    """TLS as the options say; None speaks plain text.

    Raises:
        ConfigError: A certificate is named without its key, or the key without it.
    """
    if ca is None and cert is None and key is None:
        return None
    files = [str(path) if path is not None else None for path in (ca, cert, key)]
    return TlsOptions(ca_file=files[0], cert_file=files[1], key_file=files[2])
