"""A session's messages on disk, holding refs where payloads were: slim on disk, exact on demand."""
