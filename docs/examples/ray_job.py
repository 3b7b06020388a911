"""Submit a training run as a Ray job, wait for it, and print the end of its log.

    ray start --head --port 6379 --dashboard-host 127.0.0.1
    python docs/examples/ray_job.py --address http://127.0.0.1:8265 --out results/job

The same from a shell, without waiting in Python:

    ray job submit --address http://127.0.0.1:8265 --working-dir . -- srl train --env compare --out results/job

Every node needs the package. `--out` should be on storage that outlives the job's working directory.
"""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from ray.job_submission import JobStatus, JobSubmissionClient

TIMEOUT_S = 600.0
FINISHED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


def main(argv: list[str] | None = None) -> None:
    """Submit, wait, print."""
    parser = argparse.ArgumentParser(description="Train as a Ray job.")
    parser.add_argument("--address", default="http://127.0.0.1:8265", help="the head node's dashboard")
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--iterations", type=int, default=2)
    arguments = parser.parse_args(argv)
    train = [
        *("srl", "train", "--env", "compare", "--env_config", "{num_shots: 0}", "--model", "tiny"),
        *("--engine", "transformers", "--num_env_runners", "0", "--compute_dtype", "float32", "--lr", "3e-4"),
        *("--max_turn_tokens", "12", "--max_episode_tokens", "96", "--seed", "1"),
        *("--iterations", str(arguments.iterations), "--out", str(arguments.out.absolute())),
    ]
    client = JobSubmissionClient(arguments.address)
    job = client.submit_job(entrypoint=shlex.join(train))
    print(f"submitted {job}", flush=True)
    deadline = time.monotonic() + TIMEOUT_S
    while (status := client.get_job_status(job)) not in FINISHED:
        if time.monotonic() > deadline:
            client.stop_job(job)
            raise SystemExit(f"{job} did not finish within {TIMEOUT_S:g} s and was stopped")
        time.sleep(1)
    print("\n".join(client.get_job_logs(job).splitlines()[-20:]))
    print(f"{job}: {status.value}")
    if status != JobStatus.SUCCEEDED:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
