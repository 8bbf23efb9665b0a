import dataclasses
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowprefill.errors import FlowPrefillError, InvalidParameterError, UnsupportedFeatureError
from flowprefill.sampling_params import UNSUPPORTED_FEATURES, SamplingParams

VOCAB = 100


def parse(**values):
    return SamplingParams.from_mapping(values, vocab_size=VOCAB)


def test_nothing_asked_gives_vllms_defaults():
    params = parse()
    assert params == SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_k) == (16, 1.0, 0)


@pytest.mark.parametrize("key", [f.name for f in dataclasses.fields(SamplingParams)])
def test_null_means_the_default(key):
    assert parse(**{key: None}) == SamplingParams()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_tokens", "20", 20),
        ("max_tokens", 20.0, 20),
        ("max_tokens", "20.0", 20),
        ("max_tokens", " 20 ", 20),
        ("max_tokens", "2e1", 20),
        ("top_k", "-1", 0),
        ("top_k", -1, 0),
        ("temperature", "0.5", 0.5),
        ("temperature", 0, 0.0),
        ("temperature", "0", 0.0),
        ("temperature", 1e-30, 0.01),
        ("temperature", 0.009, 0.01),
        ("temperature", 0.01, 0.01),
        ("temperature", 100, 100.0),
        ("top_p", ".9", 0.9),
        ("top_p", 1, 1.0),
        ("min_p", "1e-2", 0.01),
        ("seed", -1, None),
        ("seed", -2, -2),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("seed", -(2**63), -(2**63)),
        ("logprobs", 0, 0),
        ("logprobs", "20", 20),
        ("ignore_eos", "false", False),
        ("ignore_eos", "True", True),
        ("ignore_eos", "1", True),
        ("ignore_eos", 1, True),
        ("skip_special_tokens", "0", False),
        ("include_stop_str_in_output", True, True),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", '["a", "b"]', ("a", "b")),
        ("stop", "[1]", ("[1]",)),
        ("stop", "[", ("[",)),
        ("stop", "null", ("null",)),
        ("stop", [], ()),
        ("stop", "x" * 1024, ("x" * 1024,)),
        ("stop_token_ids", [1, "2", 3.0], (1, 2, 3)),
        ("stop_token_ids", "[0, 99]", (0, 99)),
        ("logit_bias", {"5": 1, 6: "-2.5"}, {5: 1.0, 6: -2.5}),
        ("logit_bias", '{"5": -100}', {5: -100.0}),
        ("repetition_penalty", "1.1", 1.1),
        ("presence_penalty", -2, -2.0),
    ],
)
def test_a_value_is_read_as_its_field_means_it(key, value, expected):
    parsed = getattr(parse(**{key: value}), key)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        ("max_tokens", 0, "an integer in [1, 2147483647]"),
        ("max_tokens", 20.5, "an integer in [1, 2147483647]"),
        ("max_tokens", "20.5", "an integer"),
        ("max_tokens", True, "an integer"),
        ("max_tokens", "many", "an integer"),
        ("max_tokens", "1_0", "an integer"),
        ("max_tokens", "٣", "an integer"),
        ("max_tokens", "9" * 100_000, "an integer"),
        ("max_tokens", 2**31, "2147483647]"),
        ("max_tokens", math.inf, "an integer"),
        ("max_tokens", [5], "an integer"),
        ("min_tokens", -1, "[0, "),
        ("min_tokens", 17, "at most max_tokens=16"),
        ("temperature", -0.1, "a number in [0, 100]"),
        ("temperature", 1e6, "a number in [0, 100]"),
        ("temperature", math.nan, "a number in [0, 100]"),
        ("temperature", "nan", "a number in [0, 100]"),
        ("temperature", "inf", "a number in [0, 100]"),
        ("temperature", 10**400, "a number in [0, 100]"),
        ("temperature", "", "a number"),
        ("temperature", False, "a number"),
        ("top_p", 0, "a number in (0, 1]"),
        ("top_p", 1.5, "a number in (0, 1]"),
        ("top_p", -1, "a number in (0, 1]"),
        ("top_k", -5, "an integer in [-1, 2147483647]"),
        ("top_k", 2**31, "an integer in [-1, 2147483647]"),
        ("min_p", 2, "a number in [0, 1]"),
        ("seed", 2**63, "an integer in [-9223372036854775808, 9223372036854775807]"),
        ("seed", 1e300, "an integer in"),
        ("presence_penalty", 2.1, "a number in [-2, 2]"),
        ("frequency_penalty", -2.1, "a number in [-2, 2]"),
        ("repetition_penalty", 0, "a number in [0.01, 100]"),
        ("repetition_penalty", -1, "a number in [0.01, 100]"),
        ("logprobs", 21, "an integer in [0, 20]"),
        ("logprobs", -1, "an integer in [0, 20]"),
        ("logprobs", True, "an integer in [0, 20]"),
        ("ignore_eos", "yes", "true or false"),
        ("ignore_eos", 2, "true or false"),
        ("ignore_eos", 0.0, "true or false"),
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", [1], "strings"),
        ("stop", {"a": 1}, "strings"),
        ("stop", 5, "strings"),
        ("stop", ["x"] * 33, "at most 32"),
        ("stop", "x" * 1025, "at most 1024 characters"),
        ("stop", "\ud800", "Unicode"),
        ("stop_token_ids", [100], "an integer in [0, 99]"),
        ("stop_token_ids", [-1], "an integer in [0, "),
        ("stop_token_ids", [True], "an integer"),
        ("stop_token_ids", 5, "a list of ids"),
        ("stop_token_ids", "1,2", "a list of ids"),
        ("stop_token_ids", list(range(100)) * 11, "at most 1024"),
        ("logit_bias", {"100": 1}, "an integer in [0, 99]"),
        ("logit_bias", {"-1": 1}, "an integer in [0, "),
        ("logit_bias", {"the": 1}, "an integer in"),
        ("logit_bias", {"5": 100.5}, "a number in [-100, 100]"),
        ("logit_bias", {"5": None}, "a number in [-100, 100]"),
        ("logit_bias", '{"5": NaN}', "a number in [-100, 100]"),
        ("logit_bias", [5], "a map from token ids to numbers"),
        ("logit_bias", "[" * 100_000, "a map from token ids to numbers"),
    ],
)
def test_a_bad_value_names_field_value_and_limit(key, value, limit):
    with pytest.raises(InvalidParameterError) as error:
        parse(**{key: value})
    message = str(error.value)
    assert message.startswith(key)
    assert error.value.field.startswith(key)
    assert limit in message
    assert len(message) < 300


def test_the_message_shows_what_the_client_sent():
    with pytest.raises(InvalidParameterError, match=r"^top_p='1.5': must be a number in \(0, 1\]$"):
        parse(top_p="1.5")


def test_too_many_biases_are_refused():
    bias = {i: 0.0 for i in range(1025)}
    with pytest.raises(InvalidParameterError, match="at most 1024 token ids"):
        SamplingParams.from_mapping({"logit_bias": bias}, vocab_size=5000)


def test_token_ids_are_checked_against_the_vocabulary():
    params = SamplingParams(stop_token_ids=(99,), logit_bias={99: 1.0})
    params.check_vocab(100)
    with pytest.raises(InvalidParameterError, match=r"stop_token_ids=99: .* in \[0, 98\]"):
        params.check_vocab(99)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_tokens", "5"), ("temperature", "0.5"), ("stop", ["a"]), ("ignore_eos", 1)],
)
def test_direct_construction_takes_no_text(key, value):
    with pytest.raises(InvalidParameterError, match=f"^{key}="):
        SamplingParams(**{key: value})


def test_an_unknown_key_is_named_with_the_nearest_known_one():
    with pytest.raises(InvalidParameterError) as error:
        parse(temprature=0.5)
    assert error.value.field == "'temprature'"
    assert "'temprature'=0.5" in str(error.value)
    assert "did you mean temperature?" in str(error.value)


def test_an_unknown_key_without_a_near_one_is_named_alone():
    with pytest.raises(InvalidParameterError, match=r"no such parameter$"):
        parse(zzz=1)


def test_a_huge_unknown_key_gives_a_short_message():
    with pytest.raises(InvalidParameterError) as error:
        parse(**{"k" * 100_000: "v" * 100_000})
    assert len(str(error.value)) < 300


def test_a_huge_unsupported_value_gives_a_short_message():
    with pytest.raises(UnsupportedFeatureError) as error:
        parse(guided_decoding="v" * 100_000)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "values",
    [
        {"\ud800": 1},
        {"stop": "\ud800"},
        {"guided_decoding": "\ud800"},
        {"seed": "\ud800"},
        {"logit_bias": {"\ud800": 1}},
        {"logit_bias": {" " * 100_000 + "5": "\ud800"}},
    ],
)
def test_whatever_a_client_sends_the_message_is_short_and_can_be_sent_back(values):
    with pytest.raises(FlowPrefillError) as error:
        parse(**values)
    assert len(str(error.value).encode()) < 400


def test_unknown_keys_are_passed_over_where_asked():
    values = {"temperature": "0", "priority": 3, "binary_data_output": False}
    params = SamplingParams.from_mapping(values, vocab_size=VOCAB, ignore_unknown=True)
    assert params == SamplingParams(temperature=0.0)


def test_known_keys_are_still_checked_where_unknown_ones_are_passed_over():
    with pytest.raises(InvalidParameterError, match="temperature"):
        SamplingParams.from_mapping({"temperature": -1}, vocab_size=VOCAB, ignore_unknown=True)
    with pytest.raises(UnsupportedFeatureError, match="n=2"):
        SamplingParams.from_mapping({"n": 2}, vocab_size=VOCAB, ignore_unknown=True)


@pytest.mark.parametrize("values", [[1], "text", None, 5])
def test_only_a_map_holds_parameters(values):
    with pytest.raises(InvalidParameterError, match=r"sampling_parameters=.*a JSON object"):
        SamplingParams.from_mapping(values, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 2),
        ("n", "2"),
        ("n", 0),
        ("n", True),
        ("best_of", 3),
        ("use_beam_search", True),
        ("use_beam_search", "true"),
        ("length_penalty", 0.8),
        ("early_stopping", "never"),
        ("prompt_logprobs", 0),
        ("bad_words", ["x"]),
        ("guided_decoding", {"json": {}}),
        ("structured_outputs", '{"regex": "a"}'),
        ("logits_processors", ["f"]),
        ("truncate_prompt_tokens", 10),
        ("allowed_token_ids", [1]),
        ("detokenize", "false"),
        ("spaces_between_special_tokens", 0),
        ("output_kind", 1),
        ("extra_args", {"a": 1}),
        ("lora_name", "tune"),
    ],
)
def test_an_unsupported_feature_is_refused_by_name(key, value):
    with pytest.raises(UnsupportedFeatureError, match=f"^{key}=") as error:
        parse(**{key: value})
    assert error.value.field == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, None) for key in UNSUPPORTED_FEATURES),
        *((key, value) for key, values in UNSUPPORTED_FEATURES.items() for value in values),
        *(
            (key, json.dumps(v))
            for key, values in UNSUPPORTED_FEATURES.items()
            for v in values
            if v
        ),
        ("n", "1"),
        ("n", 1.0),
        ("use_beam_search", "False"),
        ("length_penalty", 1),
        ("bad_words", "[]"),
    ],
)
def test_an_unsupported_feature_that_asks_for_nothing_is_accepted(key, value):
    assert parse(**{key: value}) == SamplingParams()


TEXTS = st.text(alphabet='01.-eE"[]{}:, atrufls\ud800\u0663', max_size=12)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
KEYS = [f.name for f in dataclasses.fields(SamplingParams)] + list(UNSUPPORTED_FEATURES)


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=6))
def test_any_json_is_either_refused_by_our_errors_or_survives_the_wire(values):
    try:
        params = SamplingParams.from_mapping(values, vocab_size=VOCAB)
    except FlowPrefillError as error:
        assert error.code in ("INVALID_ARG", "UNSUPPORTED")
        return
    assert SamplingParams.from_wire(params.to_wire()) == params
