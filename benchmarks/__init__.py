"""Benchmarks: our times next to the floor, in one run on the same disk. docs/benchmarks.md explains
the rows."""
