"""Whether pushed weights are, where they are loaded, what they were when they were written."""

from __future__ import annotations

from pathlib import Path

from streamrl.executor.checksums import combine, file_checksum
from streamrl.executor.samples import Manifest
from streamrl.executor.transfer.side_by_side import side_by_side


def verify_buckets(manifest: Manifest) -> str:
    """Read every bucket, and return the checksum of what was found, which is the manifest's.

    Raises:
        ValueError: a bucket is another than was written; the message names the file and both checksums.
    """
    checksums = list(side_by_side(lambda own: file_checksum(Path(own.path)), manifest.buckets))
    for bucket, found in zip(manifest.buckets, checksums, strict=True):
        if found != bucket.checksum:
            raise ValueError(
                f"{bucket.path}: expected checksum {bucket.checksum}, found {found} "
                f"({Path(bucket.path).stat().st_size} of {bucket.num_bytes} bytes)"
            )
    return manifest.origin or combine(checksums)
