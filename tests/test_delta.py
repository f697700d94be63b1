"""What changed from one version of a file to the next: exact whatever changed, small where little did."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.executor.transfer import delta
from streamrl.executor.transfer.delta import decode_delta, encode_delta


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def there_and_back(directory: Path, old: bytes, new: bytes, width: int = 2) -> int:
    """Return the bytes that the change took, once it was told and read again."""
    base, target = write(directory / "old", old), write(directory / "new", new)
    told = encode_delta(base, target, width)
    assert b"".join(decode_delta(base, told)) == new
    return len(told)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), width=st.sampled_from(delta.WIDTHS))
def test_what_changed_is_told_exactly(data: st.DataObject, width: int) -> None:
    import tempfile

    old = data.draw(st.binary(max_size=3000))
    places = data.draw(st.lists(st.integers(0, max(0, len(old) - 1)), max_size=50))
    new = bytearray(old)
    for place in places if old else []:
        new[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as directory:
        there_and_back(Path(directory), old, bytes(new), width)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 70_000])
def test_changes_any_distance_apart_are_told(tmp_path: Path, gap: int) -> None:
    old = np.zeros(gap + 300, np.uint16)
    new = old.copy()
    new[3], new[3 + gap], new[-1] = 7, 9, 65_535
    there_and_back(tmp_path, old.tobytes(), new.tobytes())


def test_more_than_a_block_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "BLOCK_WORDS", 64)
    old = np.arange(1000, dtype=np.uint16)
    new = old + (old % 37 == 0).astype(np.uint16)
    there_and_back(tmp_path, old.tobytes() + b"x", new.tobytes() + b"y")


def test_a_small_step_in_bfloat16_takes_less_than_a_byte_and_a_half_a_changed_value(
    tmp_path: Path,
) -> None:
    generator = torch.Generator().manual_seed(0)
    before = 0.02 * torch.randn(2_000_000, generator=generator)
    after = before + 3e-6 * torch.randn(2_000_000, generator=generator).sign()
    old, new = (each.bfloat16().view(torch.int16).numpy() for each in (before, after))
    changed = int((old != new).sum())
    assert 0.01 < changed / len(old) < 0.2
    size = there_and_back(tmp_path, old.tobytes(), new.tobytes())
    assert size / changed < 1.5  # uncompressed indices and values are 6


def test_files_that_are_no_two_versions_are_refused(tmp_path: Path) -> None:
    base, new = write(tmp_path / "old", bytes(8)), write(tmp_path / "new", bytes(10))
    with pytest.raises(ValueError, match="10 bytes, but 8 before"):
        encode_delta(base, new, 2)
    told = encode_delta(new, new, 2)
    with pytest.raises(ValueError, match="8 bytes, but its delta is for 10 bytes"):
        list(decode_delta(base, told))


def test_what_is_no_delta_is_refused(tmp_path: Path) -> None:
    old = np.zeros(1000, np.uint16)
    new = old.copy()
    new[5::10] = 3
    base = write(tmp_path / "old", old.tobytes())
    told = encode_delta(base, write(tmp_path / "new", new.tobytes()), 2)
    form = msgspec.msgpack.decode(told)
    width, size, ((count, gaps, changes),), tail = form
    for wrong in (
        told[:-20],
        b"nothing",
        [3, size, [(count, gaps, changes)], tail],
        [width, size, [], tail],
        [width, size, [(count + 1, gaps, changes)], tail],
        [width, size, [(count, changes, gaps)], tail],
        [width, size, [(count, gaps, b"garbled")], tail],
        [width, size, [(count, gaps, changes[:-3])], tail],
    ):
        data = wrong if isinstance(wrong, bytes) else msgspec.msgpack.encode(wrong)
        with pytest.raises(ValueError):
            list(decode_delta(base, data))
