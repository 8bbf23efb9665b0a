"""Load test of a FlowPrefill model: users who chat, search, and send documents.

    locust -f clients/loadtest/locustfile.py --host localhost:8001

README.md beside this file says what options and figures mean.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, ClassVar

import gevent
from attainment import Answer
from locust import User, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import Runner
from reporting import SloReport, options
from shapes import SHAPES
from traffic import CHAT, CLASSES, DOCUMENT, SEARCH, Generation, Source, TrafficClass
from transports import Transport, check_host, connect, with_code

from flowprefill_client import ServerError


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """Our options, of the command line and of the web UI's start form."""
    parser.add_argument("--model", default="smollm2", help="Name of the model, default smollm2")
    parser.add_argument(
        "--slo-scale", type=float, default=1.0, help="Factor on all objectives, default 1"
    )
    parser.add_argument(
        "--prompt-scale", type=float, default=1.0, help="Factor on prompt lengths, default 1"
    )
    parser.add_argument(
        "--no-slo-class",
        action="store_true",
        help="Send objectives only; for models without the classes chat and document",
    )
    parser.add_argument(
        "--seed", default="", help="The same seed sends the same prompts; default: new ones"
    )
    parser.add_argument(
        "--shape",
        choices=["", *SHAPES],
        default="",
        include_in_web_ui=False,  # there it is chosen by --class-picker
        help="Load shape up to -u users in the time -t; default: -u users all the time",
    )


@events.init.add_listener
def set_up(environment: Environment, runner: Runner, **_: Any) -> None:
    """Once per process."""
    try:
        check_host(environment.host or "")
    except ValueError as error:
        raise SystemExit(str(error)) from None
    GenerateUser.report = SloReport(environment, CLASSES)
    shapes = {name: shape() for name, shape in SHAPES.items()}
    for shape in shapes.values():
        shape.runner = runner
    environment.available_shape_classes = {**shapes}
    environment.shape_class = shapes.get(options(environment).shape)


class GenerateUser(User):
    """Asks, reads the answer token by token, thinks, and asks again."""

    abstract = True
    host = "localhost:8001"
    traffic: ClassVar[TrafficClass]
    report: ClassVar[SloReport]
    _serials: ClassVar[itertools.count[int]] = itertools.count()

    def on_start(self) -> None:
        """Connect, and start this user's own sequence of prompts."""
        chosen = options(self.environment)
        worker = getattr(self.environment.runner, "worker_index", 0)
        seed = f"{chosen.seed}/{worker}/{next(self._serials)}" if chosen.seed else None
        self._source = Source(self.traffic, seed, chosen.prompt_scale)
        self._transport: Transport = connect(str(self.host), chosen.model)

    def on_stop(self) -> None:
        """Disconnect."""
        self._transport.close()

    @task
    def generate(self) -> None:
        """One request and its answer."""
        request = self._next_request()
        answer = Answer(sent_s=time.perf_counter())
        num_bytes = 0
        try:
            for part in self._transport.parts(request):
                if part.num_tokens:
                    answer.token_s.append(time.perf_counter())
                num_bytes += part.num_bytes
        except ServerError as error:
            answer.error = with_code(error)
        except gevent.GreenletExit:  # the test ends, or this user's part in it
            self.report.scoreboard.cut_off(self.traffic, answer, time.perf_counter())
            raise
        self._record(answer, num_bytes)

    def _next_request(self) -> Generation:
        prompt, max_tokens = self._source.draw()
        return Generation(
            prompt,
            max_tokens,
            self.traffic.objective.scaled(self.report.scoreboard.slo_scale),
            None if options(self.environment).no_slo_class else self.traffic.slo_class,
        )

    def _record(self, answer: Answer, num_bytes: int) -> None:
        """Into locust's statistics and ours."""
        self.report.finished(self.traffic, self._transport.protocol, answer)
        self.environment.events.request.fire(
            request_type=self._transport.protocol,
            name=self.traffic.name,
            response_time=1000 * (time.perf_counter() - answer.sent_s),
            response_length=num_bytes,
            exception=answer.error,
            context=self.context(),
        )


class Chat(GenerateUser):
    """Short questions that are answered at once."""

    traffic = CHAT
    weight = 3
    wait_time = between(0.5, 2)


class Search(GenerateUser):
    """Questions with some pages of search results."""

    traffic = SEARCH
    weight = 2
    wait_time = between(1, 4)


class Document(GenerateUser):
    """Long documents, which may take half a minute."""

    traffic = DOCUMENT
    weight = 1
    wait_time = between(2, 8)
