"""The linear whose inputs and weight are both float8."""
