"""How processes of Python are started."""

import ast

from tests.rules.import_graph import modules


def test_no_process_of_python_takes_modules_from_the_current_folder():
    """Else a `queue.py` there, which may have come with a model, runs in place of Python's own."""
    commands = {}
    for module, path in modules().items():
        if "sys.executable" not in (source := path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.List | ast.Tuple) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                commands[module, node.lineno] = [ast.unparse(part) for part in node.elts]

    assert any(module == "mllm_compile/process/child_python" for module, _ in commands)
    assert {place for place, command in commands.items() if "'-P'" not in command} == set()
