"""Run an MCP server and pass its messages on, as long as each has at most so many bytes.

    python mcp_relay.py MOST_BYTES COMMAND ...        says on standard error why the server ended

The server ends with this process, and this process with the one that started it, however that ends.
"""

import ctypes
import signal
import subprocess
import sys
import threading
from typing import IO

_PR_SET_PDEATHSIG = 1


def tied() -> None:
    """Let the kernel end this process with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def relay(most: int, server: subprocess.Popen[bytes], out: IO[bytes]) -> str:
    """Pass messages on until the server ends; return the reason."""
    assert server.stdout is not None
    last = [b""]
    (reader := threading.Thread(target=_keep_last, args=(server.stderr, last), daemon=True)).start()
    while line := server.stdout.readline(most + 1):
        if len(line) > most:
            server.kill()
            return f"it sent a message of more than max_bytes = {most}"
        out.write(line)
        out.flush()
    status = server.wait()
    reader.join(5)
    said = last[0].decode("utf-8", "replace").strip().splitlines()
    return f"it ended with status {status}" + (f": {said[-1][:200]}" if said else "")


def _keep_last(stream: object, last: list[bytes]) -> None:
    while part := stream.read1(4096):  # type: ignore[attr-defined]
        last[0] = (last[0] + part)[-4096:]


if __name__ == "__main__":
    tied()
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        server = subprocess.Popen(sys.argv[2:], preexec_fn=tied, **pipes)  # type: ignore[call-overload]
        reason = relay(int(sys.argv[1]), server, sys.stdout.buffer)
    except OSError as error:
        reason = f"it cannot be started: {error}"
    print(reason, file=sys.stderr)
