"""MCP: a server for the store, and a proxy that slims any other server. Needs the extra `[mcp]`."""
