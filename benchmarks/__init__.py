"""The project's own measurements: README.md says what is where.

kernels/, steps/ and server/ hold scripts that measure one thing each. guard/ compares the speed of two trees, and
figures/ makes the tables of the pages.
"""
