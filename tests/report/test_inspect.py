"""`mllm-compile inspect` leaves the graphs of one pipeline in a folder, and a user's files there."""

from __future__ import annotations

from pathlib import Path

import pytest

from mllm_compile.errors import ConfigError
from mllm_compile.report.inspect import inspect_model
from tests.tiny_model import shallow_tiny, tiny_config


def test_a_second_pipeline_leaves_no_graphs_of_the_first_and_no_file_of_the_user(tmp_path):
    folder = tmp_path / "graphs"
    folder.mkdir()
    own = {"01_notes.txt": "# notes", "99_pack_projections.txt": "mine", "notes.txt": "", "02_graph.md": "# graph: "}
    for name, text in own.items():
        (folder / name).write_text(text)
    model = {"path": str(shallow_tiny(tmp_path / "model"))}
    for disabled in ([], ["pack_projections"]):
        compile_keys = {"backend": "eager", "disable_passes": disabled}
        reports = inspect_model(tiny_config(tmp_path, compile=compile_keys, model=model), folder).reports
        stages = ["trace", *(report.name for report in reports)]
        written = {f"{number:02d}_{stage}.txt" for number, stage in enumerate(stages)} | {"program.txt"}
        assert {path.name for path in folder.iterdir()} == written | own.keys()
        assert (folder / "program.txt").read_text().splitlines()[-1].startswith("logits = ")
    assert {name: (folder / name).read_text() for name in own} == own


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that is writable and takes nothing")
def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"/proc/graphs cannot be made \(.+\)\. Give another folder"):
        inspect_model(tiny_config(tmp_path), Path("/proc/graphs"))
