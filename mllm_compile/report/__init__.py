"""`mllm-compile inspect RUNTIME --html`: one self-contained page about a runtime. page.py puts it together."""
