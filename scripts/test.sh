#!/usr/bin/env bash
# Set up if needed, then lint, type-check and test.
#
#   bash scripts/test.sh              about 10 minutes on two cores: all quick tests, and one run of each part end to end
#   bash scripts/test.sh --all        everything: every engine, every long run, the documentation's code blocks
#   bash scripts/test.sh --all ARGUMENTS      of that, what pytest selects by these
#   bash scripts/test.sh ARGUMENTS    what pytest selects by these, e.g. -m "not slow and not engine" -n 2
#
# Ends with pytest's closing line and its exit code; an error of ruff or mypy stops it before the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh --dev

unset PYTHONDONTWRITEBYTECODE  # without its cache pytest compiles all tests anew, in every process

say() { printf '\n== %s (%d min %02d s after the start)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }
# over NAME PACKAGES: an environment build/NAME that sees the packages of .venv and has its own for the rest (15 s to make).
over() {
    local there=build/$1
    shift
    if [[ -f $there/made ]]; then return; fi
    .venv/bin/python -m venv --clear "$there" || return
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
        >"$("$there/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    # pip reports clashes of the packages in .venv with each other, which it does not change
    "$there/bin/python" -m pip install -q "$@" || return
    touch "$there/made"
}

trackers() {
    say "pytest: Weights & Biases and MLflow, offline"
    over trackers 'wandb>=0.31,<0.32' 'mlflow>=3.17,<4' || return
    build/trackers/bin/python -m pytest -q -m slow tests/contrib/test_trackers.py
}

trl() {
    say "pytest: the memory in TRL"
    over trl 'trl==1.16.0' || return
    build/trl/bin/python -m pytest -q -m slow tests/test_examples.py -k trl
}

verifiers() {
    say "pytest: environments of verifiers"
    over verifiers 'verifiers>=0.4,<0.5' || return
    build/verifiers/bin/python -m pytest -q tests/envs/test_verifiers.py -k own_evaluation
}

# A published MCP server is a program of its own.
mcp_server() {
    say "pytest: a published MCP server"
    local there=build/mcp_server
    if [[ ! -x $there/bin/mcp-server-time ]]; then
        .venv/bin/python -m venv --clear "$there" || return
        "$there/bin/python" -m pip install -q 'mcp-server-time==2026.10.19' || return
    fi
    MCP_SERVER_TIME=$PWD/$there/bin/mcp-server-time \
        .venv/bin/python -m pytest -q -m slow tests/envs/test_env_mcp.py -k published
}

# A wheel built from the source distribution, installed without the checkout, trains the quick-start.
package() {
    say "the package: source distribution, wheel, and the quick-start from where it is installed"
    rm -rf build/dist build/installed
    .venv/bin/python -c 'from setuptools import setup; setup()' -q sdist --dist-dir build/dist || return
    .venv/bin/python -m pip wheel -q --no-deps --no-build-isolation -w build/dist build/dist/*.tar.gz || return
    over installed --no-deps build/dist/*.whl || return
    local srl=$PWD/build/installed/bin/srl there status=0
    there=$(mktemp -d) || return
    (cd "$there" && timeout 900 "$srl" quickstart --out first && "$srl" report first) || status=$?
    rm -rf "$there"
    return "$status"
}

# What fails is run once more, alone and in turn: a test that passes then was disturbed by the tests beside it.
tests() {
    local status=0 failed=.pytest_cache/v/cache/lastfailed
    rm -f "$failed"
    .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" || status=$?
    if ((status != 1)) || (($(grep -c '": true' "$failed") > 5)); then return "$status"; fi
    say "pytest: what failed, once more and alone. A test that passes now fails on a busy machine: mend it"
    .venv/bin/python -m pytest -v --last-failed "$@"
}

say "ruff"
.venv/bin/python -m ruff check .
say "mypy"
.venv/bin/python -m mypy

case "${1:-}" in
    "")
        say "pytest: the quick tests"
        .venv/bin/python -m pytest -q -m "not slow and not engine" -n 2
        say "pytest: one run of each part from end to end"
        exec .venv/bin/python -m pytest -v -m smoke
        ;;
    --all)
        shift
        every=(tests/[a-z]*/ tests/test_*.py)  # not tests: pytest would drop the folders in it that are named before
        say "pytest: what starts vLLM, two files at a time, each with one thread"
        engine=0
        tests -m "engine" tests/cli tests/algorithm "${every[@]}" "$@" || engine=$?
        say "pytest: everything else, two files at a time, from the folders whose files take longest"
        others=0
        tests -m "not engine" tests/algorithm tests/cli tests/learner "${every[@]}" "$@" || others=$?
        if (($# == 0)); then trackers || others=$?; trl || others=$?; verifiers || others=$?; mcp_server || others=$?; package || others=$?; fi
        # 5: no test was selected. ARGUMENTS may leave one part empty, but not both.
        if ((engine == 5)); then exit "$others"; fi
        if ((others != 0 && others != 5)); then exit "$others"; fi
        exit "$engine"
        ;;
    *)
        say "pytest"
        exec .venv/bin/python -m pytest "$@"
        ;;
esac
