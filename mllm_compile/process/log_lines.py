"""The lines of a process' log: as text for people, or as JSON for what collects logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")


def start_log(level: int, format: str, text: str) -> None:
    """Writes log records to standard error.

    Args:
        format: one of FORMATS.
        text: the layout of a line of text.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else logging.Formatter(text))
    logging.basicConfig(handlers=[handler], level=level)


class JsonFormatter(logging.Formatter):
    """Makes a record one line with a JSON object, to which its `fields` are added (`extra={"fields": {…}}`)."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
