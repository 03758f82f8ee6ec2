"""Processes that the bench starts end with it, and remove their folders first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mllm_compile.bench.measure import child
from mllm_compile.bench.measure.child import run_children
from tests.hang_guard import until

WORK = """
import sys, tempfile, time
from pathlib import Path
from mllm_compile.process.interruption import ended_by_sigterm
with ended_by_sigterm(), tempfile.TemporaryDirectory(dir=sys.argv[1]):
    Path(sys.argv[1], "begun").touch()
    time.sleep(60)
"""


def test_an_interruption_ends_the_child_in_order_and_without_a_word(tmp_path, monkeypatch, capfd):
    class Interrupted(child.ProcessGroup):
        """Ctrl-C while it is waited for, once it works."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                return super().wait(timeout)
            until((tmp_path / "begun").exists)
            raise KeyboardInterrupt

    monkeypatch.setattr(child, "ProcessGroup", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_children([[sys.executable, "-c", WORK, str(tmp_path)]], subprocess.DEVNULL, dict(os.environ))
    assert os.listdir(tmp_path) == ["begun"], "its folder is gone"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_the_codes_of_children_that_end_are_handed_on_in_order(at_once):
    commands = [[sys.executable, "-S", "-c", f"import sys; sys.exit({code})"] for code in (7, 0, 3)]
    assert run_children(commands, subprocess.DEVNULL, dict(os.environ), at_once) == [7, 0, 3]
