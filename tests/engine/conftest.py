"""An engine over a fake model. Every test ends with all pages back."""

import pytest

from tests.engine.cases import until
from tests.fakes import ROOM_FOR_ENDLESS, FakeStepRunner, all_pages_are_back, fake_engine


@pytest.fixture
def runner():
    return FakeStepRunner()


@pytest.fixture
def engine(runner):
    yield from running(runner)


@pytest.fixture
def roomy_engine(runner):
    yield from running(runner, **ROOM_FOR_ENDLESS)


def running(runner, **changes):
    with fake_engine(runner, **changes) as engine:
        yield engine
        runner.gate.set()
        if engine.is_alive:
            until(lambda: all_pages_are_back(engine))
