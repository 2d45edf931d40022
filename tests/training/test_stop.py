"""SIGTERM, Ctrl-C and SIGUSR2."""

import signal
import threading

import pytest

from maskconnect.training import stop
from maskconnect.training.stop import Stopped, StopRequests


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR2, 128 + signal.SIGUSR2)]
)
def test_a_request_is_noted_and_obeyed_when_it_is_looked_at(number, code):
    with StopRequests() as requests:
        requests.check()
        signal.raise_signal(number)
        with pytest.raises(Stopped, match=number.name) as stopped:
            requests.check()
    assert stopped.value.exit_code == code


@pytest.fixture
def interrupted():
    """Ctrl-C as in a terminal, even where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_that_a_library_has_swallowed_while_it_was_loaded_is_not_lost(monkeypatch):
    monkeypatch.setattr(stop, "early_signals", [signal.SIGTERM])
    with StopRequests() as requests, pytest.raises(Stopped, match="SIGTERM"):
        requests.check()


def test_a_second_request_stops_at_once(interrupted):
    with StopRequests() as requests:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert requests.asked == signal.SIGINT


def test_a_batch_system_may_warn_after_a_request_and_again():
    with StopRequests() as requests:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
        assert requests.asked == signal.SIGTERM, "which a job is not queued again after"


def test_handlers_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequests():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_in_another_thread_signals_stay_as_they_are():
    found = []

    def work():
        with StopRequests() as requests:
            found.append(signal.getsignal(signal.SIGINT))
            requests.check()

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]
