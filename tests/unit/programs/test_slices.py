"""Slice plans: every row once per operator group, edges fixed by position, boundaries by kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flowprefill.granularity import Granularity
from flowprefill.ops import attention
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.slices import (
    MAX_TILE_ROWS,
    MIN_PRODUCT_ROWS,
    Group,
    PassPlan,
    Slice,
    SliceLimits,
    Span,
    max_decode_keys,
    plan_decode,
    plan_prefill,
)

KINDS = [Granularity(kind) for kind in ("whole", "layer", "op", "tile")]
TILE = Granularity("tile")
LIMITS = SliceLimits(tile_rows=64, attention_work=64 * 256)

limits = st.builds(
    SliceLimits,
    tile_rows=st.integers(1, 8).map(lambda n: 64 * n),
    attention_work=st.integers(1, 200_000),
)
span = st.builds(
    lambda start, length: Span(start, start + length), st.integers(0, 3000), st.integers(1, 1500)
)
spans = st.lists(span, min_size=1, max_size=4)
granularities = st.sampled_from([*KINDS, Granularity("chunk", 512)])


def groups(slices: tuple[Slice, ...], group: Group) -> list[Slice]:
    return [s for s in slices if s.group is group]


def num_rows(prompt_spans: list[Span]) -> int:
    return sum(s.end - s.start for s in prompt_spans)


def token_positions(prompt_spans: list[Span]) -> list[tuple[int, int]]:
    """(sequence, position) of each row of the pass."""
    return [(i, p) for i, s in enumerate(prompt_spans) for p in range(s.start, s.end)]


def make_spec() -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


class TestCoverage:
    @given(spans, limits, granularities)
    def test_each_group_covers_each_row_once_in_order(self, prompts, limit, granularity) -> None:
        plan = plan_prefill(prompts, limit, granularity, is_final=True)
        for group in (Group.QKV, Group.ATTENTION, Group.MLP):
            pieces = groups(plan.layer, group)
            edges = [s.start for s in pieces] + [pieces[-1].end]
            assert edges[0] == 0 and edges[-1] == num_rows(prompts)
            assert [s.end for s in pieces] == edges[1:]
            assert all(s.num_rows > 0 for s in pieces)

    @given(spans, limits, granularities)
    def test_attention_knows_sequence_and_position_of_its_rows(
        self, prompts, limit, granularity
    ) -> None:
        rows = token_positions(prompts)
        plan = plan_prefill(prompts, limit, granularity, is_final=True)
        for piece in groups(plan.layer, Group.ATTENTION):
            assert rows[piece.start] == (piece.sequence, piece.position)
            assert rows[piece.end - 1] == (piece.sequence, piece.num_keys - 1)

    @given(spans, limits, granularities)
    def test_rows_run_after_what_they_need(self, prompts, limit, granularity) -> None:
        """K and V of all earlier rows before attention; attention of a row before its MLP."""
        written = attended = 0
        for piece in plan_prefill(prompts, limit, granularity, is_final=True).layer:
            if piece.group is Group.QKV:
                written = piece.end
            elif piece.group is Group.ATTENTION:
                assert piece.end <= written
                attended = piece.end
            else:
                assert piece.end <= attended

    @given(spans, limits, granularities)
    def test_last_layer_is_keys_values_and_the_head(self, prompts, limit, granularity) -> None:
        plan = plan_prefill(prompts, limit, granularity, is_final=True)
        *qkv, head = plan.last_layer
        assert [(s.start, s.end) for s in qkv] == [
            (s.start, s.end) for s in groups(plan.layer, Group.QKV)
        ]
        assert head.group is Group.HEAD and (head.start, head.end) == (0, num_rows(prompts))
        assert head.num_keys == sum(s.end for s in prompts)

    def test_pass_that_is_not_final_has_no_head(self) -> None:
        plan = plan_prefill([Span(0, 100)], LIMITS, Granularity("chunk", 100), is_final=False)
        assert {s.group for s in plan.last_layer} == {Group.QKV}

    @given(spans, limits)
    def test_every_granularity_runs_the_same_slices_and_op_reorders_them(
        self, prompts, limit
    ) -> None:
        def unmarked(granularity: Granularity) -> list[Slice]:
            plan = plan_prefill(prompts, limit, granularity, is_final=True)
            return [replace(s, is_boundary=False) for s in plan.layer + plan.last_layer]

        assert unmarked(TILE) == unmarked(Granularity("whole")) == unmarked(Granularity("layer"))
        assert Counter(unmarked(TILE)) == Counter(unmarked(Granularity("op")))


class TestEdges:
    @given(span, limits)
    def test_tiles_end_at_multiples_in_token_positions(self, prompt, limit) -> None:
        plan = plan_prefill([prompt], limit, TILE, is_final=True)
        ends = [s.end + prompt.start for s in groups(plan.layer, Group.QKV)]
        assert all(end % limit.tile_rows == 0 for end in ends[:-1])
        assert all(s.num_rows <= limit.tile_rows for s in plan.layer)

    @given(span, st.integers(1, 1400), limits)
    def test_edges_do_not_depend_on_where_the_pass_starts(self, prompt, cached, limit) -> None:
        """A prompt whose first tokens are cached has no edge that the whole prompt has not."""
        start = min(cached, prompt.end - 1)

        def ends(first: int, group: Group) -> list[int]:
            layer = plan_prefill([Span(first, prompt.end)], limit, TILE, is_final=True).layer
            return [s.end + first for s in groups(layer, group)]

        late = [end for end in ends(0, Group.ATTENTION) if end > start]
        assert ends(start, Group.ATTENTION) == late
        # what is left of two tiles may share one
        assert set(ends(start, Group.QKV)) <= set(ends(0, Group.QKV))

    def test_a_start_inside_a_tile_gives_a_short_first_tile(self) -> None:
        plan = plan_prefill([Span(50, 200)], LIMITS, TILE, is_final=True)
        rows = [(s.start + 50, s.end + 50) for s in groups(plan.layer, Group.QKV)]
        assert rows == [(50, 64), (64, 128), (128, 192), (192, 200)]


class TestPacking:
    def test_small_prompts_share_a_tile(self) -> None:
        prompts = [Span(0, 20), Span(0, 30), Span(0, 14)]
        plan = plan_prefill(prompts, LIMITS, TILE, is_final=True)
        assert [(s.start, s.end) for s in groups(plan.layer, Group.QKV)] == [(0, 64)]
        pieces = groups(plan.layer, Group.ATTENTION)
        assert [(s.sequence, s.position, s.num_rows) for s in pieces] == [
            (0, 0, 20),
            (1, 0, 30),
            (2, 0, 14),
        ]

    def test_a_prompt_that_does_not_fit_starts_a_tile_of_its_own(self) -> None:
        plan = plan_prefill([Span(0, 40), Span(0, 30)], LIMITS, TILE, is_final=True)
        assert [(s.start, s.end) for s in groups(plan.layer, Group.QKV)] == [(0, 40), (40, 70)]

    def test_the_end_of_a_long_prompt_shares_a_tile_with_a_short_one(self) -> None:
        plan = plan_prefill([Span(0, 70), Span(0, 30)], LIMITS, TILE, is_final=True)
        assert [(s.start, s.end) for s in groups(plan.layer, Group.QKV)] == [(0, 64), (64, 100)]

    @given(spans, limits)
    def test_packed_tiles_stay_within_the_limit(self, prompts, limit) -> None:
        plan = plan_prefill(prompts, limit, TILE, is_final=True)
        assert all(s.num_rows <= limit.tile_rows for s in groups(plan.layer, Group.QKV))


class TestPackedAttention:
    """Attention of several prompts in one slice, where the kernels can."""

    @given(spans, limits)
    def test_packs_are_the_slices_of_one_prompt_each_joined(self, prompts, limit) -> None:
        alone = groups(plan_prefill(prompts, limit, TILE, True).layer, Group.ATTENTION)
        packing = replace(limit, packs_attention=True)
        packed = groups(plan_prefill(prompts, packing, TILE, True).layer, Group.ATTENTION)
        for pack in packed:
            parts = [s for s in alone if pack.start <= s.start < pack.end]
            alone = alone[len(parts) :]
            assert (parts[0].start, parts[-1].end) == (pack.start, pack.end)
            assert len(parts) == pack.num_sequences
            first = parts[0].sequence
            assert [s.sequence for s in parts] == [first + i for i in range(len(parts))]
            work = sum(s.num_rows * s.num_keys for s in parts)
            assert 0 <= pack.num_rows * pack.num_keys - work < pack.num_rows
            assert pack.position < pack.num_keys
            assert len(parts) == 1 or work <= limit.attention_work
        assert alone == []

    def test_short_prompts_are_one_slice(self) -> None:
        prompts = [Span(0, 10), Span(16, 36), Span(0, 30)]
        limit = replace(LIMITS, packs_attention=True)
        (pack,) = groups(plan_prefill(prompts, limit, TILE, True).layer, Group.ATTENTION)
        assert (pack.start, pack.end, pack.sequence, pack.num_sequences) == (0, 60, 0, 3)
        assert pack.num_keys == -(-(10 * 10 + 20 * 36 + 30 * 30) // 60)

    def test_other_kernels_get_a_slice_for_each_prompt(self) -> None:
        prompts = [Span(0, 10), Span(0, 20)]
        slices = groups(plan_prefill(prompts, LIMITS, TILE, True).layer, Group.ATTENTION)
        assert [(s.sequence, s.num_sequences) for s in slices] == [(0, 1), (1, 1)]


class TestAttentionRows:
    @given(limits, st.integers(1, 100_000), st.integers(1, 100_000))
    def test_rows_shrink_with_the_context(self, limit, keys, more) -> None:
        rows, later = limit.attention_rows(keys), limit.attention_rows(keys + more)
        assert 16 <= later <= rows <= limit.tile_rows

    @given(limits, st.integers(1, 100_000))
    def test_work_stays_within_the_limit_down_to_sixteen_rows(self, limit, keys) -> None:
        rows = limit.attention_rows(keys)
        assert rows == 16 or rows * keys <= limit.attention_work

    @given(span, limits)
    def test_slices_of_a_plan_keep_the_work_limit(self, prompt, limit) -> None:
        for s in groups(plan_prefill([prompt], limit, TILE, is_final=True).layer, Group.ATTENTION):
            assert s.num_rows <= 16 or s.num_rows * s.num_keys <= limit.attention_work

    def test_a_long_context_cuts_a_tile_into_several_attention_slices(self) -> None:
        def parts_of_last_tile(end: int) -> int:
            plan = plan_prefill([Span(0, end)], LIMITS, TILE, is_final=True)
            return sum(s.position >= end - 64 for s in groups(plan.layer, Group.ATTENTION))

        assert [parts_of_last_tile(n) for n in (256, 512, 1024, 8192)] == [1, 2, 4, 4]


class TestBoundaries:
    def plan(self, granularity: Granularity) -> PassPlan:
        return plan_prefill([Span(0, 600)], LIMITS, granularity, is_final=True)

    @pytest.mark.parametrize("granularity", [Granularity("whole"), Granularity("chunk", 64)])
    def test_whole_and_chunk_mark_none(self, granularity: Granularity) -> None:
        plan = self.plan(granularity)
        assert not any(s.is_boundary for s in plan.layer + plan.last_layer)

    def test_layer_marks_its_last_slice(self) -> None:
        plan = self.plan(Granularity("layer"))
        assert [s.is_boundary for s in plan.layer] == [False] * (len(plan.layer) - 1) + [True]

    def test_op_marks_the_end_of_each_operator_over_the_whole_prompt(self) -> None:
        plan = self.plan(Granularity("op"))
        marked = [(s.group, s.end) for s in plan.layer if s.is_boundary]
        assert marked == [(g, 600) for g in (Group.QKV, Group.ATTENTION, Group.MLP)]
        assert [(s.group, s.end) for s in plan.last_layer if s.is_boundary] == [
            (Group.QKV, 600),
            (Group.HEAD, 600),
        ]

    def test_tile_marks_every_slice(self) -> None:
        plan = self.plan(TILE)
        assert all(s.is_boundary for s in plan.layer + plan.last_layer)
        counts = Counter(s.group for s in plan.layer)
        assert counts[Group.QKV] == counts[Group.MLP] == 10 < counts[Group.ATTENTION]


class TestMlpParts:
    @given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 90))
    def test_tiles_are_cut_into_mlp_slices_of_so_many_rows(self, lengths, rows) -> None:
        prompts = [Span(0, n) for n in lengths]
        whole = plan_prefill(prompts, LIMITS, TILE, is_final=True)
        plan = plan_prefill(prompts, replace(LIMITS, mlp_rows=rows), TILE, is_final=True)
        parts = groups(plan.layer, Group.MLP)
        assert [row for s in parts for row in range(s.start, s.end)] == [*range(sum(lengths))]
        assert all(s.num_rows <= rows for s in parts)
        starts = {s.start for s in parts}
        assert starts >= {s.start for s in groups(whole.layer, Group.MLP)}
        for group in (Group.QKV, Group.ATTENTION):
            assert groups(plan.layer, group) == groups(whole.layer, group)

    def test_they_follow_the_attention_of_their_tile(self) -> None:
        plan = plan_prefill([Span(0, 100)], replace(LIMITS, mlp_rows=32), TILE, is_final=False)
        kinds = "".join(s.group.value[0] for s in plan.layer)
        assert kinds == "qammqamm"  # two tiles of 64 and 36 rows


class TestDecode:
    @given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
    def test_step_has_one_row_for_each_sequence(self, contexts) -> None:
        assume(sum(contexts) > max_decode_keys(LIMITS))
        plan = plan_decode(contexts, LIMITS, 2)
        qkv, *attention, mlp = plan.layer
        *last, logits = plan.last_layer
        assert [s.group for s in (qkv, mlp, logits)] == [Group.QKV, Group.MLP, Group.LOGITS]
        assert {(s.start, s.end) for s in (qkv, mlp, logits)} == {(0, len(contexts))}
        assert last == list(plan.layer)
        assert [row for s in attention for row in range(s.start, s.end)] == [*range(len(contexts))]
        assert sum(s.num_keys for s in attention) == sum(contexts)
        assert {(s.group, s.sequence) for s in attention} == {(Group.ATTENTION, None)}

    @given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
    def test_attention_of_a_step_is_cut_at_the_work_of_a_slice(self, contexts) -> None:
        parts = [s for s in plan_decode(contexts, LIMITS, 2).layer if s.num_keys]
        work = LIMITS.attention_work
        assert all(s.num_rows == 1 or s.num_keys * MIN_PRODUCT_ROWS <= work for s in parts)

    def test_a_layer_of_few_keys_is_one_slice(self) -> None:
        most = max_decode_keys(LIMITS)
        plan = plan_decode([most - 5, 5], LIMITS, 2)
        (layer,) = plan.layer
        assert layer == Slice(Group.LAYERS, 0, 2, num_keys=most, is_boundary=True)
        assert plan.last_layer == (layer, Slice(Group.LOGITS, 0, 2, is_boundary=True))
        assert len(plan_decode([most - 5, 6], LIMITS, 2).layer) > 1

    def test_a_lone_row_costs_what_attention_pads_it_to(self) -> None:
        assert MIN_PRODUCT_ROWS == attention._MIN_ROWS

    @given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 900))
    def test_layers_are_grouped_by_what_they_read(
        self, num_layers: int, budget: int, num_keys: int
    ) -> None:
        limits = replace(LIMITS, decode_bytes=1000 * budget, layer_bytes=500, key_bytes=1)
        plan = plan_decode([num_keys], limits, num_layers)
        group, (rest, _) = plan.layer[0], plan.last_layer
        assert group.num_layers == plan.group_layers
        assert group.num_layers == 1 or group.num_layers * (500 + num_keys) <= 1000 * budget
        num_groups = plan.num_groups(num_layers)
        assert (num_groups - 1) * group.num_layers + rest.num_layers == num_layers
        assert 1 <= rest.num_layers <= group.num_layers

    def test_step_may_be_left_after_each_slice(self) -> None:
        plan = plan_decode([5, 7], LIMITS, 2)
        assert all(s.is_boundary for s in plan.layer + plan.last_layer)


class TestLimits:
    def test_rows_and_work_follow_from_the_rates(self) -> None:
        limit = SliceLimits.for_device(make_spec(), 0.004, 800e9, 250e9, 50e9, 2)
        assert limit.tile_rows % 64 == 0
        flops = 2 * 576 * (576 + 3 * 1536)  # output projection and gated MLP of one row
        assert limit.mlp_rows is not None
        assert limit.mlp_rows * flops <= 0.004 * 800e9 < (limit.mlp_rows + 64) * flops
        qkv_flops = 2 * 576 * 960
        assert limit.tile_rows == 4 * limit.mlp_rows  # more would fit, but a pass keeps its queries
        assert limit.tile_rows * qkv_flops <= 0.004 * 800e9
        assert limit.attention_work == int(0.004 * 250e9 / (4 * 576))
        # half a slice's time of reading; a layer of SmolLM2 has 3.5 million weights
        assert limit.decode_bytes == 0.002 * 50e9
        assert limit.layer_bytes == 2 * 576 * (960 + 576 + 3 * 1536)
        assert limit.key_bytes == 2 * 2 * 192

    @pytest.mark.parametrize(("max_slice_s", "rows"), [(1e-9, 64), (1e9, MAX_TILE_ROWS)])
    def test_tile_rows_have_a_smallest_and_a_largest_value(
        self, max_slice_s: float, rows: int
    ) -> None:
        assert (
            SliceLimits.for_device(make_spec(), max_slice_s, 8e11, 2e11, 5e10, 2).tile_rows == rows
        )
