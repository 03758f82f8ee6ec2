"""``python -m mllm_compile``: the command line where nothing is installed."""

from mllm_compile.cli import main

if __name__ == "__main__":
    main()
