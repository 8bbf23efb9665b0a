"""ProfiledCost: the predictor's seconds, and boundaries where the engine's passes have them."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.granularity import Granularity
from flowprefill.predictor.profile import Profile
from flowprefill.programs.slices import Slice, SliceLimits
from flowprefill.scheduler.scheduler import SchedulerOptions
from flowprefill.simulator.cost import Timeline
from flowprefill.simulator.profiled import DeviceTimes, ProfiledCost, ProfiledPlatform
from flowprefill.simulator.replay import Replay, Setup, at_load
from flowprefill.workload import Objective, TraceRequest
from tests.factories import write_tiny_model
from tests.unit.predictor.shapes import (
    LIMITS,
    NUM_LAYERS,
    TRUTH,
    all_shapes,
    make_predictor,
    true_s,
)
from tests.unit.programs.runs import Runner, load_quietly, random_tokens

CHOICE = (1e-3, 0.5e-3)
TIMES = DeviceTimes(tuple(TRUTH.items()), CHOICE, NUM_LAYERS, LIMITS)
GRANULARITIES = ["whole", "chunk:50", "chunk:100", "layer", "op", "tile"]


def cost(granularity: str = "tile", times: DeviceTimes = TIMES) -> ProfiledCost:
    return ProfiledCost(times, Granularity.parse(granularity))


def boundaries_s(timeline: Timeline) -> list[float]:
    """All boundaries, found by asking again behind each."""
    found = [timeline.next_boundary_s(1e-7)]
    while found[-1] < timeline.total_s:
        found.append(timeline.next_boundary_s(found[-1] + 1e-7))
    return found


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)
    return Runner(load_quietly(path, limits=LIMITS, kernels="torch"))


def left_at_s(runner: Runner, lengths: list[int], granularity: str) -> list[float]:
    """When the program itself may be left, by the seconds of the slices that it has run."""
    inputs = [runner.input(random_tokens(n), sequence=i) for i, n in enumerate(lengths)]
    state = runner.program.prefill(inputs, Granularity.parse(granularity))
    found, elapsed_s = [], 0.0
    while not state.is_done:
        elapsed_s += true_s(state.next_slice)
        if state.run_slice():
            found.append(elapsed_s)
    return found


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("lengths", [[5], [64], [100], [300], [20, 90, 33]])
def test_boundaries_are_those_of_the_program(
    runner: Runner, lengths: list[int], granularity: str
) -> None:
    timeline = cost(granularity).timeline([(n, 0) for n in lengths], Granularity.parse(granularity))
    *found, end_s = boundaries_s(timeline)
    assert found == pytest.approx(left_at_s(runner, lengths, granularity))
    assert end_s == timeline.total_s


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("prompts", [[(300, 0)], [(1000, 256)], [(40, 0), (200, 64)]])
def test_a_prefill_takes_its_slices_and_the_choice_of_its_tokens(
    prompts: list[tuple[int, int]], granularity: str
) -> None:
    predictor = make_predictor(granularity)
    found = cost(granularity).timeline(prompts, Granularity.parse(granularity))
    choice_s = CHOICE[0] + CHOICE[1] * len(prompts)
    assert found.total_s == pytest.approx(predictor.packed_prefill_s(prompts) + choice_s)
    assert cost(granularity).packed_prefill_s(prompts) == predictor.packed_prefill_s(prompts)


@pytest.mark.parametrize(("num_seqs", "num_tokens"), [(1, 10), (4, 800), (16, 60_000)])
def test_a_step_is_left_after_any_slice(num_seqs: int, num_tokens: int) -> None:
    timeline = cost().step_timeline(num_seqs, num_tokens)
    assert timeline.total_s == make_predictor().decode_step_s(num_seqs, num_tokens)
    found = [0.0, *boundaries_s(timeline)]
    slices_s = [b - a for a, b in itertools.pairwise(found)]
    # Few keys: layers by themselves, then logits and choice. Many: attention by sequences.
    assert len(slices_s) >= 2 and min(slices_s) > 0
    if num_tokens == 60_000:
        assert max(slices_s) < 0.2 * timeline.total_s


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_boundary_is_where_it_was_asked_for_or_later(granularity: str) -> None:
    timeline = cost(granularity).timeline([(700, 0)], Granularity.parse(granularity))
    before = 0.0
    for i in range(1, 1000):
        elapsed_s = timeline.total_s * i / 1000
        boundary_s = timeline.next_boundary_s(elapsed_s)
        assert elapsed_s - 1e-9 <= boundary_s <= timeline.total_s
        assert boundary_s >= before
        before = boundary_s
    assert timeline.next_boundary_s(timeline.total_s) == timeline.total_s


def test_a_slower_machine_takes_longer_for_everything_and_its_overhead_once() -> None:
    slow = TIMES.slowed(1.5, overhead_s=0.002)
    whole = Granularity("whole")
    usual_s = cost().timeline([(300, 0)], whole).total_s
    assert cost(times=slow).timeline([(300, 0)], whole).total_s == pytest.approx(
        1.5 * usual_s + 0.002
    )
    assert cost(times=slow).prefill_s(300) == pytest.approx(1.5 * cost().prefill_s(300))
    assert cost(times=slow).decode_step_s(3, 90) == pytest.approx(1.5 * cost().decode_step_s(3, 90))


def test_a_profile_gives_the_times_that_it_was_made_of() -> None:
    samples: list[tuple[Slice, float]] = [(piece, true_s(piece)) for piece in all_shapes()]
    choices = [(rows, CHOICE[0] + CHOICE[1] * rows) for rows in (1, 4, 16)]
    profile = Profile(samples, choices, is_bit_invariant=True, calibration_s=1.0)
    times = DeviceTimes.from_profile(profile, NUM_LAYERS, LIMITS)
    assert times.choice == pytest.approx(CHOICE)
    assert cost(times=times).prefill_s(500) == pytest.approx(cost().prefill_s(500), rel=1e-3)


def test_a_replay_runs_on_it_and_shares_prefixes_by_the_engines_blocks() -> None:
    options = SchedulerOptions(max_num_seqs=4)
    platform = ProfiledPlatform("this CPU", "tiny", TIMES, 16, 1000, 8192, options)
    alike = [TraceRequest(float(i), "text", 500, 2, prefix_hashes=(7,)) for i in range(4)]
    requests = at_load(alike, 0.5, platform)
    setup = Setup("s-edf", Granularity("tile"), 0.0, 0, platform)
    goals = [Objective("text", 10.0, 1.0)] * 4
    replay = Replay(requests, setup, objectives=goals).run_all()
    first, *others = replay.records.values()
    assert first.num_cached_tokens == 0
    # all full blocks but that of the last token
    assert [record.num_cached_tokens for record in others] == [496] * 3
    assert first.ttft_s == pytest.approx(
        platform.cost(Granularity("tile")).timeline([(500, 0)], Granularity("tile")).total_s
    )
    assert replay.attainment == 1


def test_packs_are_bounded_by_saturation_and_chunk() -> None:
    limits = SliceLimits(tile_rows=64, attention_work=64 * 512)
    times = DeviceTimes(tuple(TRUTH.items()), CHOICE, NUM_LAYERS, limits)
    platform = ProfiledPlatform("this CPU", "tiny", times, 16, 1000, 8192, SchedulerOptions())
    saturation = cost().saturation_tokens
    assert platform.options(Granularity("tile")).max_pack_tokens == saturation
    assert platform.options(Granularity.parse("chunk:10")).max_pack_tokens == 10


def test_it_can_be_sent_to_other_processes() -> None:
    platform = ProfiledPlatform("this CPU", "tiny", TIMES, 16, 1000, 8192, SchedulerOptions())
    copy = pickle.loads(pickle.dumps(platform))
    assert copy == platform and hash(copy) == hash(platform)


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 699)), min_size=1, max_size=6),
    granularity=st.sampled_from([*GRANULARITIES, "chunk:7"]),
)
def test_no_way_to_prefill_takes_less_than_the_least(
    prompts: list[tuple[int, int]], granularity: str
) -> None:
    """Alone, in any chunks, or packed as far as packs go."""
    prompts = [(num_tokens, min(cached, num_tokens - 1)) for num_tokens, cached in prompts]
    device, boundaries = cost(granularity), Granularity.parse(granularity)
    for one in prompts:
        assert 0 < device.least_prefill_s(*one) <= device.timeline([one], boundaries).total_s
    pack: list[tuple[int, int]] = []
    for num_tokens, cached in prompts:
        num_packed = sum(n - c for n, c in pack) + num_tokens - cached
        if num_packed <= boundaries.pack_tokens(device.saturation_tokens):
            pack.append((num_tokens, cached))
    if pack:
        least_s = sum(device.least_prefill_s(*one) for one in pack)
        assert least_s <= device.timeline(pack, boundaries).total_s


def test_the_least_is_near_what_a_long_prompt_takes() -> None:
    device = cost("whole")
    assert device.least_prefill_s(1000) > 0.6 * device.prefill_s(1000)
    assert device.least_prefill_s(1000, 900) < 0.2 * device.least_prefill_s(1000)
