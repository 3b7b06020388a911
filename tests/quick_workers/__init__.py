"""Ray's workers start by a fork of a process that has imported what they need: most of a small run is imports.

Each process of a run imports Ray, torch, RLlib and transformers, for five seconds and more of processor time. Ray
starts a worker by `python setup_worker.py default_worker.py ...`. `quick_workers` puts `client.py` in place of
`setup_worker.py`; it asks `server.py` for a fork, which goes on with Ray's own `default_worker.py`. All else is Ray's.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLACE = "QUICK_WORKERS"  # "off", or the directory of the server, for processes that are started meanwhile
IMPORTS = "QUICK_WORKERS_IMPORTS"  # where Ray starts: further modules of its workers, separated by commas
VLLM = "vllm.v1.engine.llm_engine,rllib_srl.engine.vllm_transfer"  # 15 s of processor time


@contextmanager
def quick_workers() -> Iterator[None]:
    """Let every Ray that starts in this process fork its workers, until the end of the context.

    Processes that are started meanwhile use the same server, if they open such a context too.
    """
    if os.environ.get(PLACE) == "off":
        yield
        return
    from ray._private import ray_constants

    usual = ray_constants.SETUP_WORKER_FILENAME
    with _server() as directory:
        ray_constants.SETUP_WORKER_FILENAME = f"{directory}/client.py"  # joined to a folder: an absolute path stays
        try:
            yield
        finally:
            ray_constants.SETUP_WORKER_FILENAME = usual


@contextmanager
def _server() -> Iterator[str]:
    if PLACE in os.environ:
        yield os.environ[PLACE]
        return
    with tempfile.TemporaryDirectory(prefix="workers") as directory:
        (Path(directory) / "client.py").write_text((HERE / "client.py").read_text())
        command = [sys.executable, str(HERE / "server.py"), f"{directory}/base"]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n", "the server of forks did not start"
            os.environ[PLACE] = directory
            yield directory
        finally:
            os.environ.pop(PLACE, None)
            server.communicate()  # the end of its input ends it and what it forked to serve
