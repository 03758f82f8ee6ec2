"""The project's own measurements: guard/ compares the speed of two trees, figures/ makes the tables of the pages."""
