"""The process of a served model: vLLM's server, the gateway before it and training, until a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_srl.algorithm.resources import card_bytes_here
from rllib_srl.cli.serving.card import card_share, dtype_of
from rllib_srl.cli.serving.gateway import Gateway
from rllib_srl.cli.serving.job import CONTEXT, MAX_TOKENS, FileError, Job, KeptDomain, ServedSettings, TrainingSettings
from rllib_srl.cli.serving.served_directory import TOKEN, Running, ServedDirectory
from rllib_srl.cli.serving.serving import Serving
from rllib_srl.cli.serving.trainer import Before, Examiner
from rllib_srl.cli.serving.training import Training
from rllib_srl.cli.serving.translation import SamplingDefaults
from rllib_srl.cli.serving.vllm_server import PLAIN_STOP, VLLMServer
from rllib_srl.cli.shared.access import Access
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model, sizes_of
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.envs.agents.web import Server, listen
from rllib_srl.people.served_store import StoreThread
from rllib_srl.rollout.transcript import make_transcript

if TYPE_CHECKING:
    from rllib_srl.cli.serving.serve import Flags

STOP_TIMEOUT_S = 5.0  # for answers under way at the end


def serve_until_stopped(arguments: argparse.Namespace, flags: Flags, keep: list[KeptDomain]) -> int:
    """Check the model, the directory and the card, then serve until SIGINT or SIGTERM; return the exit status."""
    model_dir = local_model(arguments.model)
    context = min(CONTEXT, sizes_of(model_dir).context or CONTEXT)
    if arguments.max_tokens is not None and not 1 <= arguments.max_tokens < context:
        raise ValueError(f"--max-tokens {arguments.max_tokens}; expected 1 to {context - 1}")
    options: dict[str, Any] = {"model": str(model_dir.absolute()), "rank": flags.rank, "context": context}
    fixed = ServedSettings(**options, temperature=flags.temperature)
    settings = TrainingSettings(**flags.model_dump(include=set(TrainingSettings.model_fields)))
    job = Job(served=fixed, settings=settings, keep=keep)
    Examiner(job)  # its errors, now
    share = card_share(job, card_bytes_here(), bool(flags.train_after))
    job = job.model_copy(update={"served": fixed.model_copy(update={"dtype": dtype_of(share)})})
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("rllib_srl.cli.serving").setLevel(logging.INFO)
    served = ServedDirectory(arguments.out)
    served.fix_settings(job.served)
    with served.locked(), explained(served):
        return asyncio.run(run(arguments, flags, served, job, share))


async def run(arguments: argparse.Namespace, flags: Flags, served: ServedDirectory, job: Job, share: float) -> int:
    """Serve from a locked directory until SIGINT or SIGTERM; vLLM reserves a `share` of the card."""
    fixed, model_dir = job.served, Path(job.served.model)
    tokenizer = load_tokenizer(model_dir)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    end_ids = make_transcript("chat", tokenizer, max_turns=1).end_ids if has_template else ()
    server = VLLMServer(fixed, served.log, has_template, share)
    most = arguments.max_tokens or min(MAX_TOKENS, fixed.context // 2)
    shows_tools = has_template and "tools" in str(tokenizer.chat_template)
    stop = () if has_template else PLAIN_STOP
    usual = SamplingDefaults(fixed.temperature, most, stop, end_ids, shows_tools, fixed.is_on_card)
    db = StoreThread(served.path, arguments.scheme)
    serving = Serving(server, served, db, lambda is_busy: training.on_busy(is_busy))
    training = Training(served, db, serving, job, flags.train_after)
    listening = listen("127.0.0.1", flags.port)
    access = Access(served.token(), port=int(listening.getsockname()[1]))
    gateway = Gateway(access, served.path.resolve().name, serving, db, training, usual)
    address = served.path / Running.name
    address.unlink(missing_ok=True)  # of one that was killed
    (served.version(0).parent / Before.name).unlink(missing_ok=True)  # what environments read may have changed
    try:
        async with Server(gateway.app, listening, STOP_TIMEOUT_S) as http:
            print(f"starting vLLM on {model_dir.name} ...", file=sys.stderr, flush=True)
            await serving.start()
            url = f"http://127.0.0.1:{http.port}"
            Running(url=f"{url}/v1", pid=os.getpid()).write(served.path)
            print(f"serving {url}/v1  version {serving.number}  token in {served.path / TOKEN}")
            print(f"page {url}/?token={access.token}", flush=True)
            try:
                return await _until_stopped(serving, training)
            finally:
                address.unlink(missing_ok=True)
    finally:
        training.kill()
        await server.stop()
        db.close()


@contextmanager
def explained(served: ServedDirectory) -> Iterator[None]:
    """Say what to do if the active version fails its check as the engine starts, or starts again."""
    try:
        yield
    except (FileError, WeightSyncError) as error:
        remedy = f"go back to its parent: srl versions {served.path} --rollback"
        raise ValueError(f"the active version is not served, since it fails its check: {error}; {remedy}") from error


async def _until_stopped(serving: Serving, training: Training) -> int:
    """Train, and watch the engine; return 0 after SIGINT or SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    tasks = [asyncio.create_task(coroutine) for coroutine in (training.run(), serving.watch(), stopped.wait())]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    for task in done:
        task.result()  # raises what ended it
    print("stopped", file=sys.stderr)
    return 0
