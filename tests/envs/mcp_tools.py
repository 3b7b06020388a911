"""An MCP server, written with the package mcp, whose tools behave as their names say: over stdio, or HTTP on a port."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

app = MCPServer("tools")
count = [0]


@app.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@app.tool()
def fails(text: str) -> str:
    """Fail."""
    raise ToolError(text)


@app.tool()
def counts() -> int:
    """Count the calls of this server."""
    count[0] += 1
    return count[0]


@app.tool()
def long(num: int) -> str:
    """Return a long text."""
    return "x" * num


@app.tool()
def hangs() -> str:
    """Never answer."""
    time.sleep(3600)
    return ""


@app.tool()
def dies() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        app.run("streamable-http", port=int(sys.argv[1]))
    app.run()
