"""outages.py: what is called again, for how long, and when not."""

import threading
import time

import pytest

from common import board, messages, outages
from common.errors import Away, BadInput, TryAgain
from common.outages import patient, working


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in {"FIRST_PAUSE": 0.01, "LONGEST_PAUSE": 0.02, "OUTAGE": 0.3, "_said": float("-inf")}.items():
        monkeypatch.setattr(outages, name, value)


def failing(times, error):
    """A patient function that fails some times; it returns how often it was called."""
    calls = []

    @patient
    def function():
        calls.append(None)
        if len(calls) <= times:
            raise error
        return len(calls)

    return function, calls


AWAY = Away("s3://b/x?secret_key=abc does not answer (503): try again later or check the address")


def test_a_run_that_works_waits_and_says_so_once(monkeypatch):
    said = []
    monkeypatch.setattr(messages, "_listeners", [said.append])
    function, _ = failing(5, AWAY)
    with working():
        assert function() == 6
        with working():  # as in a script that trains in its own process
            pass
        assert failing(1, AWAY)[0]() == 2
    assert said == ["waiting for up to 0.005 minutes: s3://b/x?secret_key=*** does not answer (503)"]


def test_one_that_checks_its_input_does_not_wait():
    function, calls = failing(1, AWAY)
    with pytest.raises(Away):
        function()
    assert len(calls) == 1


def test_it_gives_up_in_the_end_and_where_waiting_does_not_help():
    function, calls = failing(1000, AWAY)
    began = time.monotonic()
    with working(), pytest.raises(TryAgain, match="does not answer"):
        function()
    assert len(calls) > 5 and 0.2 < time.monotonic() - began < 2
    for error in (BadInput("no such bucket"), TryAgain("in use by another run")):
        function, calls = failing(1, error)
        with working(), pytest.raises(type(error)):
            function()
        assert len(calls) == 1


def test_nested_calls_do_not_add_up():
    inner, _ = failing(1000, AWAY)
    began = time.monotonic()
    with working(), pytest.raises(Away):
        patient(inner)()
    assert time.monotonic() - began < 1


def test_a_run_that_shall_stop_does_not_wait_on(monkeypatch):
    monkeypatch.setattr(outages, "OUTAGE", 60)
    monkeypatch.setattr(board, "_current", board.Board())
    threading.Timer(0.2, board.current().ask_to_stop).start()
    began = time.monotonic()
    with working(), pytest.raises(Away):
        failing(10**6, AWAY)[0]()
    assert time.monotonic() - began < 5
