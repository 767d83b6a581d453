"""Entries in the configuration of MCP clients: planned, shown, written and undone.

Configuration files belong to people. They are edited as text, so comments, order and formatting
stay. Every edit is parsed again and compared with the intended values before anything is written.
"""
