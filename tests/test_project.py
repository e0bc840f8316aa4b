"""What holds for the project as a whole: layers, public names, versions, what a wheel contains."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import onnxplain
from onnxplain.cli import app

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "onnxplain"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 420

EXPORT_PACKAGES = {"onnx", "onnx_ir", "onnxruntime", "safetensors", "timm", "torch"}
EVALUATION_PACKAGES = {"PIL", "cv2", "matplotlib", "onnxruntime", "scipy", "sklearn"}
PUBLIC = {"contract", "errors", "runtime", "graphs", "evaluation", "export", "verification"}
CLI_PARTS = {
    "console",
    "evaluating",
    "inputs",
    "inspection",
    "making",
    "options",
    "panel",
    "reporting",
}

SHARED = {"contract", "outputs", "errors", "steps"}

# What each part may import, of onnxplain and of the heavy packages. Nothing else in either.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "steps": set(),
    "outputs": set(),
    "contract": {"contract_checks", "outputs", "errors"},
    "contract_checks": {"contract", "outputs"},
    "runtime": {"contract", "outputs", "errors", "onnxruntime", "cv2", "PIL"},
    "processor": {"contract", "errors"},
    "graphs": {"processor", *SHARED, "onnx", "onnx_ir", "onnxruntime"},
    "export": {"graphs", *SHARED, *EXPORT_PACKAGES},
    "panel": {"runtime", "contract", "outputs", "errors", "PIL"},
    "demo": {"runtime", "panel", "cv2"},
    "differences": {"runtime", "outputs", "errors"},
    "plain_source": {"differences", "graphs", "runtime", *SHARED, "onnx_ir"},
    "verification": {"differences", "plain_source", "runtime", "export", *SHARED},
    "inputs": {"errors"},
    "evaluation": {
        "inputs",
        "differences",
        "runtime",
        "graphs",
        "demo",
        *SHARED,
        *EVALUATION_PACKAGES,
    },
    "inspection": {"graphs", "contract", "outputs"},
    "console": {"errors"},
    "options": {"errors"},
    "reporting": {"console", "inspection", "panel", "demo", *PUBLIC},
    "making": {"processor", "contract", "console", "options", "reporting"},
    "evaluating": {"console", "options", "reporting"},
    "cli": {"runtime", "graphs", "export", "demo", *CLI_PARTS, "contract", "errors"},
}
HEAVY = {
    "PIL",
    "cv2",
    "matplotlib",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "safetensors",
    "scipy",
    "sklearn",
    "timm",
    "torch",
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """Every module that the file names in an import, at whatever depth, as an absolute name."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def dependencies(path: Path) -> set[str]:
    """The parts of onnxplain and the heavy packages that the file imports."""
    found = set()
    for name in imported(path):
        first, *rest = name.split(".")
        if first == "onnxplain" and rest and rest[0] in ALLOWED:
            found.add(rest[0])
        elif first in HEAVY:
            found.add(first)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    if part in {"__init__", "__main__"}:
        assert dependencies(path) <= PUBLIC | {"cli"}
        return
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    assert dependencies(path) - {part} <= ALLOWED[part]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_is_public_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if tree.body[1:]:  # more than a docstring
        names = [
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        ]
        assert "__all__" in names
    assert len(text.splitlines()) <= LONGEST_FILE


def test_everything_in_all_exists() -> None:
    for name in onnxplain.__all__:
        assert getattr(onnxplain, name) is not None


def commands_in(path: Path) -> Iterator[list[str]]:
    """The words of every `onnxplain ...` line in the code blocks of a text."""
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():  # a command may go on
            if line.startswith("onnxplain "):
                yield shlex.split(line, comments=True)[1:]


def test_commands_of_the_readme_exist() -> None:
    known = typer.main.get_command(app)
    found = list(commands_in(ROOT / "README.md"))
    assert {words[0] for words in found} >= {"export", "explain", "instrument"}
    for name, *arguments in found:
        command = known.commands[name]  # type: ignore[attr-defined]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in arguments if word.startswith("-")} <= options, name


def test_names_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\box\.(\w+)", text))
    assert names
    assert names <= set(onnxplain.__all__)


def test_version_is_the_newest_in_the_changelog() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == onnxplain.__version__


@pytest.mark.parametrize("module", ["onnxplain", "onnxplain.cli"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({HEAVY | {'numpy', 'rich'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "module",
    ["onnxplain.runtime", "onnxplain.demo.scenes", "onnxplain.panel", "onnxplain.verification"],
)
def test_runtime_works_where_torch_and_onnx_cannot_be_imported(module: str) -> None:
    forbidden = sorted(HEAVY - {"PIL", "cv2", "onnxruntime"})
    code = f"import sys; sys.modules.update(dict.fromkeys({forbidden})); import {module}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", ["onnxplain.graphs", "onnxplain.evaluation"])
def test_graphs_work_where_torch_cannot_be_imported(module: str) -> None:
    # SciPy stumbles over a module that is None, so the import itself has to fail.
    code = (
        "import sys, importlib.abc as abc\n"
        "class Refusal(abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name in ('torch', 'timm', 'onnxscript'): raise ModuleNotFoundError(name)\n"
        f"sys.meta_path.insert(0, Refusal())\nimport {module}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["matplotlib", "scipy", "sklearn"])
def test_evaluation_says_what_it_lacks(package: str) -> None:
    code = (
        "import importlib.util as u; find = u.find_spec;"
        f"u.find_spec = lambda name, *more: None if name == {package!r} else find(name, *more);"
        "import onnxplain; onnxplain.evaluate"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"{package} is not installed; pip install onnxplain[evaluate]" in last


@pytest.mark.parametrize(
    "path",
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")],
    ids=lambda path: path.name,
)
def test_links_to_files_of_the_project_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (ROOT / link).exists(), link
