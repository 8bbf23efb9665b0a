"""How far a rank may run: the shared word, and what messages say of runs that were left."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

import pytest

from flowprefill.parallel.errors import RankError
from flowprefill.parallel.following import _Run
from flowprefill.parallel.stop_word import MAX_BOUNDARY, StopAt, StopWord
from flowprefill.wire import Kind, Message

WAIT_S = 30.0


@pytest.fixture
def word() -> Iterator[StopWord]:
    word = StopWord.create()
    yield word
    word.close()


class Rank:
    """One rank in run 5."""

    def __init__(self, word: StopWord, boundary: int = 0) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.forgotten: list[tuple[Kind, int]] = []
        self.run = _Run(5, word, self.messages, lambda *what: self.forgotten.append(what))
        self.run.boundary = boundary

    def ask(self) -> tuple[threading.Thread, list[bool]]:
        """may_go_on in a thread, which may have to wait."""
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(self.run.may_go_on()))
        thread.start()
        return thread, answers


def test_what_is_published_is_read_through_another_descriptor(word: StopWord) -> None:
    assert word.read() == StopAt(0, 0)
    other = StopWord(os.dup(word.fd))
    for stop in (StopAt(1, 0), StopAt(7, MAX_BOUNDARY), StopAt((1 << 40) - 1, 3)):
        word.publish(*stop)
        assert other.read() == stop
    other.close()


def test_it_has_no_name_in_a_file_system(word: StopWord) -> None:
    assert os.readlink(f"/proc/self/fd/{word.fd}").startswith("/memfd:")


def test_a_rank_goes_on_to_what_is_published(word: StopWord) -> None:
    word.publish(5, 3)
    assert Rank(word, 2).run.may_go_on()


def test_it_waits_at_that_boundary_until_a_further_one_is_published(word: StopWord) -> None:
    word.publish(5, 2)
    thread, answers = Rank(word, 2).ask()
    thread.join(0.05)
    assert thread.is_alive() and not answers
    word.publish(5, 3)
    thread.join(WAIT_S)
    assert answers == [True]


def test_it_leaves_the_run_there_when_rank_0_has_left_it(word: StopWord) -> None:
    word.publish(5, 2)
    rank = Rank(word, 2)
    rank.messages.put((Kind.FORGET_TABLE, 9))  # what else may come meanwhile
    rank.messages.put((Kind.LEFT, [5, 2]))
    assert not rank.run.may_go_on()
    assert rank.forgotten == [(Kind.FORGET_TABLE, 9)]


def test_it_waits_for_the_word_of_its_run(word: StopWord) -> None:
    word.publish(4, 9)  # of the run before
    thread, answers = Rank(word).ask()
    thread.join(0.05)
    assert thread.is_alive() and not answers
    word.publish(5, 1)
    thread.join(WAIT_S)
    assert answers == [True]


def test_behind_a_run_that_was_left_it_catches_up_and_leaves_it_at_the_same_place(
    word: StopWord,
) -> None:
    word.publish(6, 1)  # rank 0 is in its next run
    rank = Rank(word, 2)
    rank.messages.put((Kind.LEFT, [5, 3]))
    assert rank.run.may_go_on()
    rank.run.boundary += 1
    assert not rank.run.may_go_on()


def test_a_rank_past_what_is_published_is_lost(word: StopWord) -> None:
    word.publish(5, 2)
    message = "too late: at boundary 3 of run 5, which must be left at boundary 2"
    with pytest.raises(RankError, match=message):
        Rank(word, 3).run.may_go_on()


def test_a_rank_past_where_the_run_was_left_is_lost(word: StopWord) -> None:
    word.publish(6, 1)
    rank = Rank(word, 3)
    rank.messages.put((Kind.LEFT, [5, 2]))
    with pytest.raises(RankError, match="must be left at boundary 2"):
        rank.run.may_go_on()


def test_when_the_next_run_begins_without_a_word_of_this_one_this_pass_is_done(
    word: StopWord,
) -> None:
    word.publish(6, 1)
    rank = Rank(word, 2)
    rank.messages.put((Kind.RUN, [6, 3, None]))
    for _ in range(3):  # to its end, however far that is
        assert rank.run.may_go_on()
        rank.run.boundary += 1
    assert rank.run.next_run == [6, 3, None]
