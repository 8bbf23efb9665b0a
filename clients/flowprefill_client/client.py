"""The blocking client. Safe to use from several threads: they share one connection."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from flowprefill_client.answer import Completion, Delta, Exchange
from flowprefill_client.errors import ServerError
from flowprefill_client.messages import (
    CHANNEL_OPTIONS,
    CONTROL_TIMEOUT_S,
    Prompt,
    cancel_request,
    generate_request,
    parse_control_response,
    parse_timeline_part,
    state_request,
    stats_request,
    timeline_request,
)


class Stream(Exchange):
    """One answer in the making: an iterator of Delta.

    As a context manager it cancels the request when the block is left before the answer is whole.
    """

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """The next part. Ends quietly after cancel(); raises ServerError if the server failed."""
        try:
            message = next(self._call)
        except StopIteration:
            self._recorder.check_complete()
            raise
        except grpc.RpcError as error:
            if self._is_cancelled:
                raise StopIteration from None
            raise ServerError.from_rpc(error) from None
        try:
            return self._recorder.add(message)
        except ServerError:
            # The stream's end is on its way. tritonserver 2.51 leaks a response, and with it holds
            # the model, when a stream is cancelled between its last response and its end.
            self._is_over = True
            with contextlib.suppress(grpc.RpcError):
                for _ in self._call:
                    pass
            raise

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


class Client:
    """Talks to one FlowPrefill model over gRPC.

    Every request has its own gRPC stream, because Triton drops all requests of a stream when one is
    cancelled; all streams share one connection.
    """

    def __init__(self, url: str = "localhost:8001", model: str = "smollm2") -> None:
        """`url` is host:port of tritonserver's gRPC endpoint. Connects at the first request."""
        self._model = model
        self._channel = grpc.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 16,
        ttft_slo_ms: float | None = None,
        tbt_slo_ms: float | None = None,
        slo_class: str | None = None,
        tenant: str | None = None,
        request_id: str | None = None,
        return_timing: bool = False,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """Send `prompt`, a text, token ids, or chat messages; returns at once.

        max_tokens: longest answer, tokens; None = the model's default, which is 16 behind a text or
            ids, and what its context leaves behind messages
        ttft_slo_ms, tbt_slo_ms: objectives for the first token and for the gaps after it; None =
            those of slo_class, or the model's defaults
        slo_class: one of the model's classes of traffic
        tenant: who is charged for the tokens, where the model divides its device among tenants
        request_id: the id for cancel(); a random one by default
        return_timing: the server's own times are wanted, see Completion.timing
        sampling: further sampling parameters under vLLM's names, lists and dicts included
        timeout_s: the request is cancelled after this time, and iterating raises ServerError
        """
        request_id = request_id or str(uuid.uuid4())
        values = {"max_tokens": max_tokens, **(sampling or {})}
        parameters = {
            "ttft_slo_ms": ttft_slo_ms,
            "tbt_slo_ms": tbt_slo_ms,
            "slo_class": slo_class,
            "tenant": tenant,
            "return_timing": return_timing or None,
        }
        request = generate_request(self._model, prompt, request_id, values, parameters)
        return Stream(self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s), request_id)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 16,
        ttft_slo_ms: float | None = None,
        tbt_slo_ms: float | None = None,
        slo_class: str | None = None,
        tenant: str | None = None,
        request_id: str | None = None,
        return_timing: bool = False,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """Send `prompt` and wait for the whole answer; arguments and errors as of stream()."""
        with self.stream(
            prompt,
            max_tokens=max_tokens,
            ttft_slo_ms=ttft_slo_ms,
            tbt_slo_ms=tbt_slo_ms,
            slo_class=slo_class,
            tenant=tenant,
            request_id=request_id,
            return_timing=return_timing,
            sampling=sampling,
            timeout_s=timeout_s,
        ) as stream:
            for _ in stream:
                pass
        return stream.completion()

    def cancel(self, request_id: str) -> bool:
        """Cancel the latest live request with this id, whoever sent it. False if there is none."""
        return self._control(cancel_request(self._model, request_id)) == "cancelled"

    def engine_stats(self) -> dict[str, Any]:
        """Gauges and counters of the model's engine: the fields of EngineStats."""
        stats: dict[str, Any] = json.loads(self._control(stats_request(self._model)))
        return stats

    def engine_state(self) -> str:
        """starting, ready, restarting, failed (for good) or closed. Answered at once."""
        return self._control(state_request(self._model))

    def record_timeline(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Record what the model's engine does, 60 s at most; returns at once.

        Parts come twice a second; `gather` of flowprefill.timeline puts them together. The first
        one, which is empty, comes when the recording has begun. Raises ServerError where a part
        should be and is none, for one while another recording runs.
        """
        request = timeline_request(self._model, seconds)
        timeout_s = seconds + CONTROL_TIMEOUT_S
        return _timeline_parts(self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s))

    def end_timeline(self) -> bool:
        """End the recording that runs, whoever asked for it: its last part is sent. False if none
        runs."""
        return self._control(timeline_request(self._model, 0.0)) == "ended"

    def close(self) -> None:
        """Cancel what still runs and close the connection."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _control(self, request: Any) -> str:
        call = self._stub.ModelStreamInfer(iter([request]), timeout=CONTROL_TIMEOUT_S)
        try:
            return parse_control_response(list(call))
        except grpc.RpcError as error:
            raise ServerError.from_rpc(error) from None


def _timeline_parts(call: Any) -> Iterator[dict[str, Any]]:
    try:
        for message in call:
            yield parse_timeline_part(message)
    except grpc.RpcError as error:
        raise ServerError.from_rpc(error) from None
