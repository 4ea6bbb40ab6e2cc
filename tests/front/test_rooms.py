"""The rules of the house: how rooms are imported, and that everything public says what it is."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import icefloe

ROOT = Path(__file__).parents[2]
ROOMS = ["capture", "catalog", "chunker", "gc", "store", "transfer"]

FOLDERS = [ROOT / name for name in (*ROOMS, "src", "tests", "bench", "scripts")]


def sources() -> list[Path]:
    """Every Python file of the project, each once."""
    found = {path.resolve() for folder in FOLDERS for path in folder.rglob("*.py")}
    return sorted(path for path in found if ".egg-info" not in str(path))


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports by absolute name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_rooms_are_imported_through_the_hall() -> None:
    """`import store` finds a second copy of the room, with other classes of the same name."""
    assert len(sources()) > 40
    wrong = [
        (str(path.relative_to(ROOT)), module)
        for path in sources()
        for module in imported(path)
        if module.partition(".")[0] in ROOMS
    ]
    assert wrong == []


def test_no_room_is_loaded_twice() -> None:
    """Everything that was imported so far lies under icefloe."""
    loaded = {name for name in sys.modules if name.partition(".")[0] in ROOMS}
    assert loaded - {"gc"} == set()


def test_each_room_is_linked() -> None:
    """The folder at the top is the package."""
    for room in ROOMS:
        module = importlib.import_module(f"icefloe.{room}")
        assert module.__file__ and Path(module.__file__).resolve().parent == ROOT / room


def modules() -> list[str]:
    """The names of all modules of icefloe."""
    names = [m.name for m in pkgutil.walk_packages(icefloe.__path__, "icefloe.")]
    return ["icefloe", *sorted(name for name in names if name != "icefloe.__main__")]


def own_members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public classes and functions that a module defines, and public methods of the classes."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            yield name, value
            for inner, method in vars(value).items():
                if inspect.isfunction(method) and not inner.startswith("_"):
                    yield f"{name}.{inner}", method
        elif inspect.isfunction(value):
            yield name, value


@pytest.mark.parametrize("name", modules())
def test_everything_public_says_what_it_is(name: str) -> None:
    """Modules, classes, functions, methods."""
    module = importlib.import_module(name)
    assert module.__doc__, name
    silent = [member for member, value in own_members(module) if not written_doc(value)]
    assert silent == []


def written_doc(value: object) -> str:
    """The docstring that somebody wrote; dataclasses make one up."""
    doc = getattr(value, "__doc__", None) or ""
    name = getattr(value, "__name__", "")
    return "" if doc.startswith(f"{name}(") else doc


@pytest.mark.parametrize("name", modules())
def test_all_names_exist(name: str) -> None:
    """`__all__` is sorted as ruff wants it, without doubles, and everything in it is there."""
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", [])
    assert len(set(listed)) == len(listed)
    assert [item for item in listed if not hasattr(module, item)] == []


def test_help_loads_nothing_heavy() -> None:
    """`icefloe --help` must be there at once."""
    code = (
        "import sys, icefloe.cli\n"
        "print([m for m in ('numpy', 'rocksdict', 'zstandard', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
