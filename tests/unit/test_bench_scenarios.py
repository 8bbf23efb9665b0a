"""`bench scenarios`: which are run and what is said of them. The scenarios need a server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.scenarios.base import Bar, Result, Scenario
from flowprefill.bench.scenarios.command import all_scenarios, choose, make_table
from flowprefill.bench.scenarios.rig import Rig


def nothing(rig: Rig) -> Sequence[Bar]:
    return []


FIRST = Scenario("first", 1, "owner/project#1", nothing)
SECOND = Scenario("second", 2, "owner/project#2", nothing)


def test_scenarios_are_run_in_the_order_of_their_rows() -> None:
    assert choose([FIRST, SECOND], None) == [FIRST, SECOND]
    assert choose([FIRST, SECOND], "second,first") == [FIRST, SECOND]
    assert choose([FIRST, SECOND], "second") == [SECOND]
    with pytest.raises(BenchmarkError, match="scenario 'third': must be one of first, second"):
        choose([FIRST, SECOND], "third")


def test_every_scenario_has_a_name_of_its_own_a_row_and_says_what_it_does() -> None:
    scenarios = all_scenarios()
    names = [scenario.name for scenario in scenarios]
    assert len(set(names)) == len(names)
    assert [s.row for s in scenarios] == sorted(s.row for s in scenarios)
    for scenario in scenarios:
        assert 1 <= scenario.row <= 30
        assert scenario.thread.count("#") == 1
        assert scenario.measure.__doc__


def test_a_scenario_is_met_when_every_bar_is() -> None:
    met, missed, told = Bar("a", 1.0, 1.0), Bar("b", 1.001, 1.0), Bar("c", 5.0, None, "prompts")
    assert Result(FIRST, [met, told]).is_met
    result = Result(FIRST, [met, missed])
    assert not result.is_met
    assert result.to_json() == {
        "row": 1,
        "is_met": False,
        "error": None,
        "bars": [
            {"what": "a", "measured": 1.0, "limit": 1.0, "unit": "s", "is_met": True},
            {"what": "b", "measured": 1.001, "limit": 1.0, "unit": "s", "is_met": False},
        ],
    }
    failed = Result(SECOND, error="the server is gone")
    assert not failed.is_met
    table = make_table([result, failed])
    assert [list(column.cells) for column in table.columns] == [
        ["1", "", "2"],
        ["first", "", "second"],
        ["a", "b", "failed: the server is gone"],
        ["1.000 s", "1.001 s", ""],
        ["1.000 s", "1.000 s", ""],
        ["yes", "no", "no"],
    ]
