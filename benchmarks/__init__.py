"""Our times against the floor's, in one run on the same disk. docs/benchmarks.md explains the rows."""
