"""The programs of `examples/`, as modules."""

import importlib.util
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name):
    """Returns an example as a module, without running its `main`."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(module, monkeypatch, capsys, *arguments):
    """Returns the lines that an example prints, by what is before their first colon."""
    monkeypatch.setattr("sys.argv", [module.__file__, *arguments])
    module.main()
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(": ", 1) for line in lines)
