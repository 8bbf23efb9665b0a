"""Which cells, `policy/granularity`, are set against which wherever highest loads are measured."""

from __future__ import annotations

from collections.abc import Mapping

CHUNK_SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Tokens of a prompt as long as in the trace."""
COMMON_CHUNK = 2048
"""What a server is most often set to."""
BASELINE = "fcfs/whole"


def best_cell(loads: Mapping[str, float]) -> str:
    """The best one that is preempted anywhere; where there is none, the best of all.

    loads: highest load by cell
    """
    tiles = [cell for cell in loads if cell.endswith("/tile")]
    return max(tiles or loads, key=lambda cell: loads[cell])


def compared_cells(loads: Mapping[str, float], common_chunk: str) -> dict[str, tuple[str, str]]:
    """The two cells of each ratio of the JSON line, as far as both were measured.

    common_chunk: the granularity that stands for COMMON_CHUNK
    """
    best = best_cell(loads)
    policy = best.partition("/")[0]
    pairs = {
        "ratio_to_fcfs": ("s-edf/tile", BASELINE),
        "ratio_to_chunk_2048": (best, f"{policy}/{common_chunk}"),
    }
    chunks = [cell for cell in loads if cell.startswith(f"{policy}/chunk")]
    if chunks:
        best_chunk = max(chunks, key=lambda cell: loads[cell])
        pairs["ratio_to_own_best_chunk"] = (best, best_chunk)
    return {
        name: (above, below)
        for name, (above, below) in pairs.items()
        if above in loads and below in loads and above != below
    }
