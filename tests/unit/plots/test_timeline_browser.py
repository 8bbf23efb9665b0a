"""The timeline page in a real browser: it draws, obeys mouse and keys, and says what is there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from flowprefill.bench.plots.timeline_page import write_timeline_page
from flowprefill.timeline import DeviceRun, RequestSpan, SliceGroup, Timeline
from tests.browser import CONTROL_KEY, Browser, browse

EVIL = "</script><b>'\"&"
DOCUMENT = RequestSpan(
    1, "document", 8000, 9.5, 11.4, 40.0, "paper", 11.8, "finished", 1024, 12
)  # fmt: skip
CHAT = RequestSpan(2, "chat", 50, 10.6, 10.9, 10.85, EVIL, 11.8, "finished", 0, 9)
WAITING = RequestSpan(3, "chat", 60, 11.5, math.inf, 12.5)
CANCELLED = RequestSpan(4, "", 70, 11.0, math.inf, 12.0, "gone", 11.2, "CANCELLED")


def groups(start_s: float, end_s: float) -> list[SliceGroup]:
    """Ten of each operator."""
    step_s = (end_s - start_s) / 30
    names = ("qkv", "attention", "mlp")
    return [
        SliceGroup(names[i % 3], start_s + i * step_s, start_s + (i + 1) * step_s, step_s / 4)
        for i in range(30)
    ]


SMALL = Timeline(
    10.0,
    12.0,
    {"policy": "goodput"},
    [
        DeviceRun(1, (1,), 10.1, 10.7, False, groups(10.1, 10.7)),
        DeviceRun(2, (2,), 10.7, 10.9, True, groups(10.7, 10.9)),
        DeviceRun(1, (1,), 10.9, 11.4, True, groups(10.9, 11.4)),
        *[DeviceRun(None, (1, 2), 11.4 + i / 50, 11.415 + i / 50, True) for i in range(20)],
    ],
    [WAITING, CHAT, DOCUMENT, CANCELLED],
    "asked",
)


def in_browser(
    path: Path,
    timeline: Timeline,
    scenario: Callable[[Browser], Awaitable[None]],
    scheme: str = "light",
) -> None:
    """Draw it, play the scenario, and check that nothing went wrong and nothing was loaded."""

    async def play() -> None:
        async with browse(path, scheme) as browser:
            await scenario(browser)
            assert browser.errors == []
            assert await browser.evaluate("document.body.dataset.error") is None
            assert browser.loaded == [path.as_uri()]

    write_timeline_page(path, "smollm2", timeline)
    asyncio.run(play())


async def seen(browser: Browser) -> tuple[float, float]:
    return tuple(await browser.evaluate("[view.from, view.to]"))


async def place_of(browser: Browser, lane: int, time_us: float) -> tuple[float, float]:
    """Where a lane is at that time, in pixels of the window; lane -1: the device."""
    left, top = await browser.evaluate(
        "(({left, top}) => [left, top])(canvas.getBoundingClientRect())"
    )
    x = await browser.evaluate(f"x({time_us})")
    y = await browser.evaluate("AXIS + DEVICE / 2" if lane < 0 else f"TOP + ({lane} + 0.5) * LANE")
    return left + x, top + y


async def tip_at(browser: Browser, lane: int, time_us: float) -> list[str]:
    await browser.mouse("mouseMoved", *await place_of(browser, lane, time_us))
    return await browser.evaluate("[...tip.children].map((row) => row.textContent)")


def test_it_says_what_there_is(tmp_path: Path) -> None:
    async def scenario(browser: Browser) -> None:
        headline = await browser.evaluate("document.querySelector('header').innerText")
        assert "smollm2, 2.00 s" in headline
        assert "ended early" in headline
        assert "4 requests" in headline
        assert "2 with a first token, 1 of those on time" in headline
        assert "3 stretches of prefill, 1 preemptions" in headline and "20 decode" in headline
        assert "policy goodput" in headline
        assert await browser.evaluate("document.body.dataset.lanes") == "4"
        for words in ("prefill, chat", "zoomed in: qkv, attention, mlp", "deadline", "preempted"):
            assert words in headline

    in_browser(tmp_path / "page.html", SMALL, scenario)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_bars_bands_and_marks_are_drawn_where_they_belong(tmp_path: Path, scheme: str) -> None:
    async def scenario(browser: Browser) -> None:
        async def color(lane: int, time_us: float, below: int = 0) -> list[int]:
            left, top = await browser.evaluate(
                "(({left, top}) => [left, top])(canvas.getBoundingClientRect())"
            )
            x, y = await place_of(browser, lane, time_us)
            return await browser.evaluate(
                f"[...pen.getImageData({round(x - left)}, {round(y - top) + below}, 1, 1).data]"
            )

        async def named(expression: str) -> list[int]:
            await browser.evaluate(f"pen.fillStyle = {expression}; pen.fillRect(0, 0, 1, 1)")
            return await browser.evaluate("[...pen.getImageData(0, 0, 1, 1).data]")

        assert int(await browser.evaluate("document.body.dataset.bars")) >= 25
        places = {
            "colors['time-band']": (0, 50_000),
            "colors['late-band']": (1, 650_000),
            "colors['none-band']": (3, 1_750_000),
            "colors.decode": (0, 1_510_000),
            "colors.back": (0, 1_990_000),
        }
        for expression, place in places.items():
            assert await color(*place) == await named(expression), expression
        assert len({tuple(await named(expression)) for expression in places}) == len(places)
        assert await color(-1, 50_000) == await named("colors.back")  # idle
        shades = [await named(f"colors.shade(2, {group})") for group in range(3)]
        assert await color(-1, 310_000, 8) in shades
        assert await color(0, 310_000, 6) in shades

    in_browser(tmp_path / "page.html", SMALL, scenario, scheme)


def test_tooltips_tell_of_runs_and_requests_and_show_texts_as_they_are(tmp_path: Path) -> None:
    async def scenario(browser: Browser) -> None:
        tip = await tip_at(browser, 0, 300_000)
        assert tip[0] == "prefill of #1: 600 ms"
        assert tip[1].endswith("20.0 ms, 4 slices of 5.0 ms")
        assert "left for another prefill" in tip
        assert "prompt of 8000 tokens, 1024 of them cached" in tip
        assert "first token after 1.90 s" in tip and "objective 30.5 s: on time" in tip
        assert "preempted once" in tip
        tip = await tip_at(browser, 1, 650_000)
        assert tip[0] == f"request #2 {EVIL}, chat"
        assert "objective 250 ms: late" in tip
        assert (await tip_at(browser, -1, 1_405_000))[0] == "decode step of 2: 15.0 ms"
        await tip_at(browser, -1, 50_000)  # idle
        assert await browser.evaluate("tip.style.display") == "none"
        tip = await tip_at(browser, 2, 1_900_000)
        assert tip[0] == "request #4 gone, no class" and "CANCELLED at 1.200 s" in tip
        assert await browser.evaluate("document.querySelectorAll('b').length") == 0

    in_browser(tmp_path / "page.html", SMALL, scenario)


def test_mouse_and_keys_zoom_and_pan(tmp_path: Path) -> None:
    async def scenario(browser: Browser) -> None:
        assert await seen(browser) == (0, 2_000_000)
        x, y = await place_of(browser, 0, 500_000)
        wheel = {"deltaX": 0, "deltaY": -300}
        await browser.mouse("mouseWheel", x, y, modifiers=CONTROL_KEY, **wheel)
        await browser.wait_for("view.to - view.from < 1_000_000")
        from_us, to_us = await seen(browser)
        assert from_us < 500_000 < to_us
        assert (await place_of(browser, 0, 500_000))[0] == pytest.approx(x, abs=2)
        # the mouse drags what it holds along
        await browser.mouse("mousePressed", x, y, button="left", clickCount=1)
        await browser.mouse("mouseMoved", x + 100, y, button="left", buttons=1)
        await browser.mouse("mouseReleased", x + 100, y, button="left", clickCount=1)
        assert (await place_of(browser, 0, 500_000))[0] == pytest.approx(x + 100, abs=2)
        before = await seen(browser)
        await browser.press("ArrowRight")
        after = await seen(browser)
        assert after[0] > before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0])
        await browser.press("+")
        assert (await seen(browser))[1] - (await seen(browser))[0] < after[1] - after[0]
        await browser.press("0")
        assert await seen(browser) == (0, 2_000_000)
        x, y = await place_of(browser, 1, 700_000)
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                await browser.mouse(kind, x, y, button="left", clickCount=count)
        from_us, to_us = await seen(browser)
        assert 500_000 < from_us < 600_000 and 900_000 < to_us < 1_000_000

    in_browser(tmp_path / "page.html", SMALL, scenario)


def many(num_requests: int, num_runs: int) -> Timeline:
    """Prefills one after the other with decode steps of 16 in between."""
    spans, runs = [], []
    step_s = 60.0 / num_runs
    for i in range(num_runs):
        start_s, req_id = i * step_s, i * num_requests // num_runs
        if i % 2:
            ids = tuple(range(max(0, req_id - 15), req_id + 1))
            runs.append(DeviceRun(None, ids, start_s, start_s + step_s, True))
        else:
            end_s = start_s + step_s
            runs.append(DeviceRun(req_id, (req_id,), start_s, end_s, True, groups(start_s, end_s)))
    for i in range(num_requests):
        arrival_s = i * 60.0 / num_requests
        spans.append(RequestSpan(i, "chat", 50, arrival_s, arrival_s + 0.1, arrival_s + 0.2))
    return Timeline(0.0, 60.0, {}, runs, spans, "time")


def test_a_long_recording_is_drawn_at_once_and_scrolls(tmp_path: Path) -> None:
    async def scenario(browser: Browser) -> None:
        assert await browser.evaluate("document.body.dataset.requests") == "500"
        lanes = int(await browser.evaluate("document.body.dataset.lanes"))
        assert 10 < lanes < 100  # those that are seen
        x, y = await place_of(browser, 3, 1000)
        await browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=100_000)
        await browser.wait_for("scroller.scrollTop > 400 * LANE")
        assert (await tip_at(browser, 3, 1000))[0].startswith("request #4")
        drawn_ms = await browser.evaluate(
            "(() => { const from = performance.now(); draw(); return performance.now() - from })()"
        )
        assert drawn_ms < 500  # a few; the machine may be busy

    in_browser(tmp_path / "page.html", many(500, 10_000), scenario)
