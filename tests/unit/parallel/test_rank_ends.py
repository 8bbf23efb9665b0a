"""How ranks end: killed, lost, failed while they load, or with rank 0. And many stops."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flowprefill.config import EngineConfig
from flowprefill.errors import ModelLoadError
from flowprefill.loading import PartPlan
from flowprefill.parallel.errors import RankError
from flowprefill.parallel.ranks import REAP_S, Ranks
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


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opened at the end, for whoever waits there."""
    gate = threading.Event()
    yield gate
    gate.set()


def pretend_nccl(ranks: Ranks) -> None:
    """A group that is left as one of NCCL is; gloo's can be left so too."""
    assert ranks._collectives is not None
    ranks._collectives._is_cuda = True


def close_in_time(ranks: Ranks) -> None:
    closing = threading.Thread(target=ranks.close, daemon=True)
    closing.start()
    closing.join(2 * REAP_S * len(ranks.pids))
    assert not closing.is_alive()


def test_a_group_whose_end_would_wait_for_the_others_is_left_at_once(
    path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's does, and for sums in flight."""
    monkeypatch.setattr(dist, "destroy_process_group", gate.wait)
    with divided(path) as model:
        pretend_nccl(ranks_of(model))
        close_in_time(ranks_of(model))
    assert not dist.is_initialized()
    monkeypatch.undo()
    with divided(path) as model:  # in a group of its own
        assert len(answers(model)) > 0


def test_a_group_that_cannot_be_left_is_left_behind(
    path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    with divided(path) as model:
        pretend_nccl(ranks_of(model))
        with monkeypatch.context() as stuck:
            stuck.setattr(dist.ProcessGroup, "abort", lambda group: gate.wait())
            close_in_time(ranks_of(model))
    gate.set()
    wait_until(lambda: not dist.is_initialized())


def test_a_death_is_told_before_the_group_is_aborted(
    path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, aborted = threading.Event(), list[bool]()

    def abort(group: dist.ProcessGroup) -> None:
        aborted.append(told.is_set())
        gate.wait()

    with divided(path) as model:
        ranks = ranks_of(model)
        pretend_nccl(ranks)
        ranks.call_on_death(lambda error: told.set())
        with monkeypatch.context() as stuck:
            stuck.setattr(dist.ProcessGroup, "abort", abort)
            os.kill(ranks.pids[0], signal.SIGKILL)
            assert told.wait(WAIT_S)
            wait_until(lambda: aborted)
        gate.set()
    assert aborted[0]


def test_a_rank_that_ends_while_the_others_wait_to_meet_it_fails_the_load(
    path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would wait for it for ever."""
    config = EngineConfig(str(path), dtype="float32", device="cpu", tensor_parallel_size=2)
    plan = PartPlan(2, "cpu", "float32", "torch", num_threads=1)
    ranks = Ranks(2, {"config": config.to_dict(), "plan": plan.to_wire()})

    def wait_for_the_dead(*args: object, **kwargs: object) -> None:
        os.kill(ranks.pids[0], signal.SIGKILL)
        gate.wait()

    monkeypatch.setattr(dist, "init_process_group", wait_for_the_dead)
    failure: list[Exception] = []

    def meet() -> None:
        try:
            ranks.agree_on_blocks(8, torch.device("cuda"))
        except RankError as error:
            failure.append(error)

    meeting = threading.Thread(target=meet, daemon=True)
    meeting.start()
    meeting.join(WAIT_S)
    close_in_time(ranks)
    assert [str(error) for error in failure] == ["rank 1 of 2 was killed by SIGKILL"]


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
