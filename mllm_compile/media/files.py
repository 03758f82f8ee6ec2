"""The files of a model's folder that its processor is made of."""

from __future__ import annotations

CONFIG_FILE = "config.json"
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
