"""How files are read and written safely. Knows no model."""
