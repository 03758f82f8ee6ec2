"""Documents do not rot: links lead somewhere, files that are named exist, switches are keys that a config takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from mllm_compile import EngineConfig
from mllm_compile.cli import make_app
from tests.rules.figure_tables import COMMIT

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for folder in ("docs", "examples", "configs", "benchmarks") for path in (ROOT / folder).rglob("*.md")),
]
SOURCES = {
    path.name
    for folder in ("mllm_compile", "passes", "runtime", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*")
}


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path):
    for target, anchor in links_of(path):
        if "://" not in target:
            assert (path.parent / target).exists(), target
            assert not anchor or anchor in anchors_of(path.parent / target if target else path), anchor


def links_of(path: Path) -> list[tuple[str, str]]:
    """(file, anchor) of each link; either may be empty."""
    prose = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose)


def anchors_of(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_document_is_linked_from_the_readme_or_a_document_that_is():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        targets = ((path.parent / target).resolve() for path in new for target, _ in links_of(path) if target)
        new = {target for target in targets if target.suffix == ".md"} - reached
    assert not {path.name for path in set(DOCUMENTS) - reached}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_files_that_are_named_exist(path):
    for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8")):
        example = name.rpartition("/")[2].removeprefix("test_").startswith("my_")
        assert example or name.rpartition("/")[2] in SOURCES or (ROOT / name).is_file(), name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(path):
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text(encoding="utf-8")):
        assert re.search(rf"^(async )?def {name}\(", text_of(file), re.MULTILINE), f"{file} has no {name}"


def test_scripts_that_are_named_exist():
    """Also in commands, comments and docstrings."""
    folders = ("mllm_compile", "passes", "runtime", "examples", "benchmarks", "tests")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for path in [*DOCUMENTS, *sources, ROOT / "Makefile"]:
        text = path.read_text(encoding="utf-8")
        modules = re.findall(r"python\s+-m\s+(benchmarks\.\w+\.\w+)", text)
        names = re.findall(r"(?:examples|benchmarks)/[\w/]+\.py", text)
        for name in [*names, *(module.replace(".", "/") + ".py" for module in modules)]:
            is_named = re.search(r"/(test|my)_|^examples/measure/", name) is None
            assert not is_named or (ROOT / name).is_file(), f"{path} names {name}; is it in another folder?"


def test_the_scripts_former_folder_is_named_beside_a_commit_alone():
    """A command of before they moved ran at a commit; one that a reader should run has the folder of now."""
    for path in DOCUMENTS:
        if not path.is_relative_to(ROOT / "docs" / "lab"):
            for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
                is_of_now = "examples/measure/" in paragraph and not COMMIT.search(paragraph)
                assert not is_of_now, f"{path}: scripts are in benchmarks/ now; give that, or the commit: {paragraph}"


def test_the_picture_of_floors_has_every_room():
    picture = text_of("docs/architecture.md").partition("## The order of imports")[2].split("```")[1]
    rooms = {room for package in ("mllm_compile", "runtime") for room in (ROOT / package).iterdir() if room.is_dir()}
    named = {room.name for room in rooms if not room.is_symlink() and (room / "__init__.py").is_file()}
    assert len(named) > 25
    assert not named - set(re.findall(r"\w+", picture))


def test_documents_that_messages_name_exist():
    for path in (ROOT / "mllm_compile").rglob("*.py"):
        for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / name).is_file(), f"{path} names {name}"


def test_each_switch_of_the_debugging_table_is_a_config():
    first_table = text_of("docs/debugging.md").partition("## Look inside")[0]
    switches = re.findall(r"`(\w+: \{.*?\})`", first_table)
    assert len(switches) >= 10
    for switch in switches:
        sections = yaml.safe_load(switch)
        EngineConfig.from_dict(sections | {"model": {"path": "m"} | sections.get("model", {})})


def test_each_command_of_the_readme_is_one():
    commands = {command.name for command in make_app().registered_commands}
    commands |= {group.name for group in make_app().registered_groups}
    named = set(re.findall(r"^mllm-compile (\w+) ", text_of("README.md"), re.MULTILINE))
    assert named <= commands
    assert {"generate", "inspect"} <= named


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_that_is_shown_takes_likely_tokens_as_the_embedded_model_draws_nonsense(path):
    for code in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
        for params in re.findall(r"SamplingParams\(([^)]*)\)", code):
            assert "temperature=0" in params


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_are_shown_do_so_too(path):
    for command in re.findall(
        r"^mllm-compile generate configs/tiny.*$", path.read_text(encoding="utf-8"), re.MULTILINE
    ):
        assert "--temperature 0" in command


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_are_written_with_options_that_they_have(path):
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"mllm-compile ([^`\n|]+)", text):
        words = line.partition(" #")[0].split()
        command = typer.main.get_command(make_app())
        if words[0] not in command.commands and "." in words[0]:
            words.insert(0, "compile")
        while words and hasattr(command, "commands") and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_the_readme_and_the_page_of_models_agree():
    page = text_of("docs/models.md")
    counts = re.search(r"\*\*Of (\d+): (\d+) served right\*\* .*?, (\d+) served in bfloat16 alone, (\d+) refused", page)
    version = re.search(r"Transformers (\d+\.\d+)\.\d+, torch", page)
    assert counts is not None and version is not None
    total, served, in_bfloat16, refused = counts.groups()
    in_bfloat16 = f", {in_bfloat16} in bfloat16 alone" if int(in_bfloat16) else ""
    readme = " ".join(text_of("README.md").split())
    assert f"Of the {total} causal-LM architectures of Transformers {version[1]}, " in readme
    assert f"{served} were served right{in_bfloat16} and {refused} refused" in readme


def test_make_has_every_target_that_is_named():
    targets = set(re.findall(r"^([\w-]+):", text_of("Makefile"), re.MULTILINE))
    for path in DOCUMENTS:
        named = set(re.findall(r"^make ([\w-]+)|`make ([\w-]+)`", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert {target for pair in named for target in pair if target} <= targets, path.name


def test_make_says_what_takes_minutes_before_it_begins():
    lines = text_of("Makefile").splitlines()
    install = next(i for i, line in enumerate(lines) if "$(PIP_INSTALL) $(TORCH)" in line)
    assert lines[install - 1].startswith("\t@echo") and "installing torch" in lines[install - 1]


def test_the_readme_has_the_makefiles_torch_for_a_cpu():
    choices = [re.search(r"TORCH='.*/whl/cpu'", text_of(name)) for name in ("README.md", "Makefile")]
    assert None not in choices
    assert len({choice[0] for choice in choices}) == 1


def test_no_file_holds_the_marks_of_a_merge():
    mark = re.compile(rb"^(<{7}|>{7}) ", re.MULTILINE)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert not [name for name in files if (ROOT / name).is_file() and mark.search((ROOT / name).read_bytes())]
