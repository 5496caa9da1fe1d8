"""The random key of a choice: the published SplitMix64 stream, and nothing shared between neighbours."""

from __future__ import annotations

from octavo.sampling_params import choice_key


def test_it_is_the_published_splitmix64_stream() -> None:
    assert [choice_key(1234567, index) for index in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_keys_are_unsigned_64_bit_and_distinct() -> None:
    keys = {choice_key(seed, index) for seed in range(-50, 50) for index in range(16)}
    assert len(keys) == 100 * 16
    assert all(0 <= key < 2**64 for key in keys)


def test_a_negative_seed_counts_modulo_2_to_the_64() -> None:
    assert choice_key(-1, 3) == choice_key(2**64 - 1, 3)
