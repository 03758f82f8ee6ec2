"""The lines of a process' log: as text for people, or as JSON for what collects logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(message)s"


def start_log(level: int, format: str, model: str = "", text: str = _TEXT) -> None:
    """Writes log records to standard error.

    Args:
        format: one of FORMATS.
        model: its name is in each line, where a server has several.
        text: the layout of a line of text.
    """
    handler = logging.StreamHandler()
    named = f"[{model.replace('%', '%%')}] {text}" if model else text
    handler.setFormatter(JsonFormatter(model) if format == "json" else logging.Formatter(named))
    logging.basicConfig(handlers=[handler], level=level)


class JsonFormatter(logging.Formatter):
    """Makes a record one line with a JSON object, to which its `fields` are added (`extra={"fields": {…}}`).

    Args:
        model: as of start_log.
    """

    def __init__(self, model: str = "") -> None:
        super().__init__()
        self._model = {"model": model} if model else {}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._model,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
