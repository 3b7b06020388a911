"""A process that has imported what Ray's workers need, and forks one for each connection to its socket.

Ray reads its variables, such as the number of its raylet's process, when it is imported, so the first server imports
everything but Ray, and forks a server for each set of them, which imports Ray too.
"""

import argparse
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

LIBRARIES = (
    "aiohttp", "gymnasium", "numpy", "pandas", "pyarrow.fs", "scipy.sparse", "torch",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
ON_RAY = (
    "ray.rllib.algorithms.algorithm", "ray.train.torch", "rllib_srl.learner.learner", "rllib_srl.replay.rllib",
    "rllib_srl.rollout.env_runner",
)  # fmt: skip


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the client's request and its standard input, output and error."""
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    size, said = int.from_bytes(head, "big"), b""
    while len(said) < size:
        said += connection.recv(size - len(said))
    return json.loads(said), files


def import_all(names: tuple[str, ...]) -> None:
    """Import these modules, and leave them out of all further garbage collections."""
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def import_on_ray(names: tuple[str, ...]) -> None:
    """Import modules that define actors, without a draw from Ray's generator of ids.

    The generator is seeded at its first draw, and Ray draws an id for each class of actors. Processes that are forked
    afterwards would draw the same ids: of two that start at the same time one dies as it puts the first object into
    the store of the other, and `ray.init` waits for it forever.
    """
    import ray.actor

    usual = ray.actor.ActorClassID

    class FromTheSystem(usual):  # type: ignore[misc, valid-type]
        @classmethod
        def from_random(cls) -> Any:
            return usual(os.urandom(usual.size()))

    ray.actor.ActorClassID = FromTheSystem
    try:
        import_all(names)
    finally:
        ray.actor.ActorClassID = usual


def use(environment: dict[str, str]) -> None:
    """Take over the environment of the client."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None


def follow_python_path() -> None:
    """Look for modules where a new process would."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]


def become_worker(request: dict[str, Any], files: list[int]) -> None:
    """Do what Ray's `setup_worker.py` does, and run the script that it would execute."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray.core.generated.common_pb2 import Language

    os.setpgid(0, 0)  # the raylet kills the process groups of its workers
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    use(request["environment"])
    os.chdir(request["directory"])
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    known, rest = parser.parse_known_args(request["arguments"])
    context = RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}")
    if context.command_prefix or context.py_executable != sys.executable or known.language != "PYTHON":
        context.exec_worker(rest, Language.Value(known.language))
    update_envs(context.env_vars)
    follow_python_path()
    script, *sys.argv[1:] = rest
    sys.argv[0], sys.path[0:0] = script, [os.path.dirname(script)]
    runpy.run_path(script, run_name="__main__")


def serve(path: str, raylet: int | None, asked: socket.socket | None = None) -> None:
    """Fork for every connection until standard input or the raylet ends; close `asked` when this can begin."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen(64)
        if asked is None:
            print("ready", flush=True)
        else:
            asked.close()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets workers that end
        while raylet is None or Path(f"/proc/{raylet}").exists():
            ready, _, _ = select.select([listening, sys.stdin], [], [], 2.0)
            if sys.stdin in ready:
                return
            if not ready:
                continue
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                answer(connection)
                return
            connection.close()


def answer(connection: socket.socket) -> None:
    """Be the server or the worker that was asked for. The end of `connection` tells the client of this process's."""
    request, files = received(connection)
    if "serve" not in request:
        become_worker(request, files)
        return
    for file in files:
        os.close(file)
    use(request["environment"])
    follow_python_path()
    import_on_ray((*ON_RAY, *filter(None, os.environ.get("QUICK_WORKERS_IMPORTS", "").split(","))))
    raylet = int(os.environ["RAY_RAYLET_PID"])
    Path(request["serve"]).unlink(missing_ok=True)
    serve(request["serve"], raylet, connection)


if __name__ == "__main__":
    sys.path[0:1] = [str(Path(__file__).resolve().parents[2])]
    import_all(LIBRARIES)
    serve(sys.argv[1], None)
    sys.stdout.flush()
    os._exit(0)  # without the messages of libraries that are being unloaded
