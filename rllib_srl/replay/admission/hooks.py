"""Hooks that keep groups out of the memory and episodes out of the loss: the package's own and a user's functions.

    hook(group, decode) -> Refusal(reason, episodes, train) | None       decode: token ids -> text
    ADMISSIONS["mine"] = hook, or an import path "module:function"       the setting `replay_admit`

A refused group is not stored. Its `episodes` get no loss, unless `train` is set; advantages are those of the whole
group. A hook runs once for each well-formed group. One that raises, returns something else or takes longer than
`TIME_LIMIT_S` ends the run with an error that names it.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from rllib_srl.common.rules import Rules
from rllib_srl.replay.admission.secrets import Detector, detect, detect_credentials, secret_episodes
from rllib_srl.types import Group

TIME_LIMIT_S = 10.0  # of a user's hook, for one group
_REASON = re.compile(r"[a-z][a-z0-9_]{0,40}")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Refusal:
    """Why a group is not stored, and which of its episodes get no loss."""

    reason: str  # lower case, as in "word_list"; counted as num_refused_<reason>
    episodes: tuple[int, ...] = ()  # those that the reason is about
    train: bool = False  # whether they are trained on all the same

    @property
    def without_loss(self) -> tuple[int, ...]:
        """Return the episodes that are not trained on."""
        return () if self.train else self.episodes


Hook = Callable[[Group, Decode], Refusal | None]


class AdmissionError(ValueError):
    """A hook raised an exception, took too long, or returned something else than a `Refusal` or None."""


def _hook_of(detector: Detector) -> Hook:
    def secrets(group: Group, decode: Decode) -> Refusal | None:
        found = secret_episodes(group, decode, detector)
        return Refusal("secret", found) if found else None

    return secrets


DETECTORS: dict[str, Detector] = {"secrets": detect, "credentials": detect_credentials}
ADMISSIONS: Rules[Hook] = Rules("admit", {name: _hook_of(detector) for name, detector in DETECTORS.items()})


def names_of(admit: Any) -> tuple[Any, ...]:
    """Return the names of hooks in a value of the setting `admit`: one name, a list of them, or None."""
    if admit is None:
        return ()
    return tuple(admit) if isinstance(admit, list | tuple) else (admit,)


def fault_of_names(admit: Any) -> str:
    """Return the error message "expected ..." for a value of the setting `admit`, "" if it is valid."""
    faults = (fault for name in names_of(admit) if (fault := ADMISSIONS.fault(name)))
    return next((f"{fault}, a list of these, or None" for fault in faults), "")


def detector_of(admit: Any) -> Detector | None:
    """Return the package's detector by which transcripts are redacted; None if no hook of `admit` is one."""
    return next((DETECTORS[name] for name in names_of(admit) if name in DETECTORS), None)


def refusal_by(name: str, group: Group, decode: Decode) -> Refusal | None:
    """Return the refusal of a group by a hook.

    Raises:
        AdmissionError: the hook raised, took longer than `TIME_LIMIT_S`, or returned something else.
    """
    hook = ADMISSIONS.get(name) or ADMISSIONS.named(name)
    if hook is ADMISSIONS.own.get(name):
        return hook(group, decode)
    about = f"replay_admit = {name!r}, group {group.group_id}"
    call = _by_signal if threading.current_thread() is threading.main_thread() else _in_thread
    try:
        refusal = call(partial(hook, group, decode))
    except _TimeUp:
        raise AdmissionError(f"{about}: no answer within {TIME_LIMIT_S:g} s; expected a faster function") from None
    except Exception as error:  # of any type: it is a user's function
        raise AdmissionError(f"{about}: raised {type(error).__name__}: {error}; expected a Refusal or None") from error
    if refusal is None:
        return None
    if not isinstance(refusal, Refusal) or not _REASON.fullmatch(str(refusal.reason)):
        raise AdmissionError(f"{about}: returned {str(refusal)[:80]}; expected Refusal('lower_case', episodes) or None")
    if not set(refusal.episodes) <= set(range(group.size)):
        raise AdmissionError(f"{about}: episodes {refusal.episodes!r}; expected some of 0 to {group.size - 1}")
    return refusal


class _TimeUp(BaseException):
    """A hook took too long. Not an Exception, which a hook may catch."""


def _by_signal(hook: Callable[[], Any]) -> Any:
    """Call a hook in the main thread; a signal interrupts it, also in a regular expression without end."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TimeUp

    handler = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        return hook()
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)  # another timer of the process runs on, up to `TIME_LIMIT_S` late
        signal.signal(signal.SIGALRM, handler)


def _in_thread(hook: Callable[[], Any]) -> Any:
    """Call a hook in a daemon thread; abandon it on timeout.

    A regular expression holds Python's lock: one that backtracks without end blocks this thread too, until the call to
    the memory times out.
    """
    answers: list[tuple[Any, BaseException | None]] = []

    def call() -> None:
        try:
            answers.append((hook(), None))
        except BaseException as error:
            answers.append((None, error))

    thread = threading.Thread(target=call, name="replay_admit", daemon=True)
    thread.start()
    thread.join(TIME_LIMIT_S)
    if not answers:
        raise _TimeUp
    answer, error = answers[0]
    if error is not None:
        raise error
    return answer
