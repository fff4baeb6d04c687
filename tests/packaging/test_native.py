"""What the compiled library asks of others and gives them, read with nm and readelf."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

OBJECTS = sorted(
    (Path(__file__).parents[2] / "build" / f"cmake-{sys.implementation.cache_tag}" / "CMakeFiles").glob(
        "lrd_core_*.dir/**/*.o"
    )
)
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}


@pytest.fixture(scope="module")
def library():
    spec = importlib.util.find_spec("lrd_kernels._C")
    assert spec, "the compiled library is not built: make build"
    return spec.origin


def test_uses_no_unstable_symbol_of_torch(run_command, library):
    """The C++ functions of torch change from one version to the next, its stable C interface does not."""
    undefined = run_command("nm", "-DC", "--undefined-only", library).stdout.splitlines()
    assert any("torch_library_impl" in line for line in undefined)
    assert [line for line in undefined if re.search(r"(?<![\w:])(at|c10|torch|caffe2)::", line)] == []


def test_needs_libtorch_by_name_alone(run_command, library):
    """No path of the machine that built it."""
    dynamic = run_command("readelf", "-dW", library).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    assert "libtorch_cpu.so" in needed
    assert needed <= {"libtorch_cpu.so", *SYSTEM}
    assert not re.search(r"\((RPATH|RUNPATH)\)", dynamic)


def test_names_no_path_of_its_build(library):
    """Messages name files as they lie in the sources and in torch's headers."""
    contents = Path(library).read_bytes()
    assert b"csrc/cpu/tensors.h" in contents
    torch_include = Path(importlib.util.find_spec("torch").origin).parent
    for folder in (Path(__file__).parents[2], torch_include, Path(sys.prefix)):
        assert str(folder).encode() not in contents


def test_exports_its_entry_point_alone(run_command, library):
    """Weak symbols of the C++ library, which every shared object repeats, are left out."""
    exported = run_command("nm", "-D", "--defined-only", library).stdout
    markers = {"__bss_start", "_edata", "_end"}
    assert set(re.findall(r" [A-TX-Z] (\S+)", exported)) - markers == {"PyInit__C"}


@pytest.mark.skipif(not OBJECTS, reason="the build folder of this interpreter is not here: make build")
@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.parts[-4])
def test_instruction_sets_share_no_weak_symbol(run_command, path):
    """The linker keeps one of several equal weak symbols: it could be one with instructions an older CPU lacks."""
    isa = re.search(r"lrd_core_(\w+)\.dir", str(path)).group(1)
    defined = re.findall(r" (\w) (\S+)$", run_command("nm", "--defined-only", path).stdout, re.MULTILINE)
    own = f"3lrd{len(isa)}{isa}"
    assert any(own in name for _, name in defined)
    assert [name for kind, name in defined if kind in "WVuw" and own not in name] == []
