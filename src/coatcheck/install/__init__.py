"""Entries in the configuration of MCP clients: what to write, shown before it is written, and taken back again.

Configurations belong to people: they are edited as text, so that comments, order and formatting stay. Every edit is
parsed again and compared with what was meant before anything is written.
"""
