"""Serve a model, take ratings of its answers, and train on them in the background.

    srl serve smollm2-135m --out results/served --keep compare chain_sum
    srl serve results/first/model --out results/served --keep compare --train-after 64 --port 8000
    srl serve tiny --out results/served --train-after 0                         no training

vLLM's own server answers, behind a gateway on the loopback: OpenAI's /v1/chat/completions, plain and streaming, and
ratings by PUT /v1/conversations/ID/rating. The token is in DIR/token. After --train-after new ratings a version of the
model (an adapter) is trained, at the lowest priority and only while nothing is being answered. It answers once held-out
prompts of every --keep environment say that nothing is lost, and once the server computes it as the trainer does. `srl
versions DIR` lists all versions, and rolls back. Everything is in DIR, readable by you only; the same command goes on.
On a GPU server and trainer share it, in bfloat16: `srl doctor --serve MODEL` says whether they fit.
"""

from __future__ import annotations

import argparse

from pydantic import ValidationError

from rllib_srl.cli.serving.job import MAX_TOKENS, RANK, KeptDomain, TrainingSettings, bounded
from rllib_srl.cli.shared.flags import Program, local_directory
from rllib_srl.cli.tuning.stream import env_named
from rllib_srl.people.rating import NAMED_SCHEMES


class Flags(TrainingSettings):
    """The numbers of the command line."""

    port: int = bounded(8000, 0, 65535, "port on 127.0.0.1; 0: any")
    train_after: int = bounded(32, 0, 10**9, "new ratings that start the training of a version; 0: no training")
    rank: int = bounded(RANK, 1, 64, "rank of the adapters")
    temperature: float = bounded(1.0, 0.05, 2, "sampling temperature; answers sampled otherwise are not trained on")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name or directory of a model")
    text = "directory of the served model"
    parser.add_argument("--out", type=local_directory, required=True, metavar="DIR", help=text)
    parser.add_argument("--keep", nargs="*", default=[], metavar="ENV", help="domains that must not be lost")
    text = "values and rewards of ratings, for good (default: good and bad as binary, 1 to 5 as ordinal)"
    parser.add_argument("--scheme", choices=NAMED_SCHEMES, default="", help=text)
    parser.add_argument("--max-tokens", type=int, metavar="N", help=f"tokens of an answer (default: {MAX_TOKENS})")
    for name, field in Flags.model_fields.items():
        flags = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        text = f"{field.description} (default: {field.default})"
        parser.add_argument(*flags, dest=name, default=field.default, metavar="VALUE", help=text)


def checked(arguments: argparse.Namespace) -> tuple[Flags, list[KeptDomain]]:
    """Return the numbers of the command line, and the domains to keep; ValueError: all errors, one per line."""
    flags, errors, keep = Flags(), list[str](), list[KeptDomain]()
    try:
        flags = Flags(**{name: getattr(arguments, name) for name in Flags.model_fields})
    except ValidationError as error:
        errors += [f"--{detail['loc'][0]} {detail['input']}: {detail['msg']}" for detail in error.errors()]
    for text in arguments.keep:
        try:
            settings = env_named(text)
            keep.append(KeptDomain(**{"domain": settings["env"], **settings}))
        except ValueError as error:
            errors.append(f"--keep: {error}")
    names = [kept.domain for kept in keep]
    errors += [f"--keep names the domain {name!r} twice" for name in sorted(set(names)) if names.count(name) > 1]
    if flags.train_after and not arguments.keep:
        errors.append("--keep is empty; expected an environment that must not be lost, or --train-after 0")
    if errors:
        raise ValueError("the server cannot start:\n" + "\n".join(f"  {error}" for error in errors))
    return flags, keep


def serve(arguments: argparse.Namespace) -> int:
    flags, keep = checked(arguments)
    from rllib_srl.cli.serving.process import serve_until_stopped

    return serve_until_stopped(arguments, flags, keep)


main = Program(__doc__, add_flags, serve)
