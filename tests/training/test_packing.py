"""Packs: every document once an epoch, none cut, and nothing that depends on what was asked for before."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from specflow.training.packing import Packs

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(lengths=LENGTHS, seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_every_document_once_and_no_pack_overflows(lengths: list[int], seed: int, epoch: int) -> None:
    packs = Packs(lengths, 50, seed).epoch(epoch)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in pack) <= 50 for pack in packs)


@given(lengths=LENGTHS, seed=st.integers(0, 2**31), numbers=st.lists(st.integers(0, 80), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_pack_is_a_function_of_its_number(lengths: list[int], seed: int, numbers: list[int]) -> None:
    """In whatever order packs are asked for: so any process can begin anywhere."""
    one = Packs(lengths, 50, seed)
    straight = [one[number] for number in range(max(numbers) + 1)]
    other = Packs(lengths, 50, seed)
    for number in numbers:
        assert other[number] == straight[number] == Packs(lengths, 50, seed)[number]


@given(lengths=LENGTHS, seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_packs_of_a_run_are_its_epochs_one_after_the_other(lengths: list[int], seed: int) -> None:
    packs = Packs(lengths, 50, seed)
    count = packs.count(3)
    run = [packs[number] for number in range(count)]
    assert [pack.documents for pack in run] == [pack for epoch in range(3) for pack in packs.epoch(epoch)]
    assert [pack.epoch for pack in run] == sorted(pack.epoch for pack in run)
    assert packs[count].epoch == 3
    assert packs.count(0.5) <= packs.count(1) < packs.count(1.5) <= packs.count(2)


def test_epochs_and_seeds_differ() -> None:
    lengths = [7] * 40
    packs = Packs(lengths, 50, 0)
    assert packs.epoch(0) != packs.epoch(1)
    assert packs.epoch(0) != Packs(lengths, 50, 1).epoch(0)
    seeds = {packs[number].seed for number in range(30)} | {Packs(lengths, 50, 1)[number].seed for number in range(30)}
    assert len(seeds) == 60


def test_packs_are_well_filled() -> None:
    lengths = [50 + 37 * index % 400 for index in range(500)]
    packs = Packs(lengths, 2048, 0).epoch(0)
    assert sum(lengths) / (len(packs) * 2048) > 0.95


def test_a_document_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 50 tokens"):
        Packs([51], 50, 0)
