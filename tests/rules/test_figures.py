"""The figures of the code are counted as their command says."""

from __future__ import annotations

from tests.rules.figures import files_of, row_of

SOURCE = '''"""A module."""

# A comment.


class Thing:
    """A class."""

    def work(self, a, b, *, c=1, d=2, e=3, f=4, g=5, **more):
        """Works.

        Long.
        """
        return a  # not a line of its own


async def wait():
    return 1
'''


def test_what_a_file_has_is_counted(tmp_path):
    (tmp_path / "made" / "inner").mkdir(parents=True)
    (tmp_path / "made" / "__init__.py").write_text("")
    (tmp_path / "made" / "inner" / "thing.py").write_text(SOURCE)
    (tmp_path / "made" / "link").symlink_to(tmp_path / "made" / "inner")
    files = files_of(tmp_path, ["made"])
    (one,) = (file for file in files if file.path.name == "thing.py")
    assert (one.lines, one.blank, one.comments, one.docstrings) == (18, 7, 1, 6)
    assert (one.functions, one.parameters, one.classes) == ((2, 6), (0, 7), 1)
    assert row_of("made/", files) == [
        *("made/", "2", "18", "18 / 9 / 18 / 18", "2", "6 / 4.0 / 6 / 6", "1", "1", "54.5", "9.1", "2, 1", "2"),
    ]
