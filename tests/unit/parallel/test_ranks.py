"""Two ranks, one late at random: the answers of one rank, and the same bits at any stops."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowprefill.loading import LoadedModel
from tests.unit.parallel.two_ranks import LIMITS, SKEWED, Stops, answers, divided, write_model
from tests.unit.programs.runs import load_quietly


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[LoadedModel]:
    """On two ranks, of which the other is a millisecond late now and then."""
    with divided(path, module=SKEWED) as model:
        yield model


def test_two_ranks_answer_as_one_does(path: Path, model: LoadedModel) -> None:
    alone = load_quietly(path, kernels="torch", limits=LIMITS)
    for ours, expected in zip(answers(model), answers(alone), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_each_rank_holds_its_part_of_keys_and_weights(path: Path, model: LoadedModel) -> None:
    alone = load_quietly(path, kernels="torch")
    assert model.cache.num_blocks == alone.cache.num_blocks
    assert 2 * model.cache.k.nbytes == alone.cache.k.nbytes
    assert model.kernels == "torch, 2 ranks"


def test_random_stops_at_random_skews_change_no_bit(model: LoadedModel) -> None:
    stops = Stops(model, random.Random(1))
    stops.run(1000)
    assert stops.num_ends > 50
