"""Three servers behind HAProxy: calls are spread, a server may stop or die, the rest goes on."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowprefill_client import Client, Completion, ServerError
from tests.e2e.cluster import NUM_SERVERS, Cluster
from tests.e2e.conftest import MODEL, wait_for
from tests.system_tools import system_tool

NUMBERS = range(1, NUM_SERVERS + 1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    haproxy = system_tool("haproxy", "haproxy")
    with Cluster(haproxy, tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    """One channel to HAProxy, shared by all calls."""
    with Client(f"127.0.0.1:{cluster.grpc_port}", MODEL) as connected:
        yield connected


def ask(client: Client, number: int, num_tokens: int = 12) -> Completion | ServerError:
    """An answer or the error that came instead; a hang becomes an error that says so."""
    sampling = {"ignore_eos": True, "temperature": 0}
    try:
        return client.generate(
            f"Once upon a time, {number}", max_tokens=num_tokens, sampling=sampling, timeout_s=60
        )
    except ServerError as error:
        return error


def num_running(cluster: Cluster) -> int:
    return sum(map(cluster.num_running, cluster.alive()))


def errors(outcomes: list[Completion | ServerError]) -> list[ServerError]:
    return [outcome for outcome in outcomes if isinstance(outcome, ServerError)]


def test_calls_go_to_the_server_with_the_fewest_and_end_there_when_cancelled(
    cluster: Cluster, client: Client
) -> None:
    before = [cluster.stats(number)["num_cancelled"] for number in NUMBERS]
    endless = {"ignore_eos": True, "temperature": 0}
    streams = [
        client.stream("Once upon a time", max_tokens=900, sampling=endless) for _ in range(9)
    ]
    wait_for(
        lambda: [cluster.num_running(number) for number in NUMBERS] == [3, 3, 3],
        what="three of nine calls at each server",
    )
    for stream in streams:
        stream.cancel()
    wait_for(lambda: num_running(cluster) == 0, what="the cancellations at the servers")
    after = [cluster.stats(number)["num_cancelled"] for number in NUMBERS]
    assert [now - then for now, then in zip(after, before, strict=True)] == [3, 3, 3]


def test_http_goes_through_too(cluster: Cluster) -> None:
    body = {"text_input": "Hello", "max_tokens": 3, "temperature": 0}
    url = f"http://127.0.0.1:{cluster.http_port}/v2/models/{MODEL}/generate"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=30) as reply:
        assert json.load(reply)["text_output"]


def test_haproxy_has_metrics_of_its_own(cluster: Cluster) -> None:
    with urllib.request.urlopen(f"{cluster.stats_url}/metrics", timeout=5) as reply:
        page = reply.read().decode()
    assert 'haproxy_backend_active_servers{proxy="grpc_servers"} 3' in page
    down = 'haproxy_server_status{proxy="grpc_servers",server="server-1",state="DOWN"} 0'
    assert down in page  # an alert asks for it


def test_a_drained_server_stops_without_one_failed_call(cluster: Cluster, client: Client) -> None:
    """As docs/deploy.md says: no new calls, wait until HAProxy counts none that run, stop."""
    with ThreadPoolExecutor(6) as pool:
        goes_on = threading.Event()
        goes_on.set()

        def keep_asking(number: int) -> list[Completion | ServerError]:
            outcomes = []
            while goes_on.is_set():
                outcomes.append(ask(client, number))
            return outcomes

        load = [pool.submit(keep_asking, number) for number in range(6)]
        wait_for(lambda: cluster.num_running(3), what="a request at server 3")
        assert cluster.num_passed_on(3) > 0
        cluster.admin("set server grpc_servers/server-3 state drain")
        wait_for(lambda: not cluster.num_passed_on(3), 60, "all at server 3 are answered")
        assert cluster.num_running(3) == 0
        is_clean = cluster.servers[2].stop()
        cluster.wait_state(3, "DOWN")
        goes_on.clear()
        outcomes = [outcome for future in load for outcome in future.result()]
    assert is_clean
    assert errors(outcomes) == []
    assert len(outcomes) >= 6


def test_a_server_killed_under_load_takes_only_its_own_calls_with_it(
    cluster: Cluster, client: Client
) -> None:
    with ThreadPoolExecutor(36) as pool:
        # Long enough that all of them are at the servers together.
        futures = [pool.submit(ask, client, number, 60) for number in range(24)]
        wait_for(lambda: num_running(cluster) == 24, what="24 requests at the servers")
        lost = cluster.num_running(2)
        cluster.kill(2)
        # While HAProxy may not yet have noticed: a refused connection leads to another server.
        later = [pool.submit(ask, client, number) for number in range(12)]
        outcomes = [future.result() for future in futures]
        later_outcomes = [future.result() for future in later]
    assert 0 < len(errors(outcomes)) <= lost
    # UNKNOWN: HAProxy ended a stream in the middle of its answer, without the closing status.
    assert {error.status for error in errors(outcomes)} <= {"UNAVAILABLE", "UNKNOWN"}
    assert errors(later_outcomes) == []
    answers = [outcome for outcome in outcomes if isinstance(outcome, Completion)]
    assert {answer.num_output_tokens for answer in answers} == {60}
    cluster.wait_state(2, "DOWN")


def test_with_no_server_left_a_call_fails_at_once(cluster: Cluster, client: Client) -> None:
    for number in cluster.alive():
        cluster.kill(number)
        cluster.wait_state(number, "DOWN")
    failure = ask(client, 1)
    assert isinstance(failure, ServerError) and failure.status == "UNAVAILABLE"
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{cluster.stats_url}/ready", timeout=5)
