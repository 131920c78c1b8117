"""Keys and certificates of a cluster that lives for minutes, made by openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_DAYS = "2"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_CONFIG = "[req]\ndistinguished_name = name\n[name]\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Files in PEM. The key is nobody else's."""

    file: Path
    key: Path


def make_authority(folder: Path, name: str) -> Certificate:
    """One that signs others; its files are ca.crt and ca.key."""
    return _make(folder, "ca", f"/CN={name}", "basicConstraints=critical,CA:true")


def issue(authority: Certificate, folder: Path, name: str, subject: str) -> Certificate:
    """For a server on the loopback as well as for a client, whose user is the subject's CN, and its
    groups the Os; the files are named `name`."""
    signed_by = ("-CA", authority.file, "-CAkey", authority.key)
    return _make(folder, name, subject, "subjectAltName=IP:127.0.0.1,DNS:localhost", *signed_by)


def make_key(path: Path) -> Path:
    """A private key alone."""
    _openssl("genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", path)
    return path


def _make(folder: Path, name: str, subject: str, extension: str, *more: str | Path) -> Certificate:
    made = Certificate(file=folder / f"{name}.crt", key=folder / f"{name}.key")
    config = folder / "openssl.cnf"
    config.write_text(_CONFIG)
    _openssl(
        *("req", "-x509", "-config", config, *_CURVE, "-days", _DAYS, "-subj", subject),
        *("-addext", extension, "-keyout", made.key, "-out", made.file, *more),
    )
    return made


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)
