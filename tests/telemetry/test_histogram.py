from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.telemetry.counts import FIRST_TOKEN_BUCKETS, LATENCY_BUCKETS, PER_TOKEN_BUCKETS, Histogram, decades

BOUNDS = (1.0, 2.5, 10.0)


@given(st.lists(st.floats(0, 20) | st.sampled_from(BOUNDS)))
def test_buckets_hold_what_is_at_most_their_bound(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    want = [(str(bound), sum(value <= bound for value in values)) for bound in BOUNDS]
    assert histogram.buckets() == [*want, ("+Inf", len(values))]
    assert histogram.count == len(values)
    assert histogram.total == sum(values)


def test_bounds_grow() -> None:
    assert decades(250) == (1, 2, 5, 10, 20, 50, 100, 200)
    for bounds in (LATENCY_BUCKETS, FIRST_TOKEN_BUCKETS, PER_TOKEN_BUCKETS, decades(10**6)):
        assert list(bounds) == sorted(set(bounds))
