"""One set of workers for all tests of this folder: each imports Transformers."""

from __future__ import annotations

import pytest

from tests.media.cases import make_files, make_preprocessor


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def preprocessor(files):
    pytest.importorskip("PIL")
    return make_preprocessor(files)
