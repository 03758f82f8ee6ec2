"""An engine over a fake model. Every test ends with all pages back."""

import pytest

from tests.engine.cases import until
from tests.fakes import FakeStepRunner, all_pages_are_back, fake_engine


@pytest.fixture
def runner():
    return FakeStepRunner()


@pytest.fixture
def engine(runner):
    with fake_engine(runner) as engine:
        yield engine
        runner.gate.set()
        if engine.is_alive:
            until(lambda: all_pages_are_back(engine))
