import math
from dataclasses import replace

import msgpack
import pytest

from flowprefill.errors import InvalidParameterError
from flowprefill.request import (
    SLO,
    FinishReason,
    Logprob,
    PrefillTiming,
    Request,
    TokenOutput,
)
from flowprefill.sampling_params import SamplingParams


def through_msgpack(wire):
    return msgpack.unpackb(msgpack.packb(wire))


def make_request(**sampling):
    return Request(7, [1, 2, 3], SamplingParams(**sampling), SLO(0.25, 0.1), arrival_s=100.0)


def test_a_request_survives_the_wire():
    request = make_request(
        stop=("a", "\U0001f600"),
        stop_token_ids=(4, 5),
        logit_bias={3: -100.0, 9: 0.5},
        seed=-(2**63),
        logprobs=3,
    )
    assert Request.from_wire(through_msgpack(request.to_wire())) == request


def test_a_default_request_survives_the_wire():
    assert Request.from_wire(through_msgpack(make_request().to_wire())) == make_request()


def test_class_and_tenant_survive_the_wire():
    slo = SLO(0.25, 0.1, name="chat", rank=-3, weight=2.5)
    request = replace(make_request(), slo=slo, tenant="blue \U0001f600")
    assert Request.from_wire(through_msgpack(request.to_wire())) == request


def test_the_deadline_is_arrival_plus_ttft_objective():
    assert make_request().deadline_s == 100.25


@pytest.mark.parametrize(
    "output",
    [
        TokenOutput(1, 5, None, -0.5),
        TokenOutput(1, 5, FinishReason.STOP, -0.5, [Logprob(5, -0.5, 1), Logprob(6, -2.0, 2)]),
        TokenOutput(1, finish_reason=FinishReason.CANCELLED, num_preemptions=3, token_s=12.5),
        TokenOutput(1, None, FinishReason.ERROR, None, [], "INTERNAL", "broke", 1, 2.0),
        TokenOutput(1, 5, prefill=PrefillTiming(10.0, 0.25, 0.2, 64, blocking_s=0.003)),
        TokenOutput(1, 5, prefill=PrefillTiming(10.0, 0.25, 0.2, 0)),
        TokenOutput(1, None, FinishReason.ERROR, error_code="A", reject_reason="queue_full"),
    ],
)
def test_an_output_survives_the_wire(output):
    assert TokenOutput.from_wire(through_msgpack(output.to_wire())) == output


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e9, 86_400.1])
@pytest.mark.parametrize("field", ["ttft", "tbt"])
def test_an_objective_out_of_range_names_field_value_and_limit(field, bad):
    objectives = {"ttft_s": 1.0, "tbt_s": 1.0, f"{field}_s": bad}
    with pytest.raises(InvalidParameterError) as error:
        SLO(**objectives)
    assert error.value.field == f"{field}_slo_ms"
    assert repr(bad * 1000) in str(error.value)
    assert "<= 86400000" in str(error.value)


def test_the_largest_and_smallest_objectives_are_accepted():
    assert SLO(86_400.0, 1e-6) == SLO(86_400.0, 1e-6)
