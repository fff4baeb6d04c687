"""The wheel of `make wheel`, built from a clean copy of the tree, audited, and used where nothing else of it is."""

import json
import re
import shutil
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

# The CUDA library is built where there is a compiler for it.
LIBRARIES = {"_C.abi3.so"} | ({"_C_cuda.abi3.so"} if shutil.which("nvcc") else set())
ARCHITECTURES = {75, 80, 86, 89, 90, 100, 120}

USE = """
import torch
import lrd_kernels as lrd
import lrd_uq

print(lrd.__file__, lrd_uq.__file__, sep="\\n")
loc, factor, diag = torch.zeros(100), torch.randn(100, 4, requires_grad=True), torch.rand(100) + 0.5
wanted = torch.distributions.LowRankMultivariateNormal(loc, factor, diag).log_prob(torch.ones(100))
got = lrd.log_prob(torch.ones(100), loc, factor, diag, backend="cpu")
torch.testing.assert_close(got, wanted)
torch.testing.assert_close(*(torch.autograd.grad(t, factor)[0] for t in (got, wanted)), rtol=1e-4, atol=1e-4)
with lrd.patch_torch():
    assert torch.distributions.LowRankMultivariateNormal(loc, factor, diag).log_prob(loc).isfinite()
"""


@pytest.fixture(scope="module")
def tree(project_files, root, tmp_path_factory):
    """A copy of what belongs to the project: nothing built, nothing ignored."""
    copy = tmp_path_factory.mktemp("tree")
    for file in project_files:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def wheel(tree, run_command):
    """The wheel, made in this environment: `-o` keeps make from setting up another."""
    stale = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "lrd_kernels"
    stale.mkdir(parents=True)
    (stale / "of_an_earlier_build.py").touch()
    run_command("make", "-o", f"{sys.prefix}/.installed", "wheel", f"VENV={sys.prefix}", cwd=tree)
    (wheel,) = (tree / "dist").iterdir()
    return wheel


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_name_says_abi3_and_manylinux(wheel):
    assert re.fullmatch(r"lrd_kernels-[\d.]+-cp310-abi3-manylinux_\d+_\d+_x86_64\.whl", wheel.name)


def test_holds_both_packages_and_the_libraries(unpacked, project_files):
    held = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    ours = r"lrd_kernels/.*(\.py|py\.typed)|python/lrd_uq/.*(\.py|\.yaml|py\.typed|fit_help\.txt)"
    sources = {file for file in map(str, project_files) if re.fullmatch(ours, file)}
    wanted = {file.removeprefix("python/") for file in sources} | {f"lrd_kernels/{library}" for library in LIBRARIES}
    assert {file for file in held if ".dist-info/" not in file} == wanted


def test_metadata_asks_for_torch_and_numpy_alone(unpacked):
    (file,) = unpacked.glob("*.dist-info/METADATA")
    metadata = message_from_bytes(file.read_bytes())
    always = {need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need}
    assert always == {"torch>=2.10", "numpy"}
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "BSD-3-Clause"


def test_torch_abi_is_stable_from_2_10_on(unpacked, run_command):
    report = run_command(tool("torch-abi-audit"), "--json", "--check", "both", unpacked / "lrd_kernels")
    extensions = json.loads(report.stdout)["extensions"]
    assert {Path(extension["path"]).name for extension in extensions} == LIBRARIES
    for extension in extensions:
        assert extension["torch"]["stable"]
        assert extension["torch"]["min_torch_version"] == "2.10.0"
        assert extension["cpython"] == {"intent": True, "compliant": True, "violations": []}


def test_python_abi_is_limited(wheel, run_command):
    report = json.loads(run_command(tool("abi3audit"), "--strict", "--report", wheel).stdout)
    ((_, result),) = report["specs"].items()
    assert {audited["name"] for audited in result["wheel"]} == LIBRARIES
    for audited in result["wheel"]:
        assert audited["result"]["is_abi3"]
        assert audited["result"]["non_abi3_symbols"] == []
        assert audited["result"]["future_abi3_objects"] == {}
        assert audited["result"]["baseline"] == "3.10"
        assert audited["result"]["is_abi3_baseline_compatible"]


@pytest.mark.skipif("_C_cuda.abi3.so" not in LIBRARIES, reason="nvcc is not installed: the wheel has no CUDA kernels")
def test_cuda_library_has_machine_code_for_every_gpu(unpacked, run_command):
    from emulated_cuda import find_cuobjdump

    library = unpacked / "lrd_kernels/_C_cuda.abi3.so"
    held = run_command(find_cuobjdump(), "--list-elf", "--list-ptx", library).stdout
    assert {int(number) for number in re.findall(r"sm_(\d+)\.cubin", held)} == ARCHITECTURES
    assert "sm_75.ptx" in held


def test_auditwheel_agrees_with_the_name(wheel, run_command):
    said = " ".join(run_command(tool("auditwheel"), "show", wheel).stdout.split())
    platform = re.search(r"manylinux_\d+_\d+_x86_64", wheel.name).group()
    assert f'constrains the platform tag to "{platform}"' in said


@pytest.fixture(scope="module")
def elsewhere(wheel, run_command, tmp_path_factory):
    """The interpreter of a fresh environment with the wheel in it; torch is this environment's."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run_command(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env/bin/python"
    run_command(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    # A path added this way comes after the environment's own, and its .pth files (an editable install) are not read.
    (site / "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_serves_where_it_is_installed(elsewhere, run_command, tmp_path):
    where = run_command(elsewhere, "-I", "-c", USE, cwd=tmp_path).stdout.split()
    assert all(Path(path).is_relative_to(elsewhere.parents[1]) for path in where)
    assert len(where) == 2


def test_reports_on_itself_where_it_is_installed(elsewhere, run_command, tmp_path):
    report = run_command(elsewhere, "-I", "-m", "lrd_kernels.info", cwd=tmp_path).stdout
    assert "cpu        yes" in report
    assert torch.version.cuda or "cuda       no   CUDA kernels need a torch that was built for CUDA" in report
    assert "self-test against the reference: passed" in report


def tool(name):
    """A program of this environment."""
    return Path(sys.executable).with_name(name)
