"""Chances of drafts, learnt from rounds."""

import numpy as np
import pytest

from specflow.schedulers.acceptance import AcceptanceBook


def feed(book: AcceptanceBook, name: str, chances: list[float], rounds: int, asked: int, seed: int = 0) -> None:
    """Rounds whose draft i is accepted with chance chances[i] if those before it were."""
    draws = np.random.default_rng(seed)
    for _ in range(rounds):
        accepted = 0
        while accepted < asked and draws.random() < chances[accepted]:
            accepted += 1
        book.add(name, asked, asked, accepted)


def test_the_prior_holds_until_something_is_known() -> None:
    book = AcceptanceBook(3, prior=0.8, forgetting=0.95)
    assert book.survival("a") == pytest.approx([0.8, 0.64, 0.512])
    assert book.fill("a") == 1.0


def test_the_chances_of_every_position_are_found() -> None:
    book = AcceptanceBook(3, prior=0.8, forgetting=0.99)
    feed(book, "a", [0.9, 0.5, 0.7], 3000, asked=3)
    assert 1 - np.array(book.hazards) == pytest.approx([0.9, 0.5, 0.7], abs=0.06)
    assert book.survival("a") == pytest.approx(np.cumprod([0.9, 0.5, 0.7]), abs=0.08)


def test_a_request_departs_from_the_method_and_a_new_one_begins_with_it() -> None:
    book = AcceptanceBook(2, prior=0.8, forgetting=0.95)
    for turn in range(150):
        feed(book, "good", [1.0, 1.0], 1, asked=2, seed=turn)
        feed(book, "bad", [0.1, 0.1], 1, asked=2, seed=turn)
    good, bad, new = (book.survival(name)[0] for name in ("good", "bad", "new"))
    assert good > new + 0.1
    assert bad < new - 0.1
    assert bad < new < good
    book.forget("bad")
    assert book.survival("bad")[0] == new


def test_old_rounds_are_forgotten() -> None:
    book = AcceptanceBook(2, prior=0.5, forgetting=0.9)
    feed(book, "a", [0.0, 0.0], 500, asked=2)
    assert book.survival("a")[0] < 0.1
    feed(book, "a", [1.0, 1.0], 60, asked=2)
    assert book.survival("a")[0] > 0.55


def test_steps_without_drafts_let_a_bad_request_be_tried_again() -> None:
    book = AcceptanceBook(2, prior=0.8, forgetting=0.9)
    feed(book, "good", [0.9, 0.9], 300, asked=2)
    feed(book, "bad", [0.0, 0.0], 20, asked=2)
    before = book.survival("bad")[0]
    for _ in range(200):
        book.add("bad", 0, 0, 0)
    assert before < book.survival("bad")[0] == pytest.approx(1 - book.hazards[0], abs=0.01)


def test_drafts_that_were_not_made_are_no_failures() -> None:
    """Of ten rounds one finds two drafts, both accepted: they are sure, and a tenth of what was asked for is made."""
    book = AcceptanceBook(2, prior=0.8, forgetting=0.999)
    for turn in range(1000):
        found = 2 if turn % 10 == 0 else 0
        book.add("a", 2, found, found)
    assert book.survival("a")[0] > 0.95
    assert book.fill("a") == pytest.approx(0.1, abs=0.02)
