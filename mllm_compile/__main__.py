"""The command line's entry: ``mllm-compile``, and ``python -m mllm_compile`` where nothing is installed."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        from mllm_compile.process.no_gc import imports_unseen

        with imports_unseen():
            from mllm_compile.cli import main as run_command
    except KeyboardInterrupt:  # the imports take a second, and more on a busy machine
        print("mllm-compile: interrupted", file=sys.stderr)
        sys.exit(130)  # EXIT_INTERRUPTED, which is not there yet
    run_command()


if __name__ == "__main__":
    main()
