"""How ranks end: killed, lost, failed while they load, or with rank 0. And many stops."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowprefill.errors import ModelLoadError
from flowprefill.parallel.errors import RankError
from flowprefill.programs.slices import Group
from tests.engine_harness import wait_until
from tests.factories import write_tiny_model
from tests.unit.parallel.two_ranks import (
    LIMITS,
    SKEWED,
    WAIT_S,
    Stops,
    answers,
    death_of,
    divided,
    ranks_of,
    write_model,
)
from tests.unit.programs.runs import load_quietly, run_to_end

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_stops(path: Path) -> None:
    with divided(path, module=SKEWED, dtype="bfloat16") as model:
        stops = Stops(model, random.Random(2))
        stops.run(10_000)
        assert stops.num_ends > 500


def test_a_rank_past_the_published_boundary_ends_all(path: Path) -> None:
    with divided(path) as model:
        ranks, died = ranks_of(model), death_of(ranks_of(model))
        state = Stops(model, random.Random(0)).prefill(0)
        group = None
        while group is not Group.MLP:
            group = state.next_slice.group
            state.run_slice()
        # the other rank has been in the sums of that slice, and so in front of it
        progress = state._progress  # type: ignore[attr-defined]
        ranks.word.publish(progress.run_id, progress.boundary - 2)
        assert died.wait(WAIT_S)
        with pytest.raises(RankError, match="rank 1 of 2 failed: too late: at boundary"):
            state.run_slice()


def test_a_killed_rank_ends_all_of_them(path: Path) -> None:
    with divided(path, num_ranks=3) as model:
        ranks, died = ranks_of(model), death_of(ranks_of(model))
        stops = Stops(model, random.Random(0))
        stops.run(5)
        state = stops.prefill(0)
        state.run_slice()
        os.kill(ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank \d of 3 (was killed by SIGKILL|failed)"):
            run_to_end(state)
        assert died.wait(WAIT_S)
        wait_until(lambda: all(c.process.poll() is not None for c in ranks._children))
        with pytest.raises(RankError):
            stops.prefill(1).run_slice()


def test_three_ranks_answer_as_one_does(path: Path) -> None:
    expected = answers(load_quietly(path, kernels="torch", limits=LIMITS))
    with divided(path, num_ranks=3) as model:
        first, second = answers(model), answers(model)
    for ours, again, alone in zip(first, second, expected, strict=True):
        assert torch.equal(ours, again)
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-4)


def test_what_fails_a_rank_while_it_loads_fails_the_load(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    with (
        pytest.raises(RankError, match=r"rank 1 of 2 exited with code 1"),
        divided(path, module="tests.unit.parallel.no_such_module"),
    ):
        pass
    (path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelLoadError, match="not readable as safetensors"), divided(path):
        pass


LEADER = """
import sys
from pathlib import Path
from tests.unit.parallel.two_ranks import divided, ranks_of

with divided(Path(sys.argv[1])) as model:
    print(*ranks_of(model).pids, flush=True)
    sys.stdin.read()
"""


def test_ranks_end_with_rank_0_and_leave_nothing(path: Path) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert leader.stdin and leader.stdout
    with leader.stdin, leader.stdout:
        [pid] = map(int, leader.stdout.readline().split())
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "/memfd:flowprefill-stop-word" in maps and "/dev/shm/" not in maps
        leader.kill()
        leader.wait()
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
