"""The package is what setup.cfg says, light to import, pinned completely, and free of what the house style forbids."""

import ast
import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import find_packages

import rllib_srl

REPO = Path(__file__).resolve().parent.parent
PINS = REPO / "scripts" / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}  # scripts/requirements says why
LEFT_OUT |= {"llm", "llama-cpp-python", "sentence-transformers"}
DATA_ONLY = {"bfcl-eval", "inspect-evals"}  # scripts/requirements/dev.txt: nothing that they need is installed
MOST_FUNCTION_LINES = 60


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg")
    return parser


def listed(config: configparser.ConfigParser, section: str, option: str) -> list[str]:
    return [line for line in config[section][option].splitlines() if line and not line.startswith("#")]


def pins_of(name: str) -> dict[str, str]:
    """Return the pinned versions of a requirements file and those it includes with -r, by canonical name."""
    pins: dict[str, str] = {}
    for line in (PINS / f"{name}.txt").read_text().splitlines():
        if line.startswith("-r "):
            pins |= pins_of(line[3:].removesuffix(".txt"))
        elif line and line[0] not in "#-":
            package, version = re.split("={2,3}", line)
            pins[canonicalize_name(package)] = version
    return pins


def test_metadata(config: configparser.ConfigParser) -> None:
    assert config["metadata"]["name"] == "rllib_srl"
    assert config["options"]["python_requires"] == ">=3.11,<3.14"
    assert listed(config, "options.packages.find", "include") == ["rllib_srl*"]  # `envs` may be a user's own
    assert re.search(r"^## \[0\.2\.0\]", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert config["metadata"]["version"] == rllib_srl.__version__ == "0.2.0"
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == ("0.2.0", config["metadata"]["license"])


def test_every_folder_to_install_is_a_package() -> None:
    packages = {name.replace(".", "/") for name in find_packages(str(REPO), include=["rllib_srl*"])}
    assert {"rllib_srl/envs/math", "rllib_srl/tune_configs", "rllib_srl/replay/schedule"} <= packages
    folders = [REPO / "rllib_srl", *(REPO / "rllib_srl" / name for name in ("envs", "tune_configs"))]  # two are links
    modules = {path.parent for folder in folders for path in folder.rglob("*.py")}
    assert {str(folder.relative_to(REPO)) for folder in modules} == packages


def test_entry_points_are_environments_that_run(config: configparser.ConfigParser) -> None:
    lines = listed(config, "options.entry_points", "rllib_srl.envs")
    points = [importlib.metadata.EntryPoint(*re.split(r"\s*=\s*", line), group="rllib_srl.envs") for line in lines]
    assert len(points) >= 25 and len({point.name for point in points}) == len(points)
    for point in points:
        assert issubclass(point.load(), gymnasium.Env), point.name


@pytest.mark.slow
def test_what_the_code_imports_is_declared(config: configparser.ConfigParser) -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in listed(config, "options", "install_requires")}
    packages_of = importlib.metadata.packages_distributions()
    # Extras, imported where a setting asks for them.
    optional = {"PIL", "bitsandbytes", "faiss", "openai", "peft", "vllm"}
    optional |= {"httpx", "jsonschema", "mcp", "mlflow", "verifiers", "wandb", "websockets"}
    for path in python_files("rllib_srl", "envs", "tune_configs"):
        for name in third_party_imports(path.read_text()) - {"rllib_srl"} - optional:
            assert declared & {canonicalize_name(package) for package in packages_of[name]}, f"{path.name}: {name}"


def third_party_imports(source: str) -> set[str]:
    """Return the top-level names that `source` imports, the standard library's left out."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names)


PLAYS_BOTH = """
import envs, tune_configs
from rllib_srl.common.environments import resolve
from rllib_srl.tune_configs.streams import STREAMS
assert envs.MINE == tune_configs.MINE == 1 and "cpu" in STREAMS
print(resolve("compare")({"num_shots": 0}).reset(options={"prompt_id": "17, 93, 40"})[0])
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """Return a directory that holds the built wheel, as pip would lay it out."""
    built, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "repo"  # setuptools writes build/ beside what it builds
    shutil.copytree(REPO, source, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "results", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.mark.slow
def test_the_wheel_installs_nothing_beside_the_package(unpacked: Path) -> None:
    assert {path.name.partition("-")[0] for path in unpacked.iterdir()} == {"rllib_srl"}
    assert {"py.typed", "envs", "tune_configs"} <= {path.name for path in (unpacked / "rllib_srl").iterdir()}
    assert (unpacked / "rllib_srl" / "engine" / "tiny" / "model.safetensors").stat().st_size > 1e6
    pages = {unpacked / "rllib_srl" / "studies" / "report" / name for name in ("page.html.j2", "page.css")}
    pages |= {unpacked / "rllib_srl" / "cli" / "serving" / "page" / name for name in ("index.html", "page.js")}
    assert {path for path in pages if not path.exists()} == set()


@pytest.mark.slow
@pytest.mark.parametrize("is_editable", [False, True])
def test_a_project_with_folders_of_the_same_names_plays_ours(unpacked: Path, tmp_path: Path, is_editable: bool) -> None:
    for name in ("envs", "tune_configs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = 1\n")
    paths = [str(tmp_path), str(REPO if is_editable else unpacked)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", PLAYS_BOTH + "import rllib_srl; print(rllib_srl.__file__)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Which is largest: 17, 93 or 40?" in done.stdout and done.stdout.splitlines()[-1].startswith(paths[1])


@pytest.mark.parametrize(("extra", "pinned_in"), [("cpu", "cpu"), ("gpu", "gpu"), ("dev", "dev"), (None, "cpu")])
def test_pins_lie_in_the_ranges_of_setup_cfg(config: configparser.ConfigParser, extra: str, pinned_in: str) -> None:
    pins = pins_of("base") | pins_of(pinned_in)
    lines = listed(config, *(("options.extras_require", extra) if extra else ("options", "install_requires")))
    for requirement in map(Requirement, lines):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


@pytest.mark.parametrize("name", ["base", "cpu", "plain", "dev"])
def test_no_cuda_build_is_pinned_for_a_cpu(name: str) -> None:
    pins = pins_of(name)
    assert [package for package in pins if package.startswith("nvidia-") or package in LEFT_OUT] == []
    assert pins.get("torch", "+cpu").endswith("+cpu")


def test_the_same_torch_is_pinned_for_cpu_and_gpu() -> None:
    assert pins_of("cpu")["torch"].removesuffix("+cpu") == pins_of("gpu")["torch"]


def missing_requirements(pins: dict[str, str], python: str) -> Iterator[str]:
    """Yield what an installed package of `pins` needs under `python` and `pins` lacks or pins to another version."""
    markers = {"python_version": python, "python_full_version": f"{python}.5"}
    markers |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    todo = [(name, "") for name in pins]
    done = set(todo)
    while todo:
        name, extra = todo.pop()
        for line in [] if name in DATA_ONLY else importlib.metadata.distribution(name).requires or []:
            needed = Requirement(line)
            package = canonicalize_name(needed.name)
            if package in LEFT_OUT or (needed.marker and not needed.marker.evaluate({**markers, "extra": extra})):
                continue
            if package not in pins or not needed.specifier.contains(pins[package], prereleases=True):
                yield f"{name} needs {line}, pinned: {pins.get(package)}"
            elif fresh := {(package, more) for more in needed.extras} - done:
                done |= fresh
                todo += fresh


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_complete(config: configparser.ConfigParser, python: str) -> None:
    pins = pins_of("cpu") | pins_of("dev")
    absent = [name for name, version in pins.items() if not _is_installed(name, version)]
    if absent:
        pytest.skip(f"not this environment's pins: {', '.join(absent[:5])}")
    assert list(missing_requirements(pins, python)) == []
    less = {name: version for name, version in pins.items() if name != "aiosignal"}
    assert [line.split()[0] for line in missing_requirements(less, python)] == ["aiohttp"]


def _is_installed(name: str, version: str) -> bool:
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def test_import_is_light() -> None:
    heavy = {"torch", "ray", "vllm", "transformers", "gymnasium", "numpy", "pydantic"}
    program = f"import sys, rllib_srl; print(*sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "\n", "")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((REPO / folder).rglob("*.py"))]


@pytest.mark.slow
def test_functions_are_short() -> None:
    """What else the house style forbids, such as a bare except, `eval` and unpickling, ruff finds."""
    long = {
        f"{path.relative_to(REPO)}: {node.name}": lines
        for path in python_files("rllib_srl", "envs", "tune_configs", "scripts")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_FUNCTION_LINES
    }
    assert long == {}


def test_cloudpickle_opens_nothing() -> None:
    """Ruff does not know it."""
    files = python_files("rllib_srl", "envs", "tune_configs", "scripts")
    assert [path.name for path in files if re.search(r"cloudpickle\.loads?\(", path.read_text())] == []


MACHINE_PATH = re.compile(r"""["'\s=(](/(?:root|work|home|Users)/\w[^\s"']*)""")


def test_no_file_names_a_path_of_one_machine() -> None:
    files = [*python_files("rllib_srl", "envs", "tune_configs", "scripts", "tests"), *(REPO / "docs").rglob("*.md")]
    files += [*(REPO / "scripts").glob("*.sh"), REPO / "setup.cfg", REPO / "pyproject.toml", REPO / ".ci" / "run"]
    found = {str(path.relative_to(REPO)): MACHINE_PATH.findall(path.read_text()) for path in files}
    assert {name: paths for name, paths in found.items() if paths} == {}
    assert MACHINE_PATH.findall("a = '/ro" + "ot/models/x'") == ["/ro" + "ot/models/x"]


@pytest.mark.parametrize("script", ["setup.sh", "test.sh", "quickstart.sh", "../.ci/run"])
def test_shell_scripts_parse_and_stop_on_errors(script: str) -> None:
    path = REPO / "scripts" / script
    assert subprocess.run(["bash", "-n", str(path)], timeout=60, check=False).returncode == 0
    assert "\nset -euo pipefail\n" in path.read_text()


def test_the_quick_start_runs_the_command_of_its_own_environment(tmp_path: Path) -> None:
    """scripts/quickstart.sh in a copy whose set-up does nothing and whose `srl` prints its arguments."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPO / "scripts" / "quickstart.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.sh").write_text("")
    command = tmp_path / ".venv" / "bin" / "srl"
    command.parent.mkdir(parents=True)
    command.write_text('#!/bin/sh\necho "ran $*"\nexit 3\n')
    command.chmod(0o755)
    script = ["bash", str(tmp_path / "scripts" / "quickstart.sh"), "--seed", "2"]
    done = subprocess.run(script, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3 and done.stdout.startswith("ran quickstart --seed 2\n")
