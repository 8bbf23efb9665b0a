"""Arena: zeroed memory on huge pages, in pieces."""

from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowprefill.huge_pages import Arena, aligned

HUGE_PAGE = 2 << 20
sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=20)


def span(piece: Tensor) -> range:
    """Its addresses."""
    return range(piece.data_ptr(), piece.data_ptr() + piece.nbytes)


@given(sizes)
def test_pieces_fit_exactly_and_do_not_overlap(counts: list[int]) -> None:
    """As many as were asked for at the start, each on a cache line of its own."""
    arena = Arena(sum(aligned(2 * n) for n in counts))
    pieces = [arena.take((n,), torch.bfloat16) for n in counts]
    assert all(p.data_ptr() % 64 == 0 for p in pieces)
    assert all(span(a).stop <= span(b).start for a, b in itertools.pairwise(pieces))
    for i, piece in enumerate(pieces):
        assert not piece.any()
        piece.fill_(i + 1)
    assert all((piece == i + 1).all() for i, piece in enumerate(pieces))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_piece_has_the_shape_and_type_asked_for(dtype: torch.dtype) -> None:
    piece = Arena(1000).take((3, 1, 5), dtype)
    assert piece.shape == (3, 1, 5) and piece.dtype == dtype and piece.is_contiguous()


def test_the_first_piece_begins_on_a_huge_page() -> None:
    assert Arena(100).take((1,), torch.float32).data_ptr() % HUGE_PAGE == 0


def test_what_is_left_is_told_when_it_is_not_enough() -> None:
    arena = Arena(4096)
    arena.take((1024,), torch.float32)
    with pytest.raises(ValueError, match=rf"{2 * HUGE_PAGE} bytes: \d+ are left"):
        arena.take((HUGE_PAGE // 2,), torch.float32)


@pytest.mark.parametrize(("num_bytes", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_a_piece_takes_up_whole_cache_lines(num_bytes: int, expected: int) -> None:
    assert aligned(num_bytes) == expected


def mapping(address: int) -> str:
    """What the kernel tells about the memory around an address."""
    found = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(part, 16) for part in head.split("-"))
            found = "" if not start <= address < end else line
        elif found:
            found += "\n" + line
            if line.startswith("VmFlags"):
                return found
    return ""


def test_it_asks_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    piece = Arena(3 * HUGE_PAGE).take((HUGE_PAGE,), torch.uint8)
    flags = next(x for x in mapping(piece.data_ptr()).splitlines() if x.startswith("VmFlags"))
    assert "hg" in flags.split()


def test_where_there_are_none_the_memory_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    piece = Arena(1000).take((250,), torch.float32)
    piece.fill_(1.0)
    assert piece.sum() == 250


FREES_ITS_PIECES = """
import gc, mmap, torch
from pathlib import Path
from flowprefill.huge_pages import Arena

def virtual_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

size = 1 << 30
before = virtual_bytes()
arena = Arena(size)
first, second = arena.take((10,), torch.float32), arena.take((10,), torch.float32)
del arena, first
gc.collect()
second.fill_(2.0)
assert second.sum() == 20
assert virtual_bytes() > before + size // 2
del second
gc.collect()
assert virtual_bytes() < before + size // 2
"""


def test_the_memory_lives_as_long_as_any_piece() -> None:
    """In a process of its own, where nobody else takes or frees memory meanwhile."""
    subprocess.run([sys.executable, "-c", FREES_ITS_PIECES], check=True, timeout=60)
