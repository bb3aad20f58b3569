"""Documents dealt to rows: once each, evenly, the same from any deal on, and little held for a row far behind."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_train.data.dealing import Deal, Dealer

ROWS = 4


class Sizes:
    """A stream, as far as a dealer sees it."""

    def __init__(self, sizes):
        self._sizes = sizes

    def size(self, n):
        return self._sizes[n % len(self._sizes)]


def dealer(sizes, deal=None, places=None, **more):
    places = places or {row: (0, 0) for row in range(ROWS)}
    return Dealer([Sizes(sizes)], deal or Deal.first(ROWS, 1), places, **more)


def test_the_next_document_goes_to_the_row_with_the_least():
    sizes = np.random.default_rng(0).integers(1, 50, 400).tolist()
    dealt = dealer(sizes)
    loads, after = [0] * ROWS, {}
    for n in range(400):
        row = loads.index(min(loads))
        after.setdefault(row, []).append(n)
        loads[row] += sizes[n]
    for row, documents in after.items():
        assert [dealt.take(row) for _ in documents] == [(0, n) for n in documents]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    taken=st.lists(st.integers(0, 120), min_size=ROWS, max_size=ROWS),
    mine=st.sets(st.integers(0, ROWS - 1), min_size=1),
    fixed_size=st.sampled_from([None, 7]),
)
def test_any_rows_go_on_alone_from_where_they_were(sizes, taken, mine, fixed_size):
    dealt = dealer(sizes, fixed_size=fixed_size)
    for row, count in enumerate(taken):
        for _ in range(count):
            dealt.take(row)
        dealt.deal()
    deal, places = dealt.deal(), {row: dealt.place(row) for row in mine}
    again = dealer(sizes, deal, places, fixed_size=fixed_size)
    assert {row: again.place(row) for row in mine} == places
    for row in mine:
        assert [again.take(row) for _ in range(20)] == [dealt.take(row) for _ in range(20)]


@pytest.mark.parametrize("behind", [3, 300])
def test_a_row_far_behind_can_be_gone_back_to(behind):
    dealt = dealer([5, 1, 9])
    while dealt.place(1)[0] < behind:
        dealt.take(1)
        dealt.take(2)
    deal = dealt.deal()
    assert len(dealt._deals) <= 32
    assert deal.block == 0
    again = dealer([5, 1, 9], deal, {row: dealt.place(row) for row in range(ROWS)})
    for row in range(ROWS):
        assert [again.take(row) for _ in range(10)] == [dealt.take(row) for _ in range(10)]


def test_a_row_in_a_long_document_holds_nothing_up():
    sizes = [10**7, *[10] * 60_000]
    dealt = dealer(sizes)
    first = dealt.take(0)
    for _ in range(5000):
        for row in (1, 2, 3):
            dealt.take(row)
    deal = dealt.deal()
    assert first == (0, 0)
    assert sum(map(len, dealt._cards.values())) < 100
    assert deal.block >= dealt.place(1)[0] - 1 > 300
    assert dealt.place(0)[0] > 300


def test_weights_are_followed_within_a_document():
    shares = [0.5, 0.3, 0.2, 0.0]
    streams = [Sizes(np.random.default_rng(i).integers(1, 40 * (i + 1), 100).tolist()) for i in range(4)]
    dealt = Dealer(streams, Deal.first(ROWS, 4), {0: (0, 0)}, None, lambda tokens: shares)
    for _ in range(200):
        dealt.take(0)
    deal = dealt._deals[-1]
    got = [sum(stream.size(n) for n in range(deal.taken[i])) for i, stream in enumerate(streams)]
    assert got[3] == 0
    for share, tokens in zip(shares, got, strict=True):
        assert abs(tokens - share * sum(got)) < 160
