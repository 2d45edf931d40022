"""What a person sees of a run."""

from dataclasses import replace

import pytest

from maskconnect.training import progress as show
from maskconnect.training.progress import Bar, Lines, Progress, duration

NOW = Progress(
    phase="phase 1/4, learning",
    epoch=3,
    epochs=30,
    step=60,
    steps=600,
    loss=1.2345,
    accuracy=56.78,
    images_per_second=1234.5,
    seconds_left=95.0,
)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1:00"), (200, "3:20"), (7500, "2:05:00"), (90061, "25:01:01")],
)
def test_times_are_said_as_people_say_them(seconds, said):
    assert duration(seconds) == said


def test_progress_has_phase_epoch_loss_accuracy_speed_and_the_time_left():
    said = "phase 1/4, learning: epoch 3/30  loss 1.234  train  56.8 %  1,234 images/s  1:35 left"
    assert NOW.text() == said


def test_plain_lines_come_now_and_then(capsys, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(show.time, "monotonic", lambda: clock)
    lines = Lines()
    for clock in (1.0, 9.0, 11.0, 12.0, 22.0):  # noqa: B007 (the clock reads it)
        lines.progress(NOW)
    lines.line("the end")
    assert capsys.readouterr().out.splitlines() == [NOW.text(), NOW.text(), "the end"]


def test_a_terminal_gets_a_bar_and_others_lines(monkeypatch):
    assert isinstance(show.usual(), Lines)
    monkeypatch.setattr(show.sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(show.usual(), Bar)


def test_a_bar_shows_lines_above_it(capsys):
    with Bar() as bar:
        bar.progress(NOW)
        bar.line("a line [with brackets]")
    assert "a line [with brackets]" in capsys.readouterr().out


def test_data_that_do_not_keep_up_are_mentioned():
    assert "waiting" not in NOW.text()
    assert "1,234 images/s (31 % of the time waiting for data)  1:35 left" in replace(NOW, waiting_for_data=31.4).text()
