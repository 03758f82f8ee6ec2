import subprocess

from mllm_compile.process import child_python
from tests.hang_guard import HANG_S


def test_a_users_file_does_not_stand_in_for_a_module_of_python(tmp_path, monkeypatch):
    (tmp_path / "queue.py").write_text("raise SystemExit('the file of the user')")
    (tmp_path / "of_the_user.py").write_text("import queue\nprint(queue.Queue.__module__)")
    monkeypatch.syspath_prepend(tmp_path)  # as where a script is there

    done = subprocess.run(
        child_python.command("of_the_user"),
        env=child_python.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )

    assert done.stdout == "queue\n", done.stderr


def test_a_module_is_not_looked_for_in_the_current_folder(tmp_path):
    (tmp_path / "of_a_model.py").write_text("print('it ran')")

    done = subprocess.run(
        child_python.command("of_a_model"),
        env=child_python.environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )

    assert done.stdout == "" and "No module named of_a_model" in done.stderr
