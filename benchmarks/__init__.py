"""Benchmarks: our times next to the floor, in one run on the same disk. README.md explains
the rows."""
