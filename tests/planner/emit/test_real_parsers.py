"""Every target and every launcher: its real parser takes random plans, dense and mixtures of experts, and reads them as planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from judges import JUDGES, KINDS, Ask, judged

from planner.emit.core import LAUNCHERS, TARGETS


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[str, Ask]]:
    """Judges that are open, by name: a parser is imported once."""
    with ExitStack() as stack:
        made = _Opened(stack)
        yield made


class _Opened(dict[str, Ask]):
    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self.stack = stack

    def __missing__(self, name: str) -> Ask:
        self[name] = self.stack.enter_context(JUDGES[name]())
        return self[name]


def complaints(name: str, kind: str, count: int, seed: int, opened: dict[str, Ask]) -> list[str]:
    found = list(judged(name, kind, count, seed, opened[name]))
    assert len(found) == count
    return [f"{plan}: {', '.join(said)}" for plan, said in found if said]


def test_every_target_and_launcher_has_a_judge() -> None:
    assert set(JUDGES) == {*TARGETS, *LAUNCHERS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", JUDGES)
def test_twenty_random_plans_are_taken_as_planned(name: str, kind: str, opened: dict[str, Ask]) -> None:
    assert complaints(name, kind, 20, 1, opened) == []


@pytest.mark.verify
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", JUDGES)
def test_two_hundred_random_plans_are_taken_as_planned(name: str, kind: str, opened: dict[str, Ask]) -> None:
    assert complaints(name, kind, 200, 11, opened) == []
