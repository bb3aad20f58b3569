"""What the processes of a run ask each other for: the signal to stop for, or a save, at the same step in all."""

import signal

from tpu_train.checkpoint import SAVE
from tpu_train.stopping import Stop


class Channel:
    """Agreement among Stops in this process: what one round asked for is told to all in the next."""

    def __init__(self):
        self.asked, self.told = [], 0

    def ask(self, value):
        self.asked.append(value)
        return self.told

    def next_round(self):
        self.asked, self.told = [], max(self.asked)


def test_a_save_that_one_process_asks_for_stops_none_and_a_signal_stops_all():
    channel = Channel()
    first, second = (Stop(agreement=channel, seconds=9.0) for _ in range(2))
    heard = []
    for step in range(5):
        second.signal = signal.SIGTERM if step == 2 else second.signal
        heard.append((first.ask(SAVE if step in (1, 2) else 0), second.ask(0), first.agreed, second.agreed))
        channel.next_round()
    assert heard[:3] == [(0, 0, None, None), (0, 0, None, None), (SAVE, SAVE, None, None)]
    assert heard[3:] == [(signal.SIGTERM,) * 4] * 2
    assert first.deadline is not None


def test_one_process_alone_needs_no_agreement():
    stop = Stop()
    assert [stop.ask(0), stop.ask(SAVE), stop.agreed] == [0, SAVE, None]
    stop.signal = signal.SIGINT
    assert [stop.ask(SAVE), stop.agreed] == [signal.SIGINT, signal.SIGINT]
