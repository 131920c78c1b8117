"""Certificates for servers on loopback, made by the command `openssl`."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Two PEM files. `chain` has what is served; of an authority, what is trusted."""

    chain: Path
    key: Path


def make_authority(folder: Path, name: str = "authority") -> Certificate:
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificate(chain=folder / f"{name}.crt", key=folder / f"{name}.key")
    _openssl(
        "req", "-x509", *_KEY, "-subj", f"/CN={name}", "-days", "1", "-keyout", str(made.key),
        "-out", str(made.chain), "-addext", "keyUsage=critical,keyCertSign,cRLSign",
    )  # fmt: skip
    return made


def issue(
    authority: Certificate,
    name: str,
    hosts: tuple[str, ...] = ("IP:127.0.0.1", "DNS:localhost"),
    days: int = 1,
) -> Certificate:
    """A server's certificate, beside its authority; with negative `days` it has run out."""
    folder = authority.chain.parent
    made = Certificate(chain=folder / f"{name}.crt", key=folder / f"{name}.key")
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(
        f"subjectAltName={','.join(hosts)}\nextendedKeyUsage=serverAuth\n"
        "authorityKeyIdentifier=keyid\nbasicConstraints=CA:FALSE\n"
    )
    _openssl(
        "req", "-new", *_KEY, "-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(request)
    )
    _openssl(
        "x509", "-req", "-in", str(request), "-CA", str(authority.chain), "-CAkey",
        str(authority.key), "-CAcreateserial", "-days", str(days), "-extfile", str(extensions),
        "-out", str(made.chain),
    )  # fmt: skip
    return made


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr}")
