from typing import Any

class _DriverConfig:
    active: Any

driver: _DriverConfig
