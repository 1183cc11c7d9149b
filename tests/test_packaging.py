"""What is installed: the same files from each kind of package, and types that tools can see."""

import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("meshdsl", "layouts", "lowering", "models")

# Each line has the type that a tool must see of a public name; `Any` would be none of them.
PROGRAM = """
import meshdsl as md

wrong_layout: int = md.Layout.parse("batch:data")
wrong_mesh: int = md.Mesh.parse("data:2")
wrong_sum: int = md.sum
wrong_tensor: int = md.Tensor
wrong_jit: int = md.jit
"""
MISTAKES = PROGRAM.count("wrong_")
TYPED = (ROOT / "tests" / "typed_program.py").read_text()  # which asserts the types that it has


def run(*command, cwd, **environment):
    """Returns what a command prints, without what this process says of where modules are."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clone(to):
    """Copies what git would: the folders of the package, links as links, and the set-up files."""
    to.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, to / folder, symlinks=True, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def build(kind, source, into):
    """Builds a wheel or an sdist of a folder by its own build system, without the network."""
    code = f"import sys, setuptools.build_meta as b; print(b.build_{kind}(sys.argv[1]))"
    into.mkdir(exist_ok=True)
    return into / run(sys.executable, "-c", code, into, cwd=source).split()[-1]


def modules(names):
    return sorted(name for name in names if name.startswith("meshdsl/") and name[-1] != "/")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    return build("wheel", clone(folder / "source"), folder / "out")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment that has our dependencies, one clone as an editable install, no more."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    own = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    one = clone(folder / "one")
    install = ["install", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    # The dependencies are those of this process; a path file that sorts first would hide `one`.
    (Path(own) / "zz_dependencies.pth").write_text("\n".join(site.getsitepackages()))
    run(sys.executable, "-m", "pip", "--python", python, *install, "-e", one, cwd=folder)
    return python, one


def test_a_wheel_has_every_file_of_the_package(wheel):
    tracked = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".css", ".js", ".json", ".txt", ".typed")
        and not path.is_symlink()
    ]
    links = {name: f"meshdsl/{name}" for name in FOLDERS[1:]}
    expected = [
        links.get(name.split("/")[0], name.split("/")[0]) + name[name.index("/") :]
        for name in tracked
        if not name.startswith(tuple(links.values()))
    ]
    assert modules(zipfile.ZipFile(wheel).namelist()) == sorted(expected)


@pytest.mark.long
def test_a_wheel_from_an_sdist_has_the_files_of_one_from_a_checkout(wheel, tmp_path):
    sdist = build("sdist", clone(tmp_path / "source"), tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path / "again")
    assert modules(zipfile.ZipFile(again).namelist()) == modules(zipfile.ZipFile(wheel).namelist())


@pytest.mark.long
def test_two_clones_never_mix(environment, tmp_path):
    python, one = environment
    two = clone(tmp_path / "two")
    code = (
        "import json, meshdsl, meshdsl.layouts.layout, meshdsl.lowering.lower, meshdsl.models, sys;"
        "print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.startswith('meshdsl')"
        " and m.__file__]))"
    )
    for folder, cwd in ((one, tmp_path), (two, two)):
        files = json.loads(run(python, "-c", code, cwd=cwd))
        assert len(files) > 50
        assert all(Path(file).is_relative_to(folder) for file in files)


@pytest.mark.long
@pytest.mark.parametrize("installed", ["editable", "checkout", "wheel"])
@pytest.mark.parametrize("tool", ["mypy", "pyright"])
def test_type_checkers_see_public_types(tool, installed, environment, wheel, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "typed_program.py").write_text(TYPED)
    python, _ = environment
    found = {}
    if installed == "checkout":
        found, python = {"MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}, sys.executable
    if installed == "wheel":
        zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
        found = {"MYPYPATH": str(tmp_path / "installed")}
        python = sys.executable
    check = {"mypy": mypy, "pyright": pyright}[tool]
    assert check(python, tmp_path, found) == MISTAKES


def mypy(python, folder, environment):
    """Returns how many wrong assignments mypy sees; there is nothing else to see."""
    code = (
        "import sys; from mypy import api; "
        "print(api.run(['--python-executable', sys.argv[1], '--cache-dir', sys.argv[2],"
        " '--strict', '--ignore-missing-imports', '--follow-imports=silent',"
        " 'program.py', 'typed_program.py'])[0])"
    )
    out = run(sys.executable, "-c", code, python, folder / "cache", cwd=folder, **environment)
    others = [line for line in out.splitlines() if "error" in line and "[assignment]" not in line]
    assert not [line for line in others if not line.startswith("Found")], out
    return out.count("[assignment]")


def pyright(python, folder, environment):
    """Returns how many wrong assignments pyright sees; there is nothing else to see."""
    paths = environment.get("MYPYPATH")
    settings = {"extraPaths": [paths] if paths else [], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", python]
    files = ["program.py", "typed_program.py"]
    done = subprocess.run([*command, *files], cwd=folder, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert not [one for one in found if one.get("rule") != "reportAssignmentType"], found
    return len(found)
