"""Slices that run together in one call of a kernel, as the engine sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowprefill.bench.session import Session
from flowprefill.config import EngineConfig
from flowprefill.granularity import Granularity
from flowprefill.programs.slices import SliceLimits, Span, plan_prefill
from flowprefill.request import SLO
from tests.factories import write_tiny_model
from tests.native_kernels import KERNELS, require_native

LIMITS = SliceLimits(tile_rows=256, attention_work=64 * 64, mlp_rows=64)
NUM_LAYERS, NUM_TOKENS = 3, 380


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_slice_counts_as_a_sign_of_life(tmp_path: Path, kernels: str) -> None:
    if kernels == "native":
        require_native("float32")
    path = write_tiny_model(tmp_path, num_layers=NUM_LAYERS)
    config = EngineConfig(
        model=str(path), dtype="float32", device="cpu", kernels=kernels, num_threads=2
    )
    plan = plan_prefill([Span(0, NUM_TOKENS)], LIMITS, Granularity("tile"), is_final=True)
    expected = (NUM_LAYERS - 1) * len(plan.layer) + len(plan.last_layer)
    with Session(config, 0, lambda stage, fraction: None) as session:
        session.engine._model.program.limits = LIMITS
        answer = session.submit(session.random_prompt(NUM_TOKENS), SLO(100.0, 100.0))
        session.wait_end(answer)
        assert session.engine.stats().num_slices == expected
        num_calls = session.engine._runner.executor.num_slices
        assert (num_calls < expected) is (kernels == "native")
