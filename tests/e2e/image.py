"""A container image of one static busybox, as an OCI layout in a tar file.

Source: the OCI image specification: image layout, index, manifest, configuration, layer.
"""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

NAME = "numalet.test/busybox:1"

WAIT = "trap 'exit 0' TERM; while :; do sleep 3600 & wait; done"
"""A shell script that does nothing until it is told to end, and then ends at once."""

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_TYPE = "application/vnd.oci.image"


def write_image(busybox: Path, path: Path) -> None:
    """Writes the image to `path`; without a command of its own it waits, so it can be a sandbox."""
    layer = _layer(busybox.read_bytes())
    config = _json(
        architecture=_ARCHITECTURES[platform.machine()],
        os="linux",
        config={"Cmd": ["/bin/busybox", "sh", "-c", WAIT], "Env": ["PATH=/bin"]},
        rootfs={"type": "layers", "diff_ids": [_digest(layer)]},
    )
    manifest = _json(
        schemaVersion=2,
        mediaType=f"{_TYPE}.manifest.v1+json",
        config=_descriptor(config, f"{_TYPE}.config.v1+json"),
        layers=[_descriptor(layer, f"{_TYPE}.layer.v1.tar")],
    )
    named = _descriptor(manifest, f"{_TYPE}.manifest.v1+json")
    named["annotations"] = {"io.containerd.image.name": NAME}
    with tarfile.open(path, "w") as tar:
        _add(tar, "oci-layout", _json(imageLayoutVersion="1.0.0"))
        _add(tar, "index.json", _json(schemaVersion=2, manifests=[named]))
        for blob in (layer, config, manifest):
            _add(tar, _digest(blob).replace("sha256:", "blobs/sha256/"), blob)


def _layer(busybox: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        _add(tar, "bin/busybox", busybox, mode=0o755)
        for applet in ("sh", "sleep", "env", "cat", "ls"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return file.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _json(**content: Any) -> bytes:
    return json.dumps(content).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(content: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}
