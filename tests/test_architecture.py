"""Tests the import rules between packages and the size limits, on parsed source; nothing is imported."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megads"

# Highest first: a package or top-level module may import only from those in later rows.
LAYERS = (
    ("cli",),
    ("tools",),
    ("api",),
    ("launch",),
    ("train",),
    ("config",),
    ("evaluate", "resilience", "checkpoint", "monitor"),
    ("engine",),
    ("model", "optim", "data"),
    ("parallel",),
    ("ops",),
    ("runtime",),
    ("batch", "errors"),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 90
# Justified exceptions, with the number of lines each may reach: these lists only shrink.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

# The tools that each tool imports; no lower layer imports a tool.
TOOLS = {
    "autotune": set(),
    "chaos": set(),
    "checkpoints": {"generate", "output_folder"},
    "compare": {"report"},
    "dataset": set(),
    "datatrove": {"prepare"},
    "debug": set(),
    "convert": {"generate", "output_folder", "prepare"},
    "diagnose": {"convert"},
    "doctor": set(),
    "evaluate": {"generate", "jobs", "prepare", "report"},
    "generate": {"prepare"},
    "inspect": {"dataset", "report"},
    "jobs": set(),
    "live_console": set(),
    "megatron_order": set(),
    "notebook": {"generate"},
    "output_folder": set(),
    "plan": {"autotune", "profile", "report"},
    "prepare": set(),
    "profile": set(),
    "rehearse": {"doctor", "plan"},
    "remote": {"checkpoints", "generate", "output_folder"},
    "report": {"plan", "profile"},
    "rerun": set(),
    "sweep": {"jobs", "report"},
    "trackers": set(),
    "verify": set(),
}

# The modules of cli that run a tool, or show what one has written.
TOOL_VERBS = {
    *("calibrate", "chaos", "check_nodes", "checkpoint", "compare", "dataset", "diagnose", "doctor"),
    *("evaluate", "export", "generate", "import", "notebook", "plan", "preprocess", "report", "sweep", "tokenizer"),
    *("verify_layout", "watch", "why"),
}

# Names of the core that one tool imports from where they are defined, not from megads.api. This number only shrinks.
PRIVATE_NAMES = 343

# The engines, which `build_train_engine` imports by name: a rank runs one of them.
NATIVE = ("megads.engine.native_engine",)
DEEPSPEED = ("megads.engine.deepspeed_engine", "megads.engine.zero_engine")
# What training imports: packages or modules to start at, whether imports inside functions count, and the ceilings of
# files and of code lines.
CLOSURES = {
    "rank": (("megads.train", *NATIVE), True, 173, 25619),
    "rank, when it starts": (("megads.train",), False, 147, 21129),
    "rank with engine=deepspeed": (("megads.train", *DEEPSPEED), True, 173, 25696),
    "launcher and rank": (
        ("megads.cli.main", "megads.cli.train", "megads.launch", "megads.train", *NATIVE),
        True,
        213,
        32664,
    ),
}

# The subpackages of data, and which of them each may import; the other modules of data import none of them.
DATA_ROOMS: dict[str, set[str]] = {"indexed": set(), "sampling": {"indexed"}}

UNPICKLING_ERROR = "pickle.UnpicklingError"
PICKLES = {"pickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
DRAWER_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "shared"}


@dataclasses.dataclass(frozen=True)
class Module:
    """One parsed file: `name` as in runtime.metrics (without megads), `package` as in runtime."""

    name: str
    package: str
    path: Path
    tree: ast.Module
    lines: int


@functools.cache
def modules() -> tuple[Module, ...]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        text = path.read_text()
        package = parts[0] if parts not in (("__init__",), ("__main__",)) else ""
        found.append(Module(".".join(parts), package, path, ast.parse(text, str(path)), text.count("\n")))
    return tuple(found)


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """Yields the full name and line of every import, also inside functions."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name}:{node.lineno} imports relatively"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def importers(package: str) -> set[str]:
    """Returns the packages that import a package or one of its modules."""
    return {
        module.package
        for module in modules()
        for name, _ in imports(module)
        if name == package or name.startswith(f"{package}.")
    }


def test_the_import_parser_finds_imports() -> None:
    """Catches an import parser that finds nothing, with which every test below would pass."""
    assert {"engine"} <= importers("deepspeed") and {"cli"} <= importers("hydra")
    assert len(importers("megads.errors")) > 5
    assert "cli" in importers("megads.tools.prepare.preprocess"), "imports inside functions count"


def test_every_package_has_a_layer() -> None:
    """Catches a new package that LAYERS does not list."""
    assert {module.package for module in modules()} - {""} <= set(LEVEL)


def test_imports_only_go_down() -> None:
    """Catches an import from a higher layer, or from another package of the same layer."""
    wrong = []
    for module in modules():
        for name, line in imports(module):
            parts = name.split(".")
            if parts[0] != "megads" or not module.package or len(parts) < 2 or parts[1] not in LEVEL:
                continue
            target = parts[1]
            if target != module.package and LEVEL[target] <= LEVEL[module.package]:
                wrong.append(f"megads/{module.name.replace('.', '/')}.py:{line} imports {name}")
    assert wrong == []


def test_the_core_imports_no_tool() -> None:
    """Catches a core that needs a tool: only the verbs of tools import one, each its own, when it is called."""
    wrong = {
        module.name
        for module in modules()
        for name, _ in imports(module)
        if name.startswith("megads.tools.") and module.package != "tools"
    }
    allowed = {f"cli.{verb}" for verb in TOOL_VERBS} | {"__init__"}
    assert wrong <= allowed, "notebooks load a model by megads.load_model, which is imported when it is used"


def test_tools_use_each_other_as_listed() -> None:
    """Catches an import between tools that TOOLS does not list."""
    used: dict[str, set[str]] = {name: set() for name in TOOLS}
    for module in modules():
        if module.package == "tools" and module.name != "tools.__init__":
            own = module.name.split(".")[1]
            others = {name.split(".")[2] for name, _ in imports(module) if name.startswith("megads.tools.")}
            used[own] |= others - {own}
    assert used == TOOLS


def core_names(module: Module) -> set[tuple[str, str]]:
    """Modules and names of the core that a module imports; no modules."""
    files = {f"megads.{found.name}" for found in modules()}
    return {
        (str(node.module), alias.name)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("megads.")
        for alias in node.names
        if not str(node.module).startswith("megads.tools") and f"{node.module}.{alias.name}" not in files
    }


def test_tools_share_the_core_by_its_api() -> None:
    """Catches a name of the core that two tools import and that megads.api does not declare, one that a tool imports
    past megads.api, and more names that single tools take from inside the core."""
    users: dict[tuple[str, str], set[str]] = {}
    for module in modules():
        if module.package == "tools" and module.name.count("."):
            for name in core_names(module):
                users.setdefault(name, set()).add(module.name.split(".")[1])
    inside = {name: tools for name, tools in users.items() if name[0] != "megads.api"}
    assert {name: tools for name, tools in inside.items() if len(tools) > 1} == {}
    assert len(inside) <= PRIVATE_NAMES, "declare them in megads.api, or use what it declares"
    [api] = [module for module in modules() if module.name == "api"]
    assert {name for home, name in inside if (home, name) in core_names(api)} == set()


def test_data_packages_import_as_listed() -> None:
    """Catches a sampler that imports dataset preparation, and a module of data itself that imports a subpackage."""
    wrong = []
    for module in modules():
        own = module.name.split(".")[1] if module.package == "data" and "." in module.name else ""
        for name, line in imports(module) if own else ():
            target = name.removeprefix("megads.data.").split(".")[0]
            if name.startswith("megads.data.") and target in DATA_ROOMS.keys() - DATA_ROOMS.get(own, set()) - {own}:
                wrong.append(f"{module.name}:{line} imports {name}")
    assert wrong == []


def front_doors() -> dict[str, set[str]]:
    """Returns each package's public names: modules in `__all__`, subpackages, and definitions in `__init__.py`."""
    doors: dict[str, set[str]] = {}
    for module in modules():
        folder, _, file = module.name.rpartition(".")
        if file != "__init__" or not folder:
            continue
        listed = {
            ast.literal_eval(name)
            for node in module.tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
            for name in node.value.elts
        }
        own = {node.name for node in module.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert {f"{folder}.{name}" for name in listed - own} <= {module.name for module in modules()}, folder
        doors[folder] = listed | own
    for folder in doors:
        package, _, inner = folder.rpartition(".")
        if package:
            doors[package].add(inner)
    return doors


def test_packages_are_imported_by_their_front_doors() -> None:
    """Catches an import of another package's private module."""
    doors, wrong = front_doors(), []
    for module in modules():
        for name, line in imports(module):
            parts = name.removeprefix("megads.").split(".")
            for length in range(1, len(parts)):
                folder, inside = ".".join(parts[:length]), parts[length]
                # Subpackages of data may import each other's private modules; tools may not.
                inner = (
                    folder not in doors or module.name.startswith(f"{folder}.") or module.package == parts[0] == "data"
                )
                if name.startswith("megads.") and not inner and inside not in doors[folder]:
                    wrong.append(f"{module.name}:{line} imports {name}")
    assert wrong == []


def test_imports_make_no_circle() -> None:
    """Catches circular imports, also within one package."""
    names = {f"megads.{module.name}" for module in modules()}
    graph = {}
    for module in modules():
        targets = {name if name in names else name.rpartition(".")[0] for name, _ in imports(module)}
        graph[f"megads.{module.name}"] = targets & names
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"circle: {' -> '.join(error.args[1])}")


def test_deepspeed_is_imported_by_its_adapter_only() -> None:
    """Catches a second module that imports DeepSpeed and could break with its next version."""
    users = {m.name for m in modules() for name, _ in imports(m) if name.split(".")[0] == "deepspeed"}
    allowed = {f"engine.deepspeed_{name}" for name in ("adam", "adapter", "pipeline")}
    assert {"engine.deepspeed_adapter"} <= users <= allowed


def loaded_with(*starts: str, lazy: bool = False) -> set[str]:
    """Returns the top-level packages and megads' modules that importing modules loads; lazy: that they can load."""
    by_name = {f"megads.{module.name}".removesuffix(".__init__"): module for module in modules()}
    assert set(starts) <= set(by_name)
    found, waiting = set[str](), list(starts)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for imported in run_imports(by_name[name].tree, lazy) if name in by_name else ():
            parts = imported.split(".")
            packages = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            waiting += [one for one in packages if one in by_name] if parts[0] == "megads" else parts[:1]
    return found


def run_imports(tree: ast.AST, lazy: bool) -> Iterator[str]:
    """Yields the names that a module imports when it runs: not those for type checkers; lazy: inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from run_imports(node, lazy)


def code_lines(module: Module) -> int:
    """Counts lines without blank ones, comments and the docstrings of modules, classes and functions."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = set[int]()
    for node in ast.walk(module.tree):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(module.path.read_text().splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings for number, line in lines
    )


@pytest.mark.parametrize("closure", CLOSURES)
def test_what_training_imports_stays_within_its_ceiling(closure: str) -> None:
    """Catches an import that makes the code that can run in a training larger than CLOSURES allows.

    Whoever changes how a model is trained has to be able to read all of it. A change that raises a ceiling says so in
    its commit, with the reason; one that makes a closure smaller lowers its ceiling.
    """
    packages, lazy, max_files, max_lines = CLOSURES[closure]
    names = {f"megads.{module.name}".removesuffix(".__init__"): module for module in modules()}
    starts = [name for name in names if any(name == one or name.startswith(f"{one}.") for one in packages)]
    reached = [names[name] for name in loaded_with(*starts, lazy=lazy) & names.keys()]
    files, lines = len(reached), sum(map(code_lines, reached))
    assert files <= max_files and lines <= max_lines, f"{files} files, {lines} code lines"


@pytest.mark.parametrize("start", ["train", "engine.native_engine", "engine.scoring_engine", "launch.rank_server"])
def test_native_engine_loads_no_deepspeed(start: str) -> None:
    """Catches DeepSpeed on the import path of a run that does not use it: each rank would import it for 0.6 s."""
    assert "deepspeed" in loaded_with("megads.engine.zero_engine"), "the test follows imports"
    assert "deepspeed" not in loaded_with(f"megads.{start}")


def test_the_numbers_of_a_site_need_no_matplotlib() -> None:
    """Catches a traceback of `megads report site=... json=true` on a login node, whose Python has no matplotlib."""
    assert "matplotlib" in loaded_with("megads.tools.report.site_page"), "the test follows imports"
    assert "matplotlib" not in loaded_with("megads.tools.report.site")


def test_hydra_is_imported_by_the_command_line_only() -> None:
    """Catches an import of hydra outside the CLI, such as a rank that composes its own config."""
    assert importers("hydra") <= {"cli"}


def test_richs_console_is_used_in_one_place_only() -> None:
    """Catches a rich table whose cells reach the terminal unescaped: rich does not write through terminal_text."""
    users = [m.name for m in modules() for name, _ in imports(m) if name in ("rich.console.Console", "rich.print")]
    assert users == ["runtime.rich_console"]


def test_the_model_knows_no_process_group() -> None:
    """Catches sharding inside the model, which is the unsharded reference of every parity test."""
    assert "model" not in importers("torch.distributed")
    names = {
        ast.unparse(node)
        for m in modules()
        if m.package == "model"
        for node in ast.walk(m.tree)
        if isinstance(node, ast.Attribute)
    }
    assert not {name for name in names if name.startswith("torch.distributed")}


def test_os_environ_is_read_in_runtime_only() -> None:
    """Catches a setting that reaches a run through the environment instead of its frozen config."""
    wrong = []
    for module in modules():
        if module.package == "runtime":
            continue
        for node in ast.walk(module.tree):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if text in ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"):
                wrong.append(f"{module.name}:{node.lineno}")
        wrong += [f"{module.name}:{line}" for name, line in imports(module) if name in ("os.environ", "os.getenv")]
    assert wrong == []


def test_nothing_from_the_network_is_unpickled() -> None:
    """Catches object collectives and pickles between processes: unpickling runs code that the sender chose."""
    collectives = {
        f"{module.name}:{node.lineno} {ast.unparse(node)}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute | ast.Name)
        and re.search(r"(^|\.)\w+_object(_list)?$", ast.unparse(node))
        and re.search(r"gather|scatter|broadcast|send|recv", ast.unparse(node).rpartition(".")[2])
    }
    assert collectives == set()
    imported = [(module.name, name) for module in modules() for name, _ in imports(module)]
    # The exception class unpickles nothing.
    assert not [found for found in imported if found[1].split(".")[0] in PICKLES and found[1] != UNPICKLING_ERROR]


def test_a_class_name_means_one_thing() -> None:
    """Catches two classes of one name, such as a second Shard: a reader cannot tell which one is meant."""
    names: dict[str, list[str]] = {}
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, []).append(module.name)
    assert {name: found for name, found in names.items() if len(found) > 1} == {}


def test_no_global_statement() -> None:
    """Catches module-level state that two runs in one process would share."""
    assert [m.name for m in modules() if any(isinstance(node, ast.Global) for node in ast.walk(m.tree))] == []


def test_files_are_short() -> None:
    """Catches a file of more than MAX_FILE_LINES lines, and an exception that is no longer needed."""
    long = {m.name: m.lines for m in modules() if m.lines > MAX_FILE_LINES}
    assert {name: lines for name, lines in long.items() if lines > LONG_FILES.get(name, 0)} == {}
    assert set(LONG_FILES) <= set(long), "an exception that is no longer needed"


def test_functions_are_short() -> None:
    """Catches a function of more than MAX_FUNCTION_LINES lines, and an exception that is no longer needed."""
    long = {}
    for module in modules():
        for function in functions(module):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long[f"{module.name}.{function.name}"] = lines
    assert {name: lines for name, lines in long.items() if lines > LONG_FUNCTIONS.get(name, 0)} == {}
    assert set(LONG_FUNCTIONS) <= set(long), "an exception that is no longer needed"


def test_no_module_is_called_utils_or_the_like() -> None:
    """Catches a module whose name says nothing about its content, such as utils."""
    assert [m.name for m in modules() if DRAWER_NAMES & set(m.name.lower().split("."))] == []


def test_modules_and_public_names_are_documented() -> None:
    """Catches a module, public class or public function without a docstring."""
    missing = [m.name for m in modules() if not ast.get_docstring(m.tree)]
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                missing += [] if ast.get_docstring(node) else [f"{module.name}.{node.name}"]
    assert missing == []


def config_fields() -> list[tuple[str, bool]]:
    """Lists the fields of every config dataclass, and whether a docstring follows each."""
    found = []
    for module in modules():
        for node in module.tree.body:
            if not (isinstance(node, ast.ClassDef) and node.name.endswith("Config")):
                continue
            followers = [*node.body[1:], None]
            for item, follower in zip(node.body, followers, strict=True):
                if isinstance(item, ast.AnnAssign):
                    documented = isinstance(follower, ast.Expr) and isinstance(follower.value, ast.Constant)
                    found.append((f"{node.name}.{ast.unparse(item.target)}", documented))
    return found


def test_every_config_field_is_documented() -> None:
    """Catches a config key that users see in --cfg job but that has no docstring."""
    fields = config_fields()
    assert len(fields) > 40
    assert [name for name, documented in fields if not documented] == []


@pytest.mark.parametrize("folder", ["megads", "conf", "scripts", "tests"])
def test_nothing_names_a_machine(folder: str) -> None:
    """Catches a hard-coded path of a developer's machine."""
    home_like = ("/" + "work/", "/" + "home/", "/" + "root/")
    wrong = []
    for path in (PACKAGE.parent / folder).rglob("*"):
        if path.suffix in (".py", ".yaml", ".sh"):
            wrong += [str(path) for start in home_like if start in path.read_text()]
    assert wrong == []
